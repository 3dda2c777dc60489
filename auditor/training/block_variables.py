"""The per-sample variables of Block-ADMM, Z_t and U_t for every training sample, in memory or in a mapped file.

Their size is known before training starts, so a run that would not fit is refused with the figure, not killed half-way.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from auditor.errors import OptionError

GIB = 2**30


class Variables:
    """Named tensors (samples, *shape) that survive from visit to visit; ``folder`` puts them into mapped files."""

    def __init__(self, n: int, shapes: dict[str, torch.Size], like: Tensor, folder: Path | None = None) -> None:
        self.folder = folder
        self._tensors: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            if folder is None:
                self._tensors[name] = torch.zeros(n, *shape, dtype=like.dtype, device=like.device)
                continue
            folder.mkdir(parents=True, exist_ok=True)
            kind = np.dtype(str(like.dtype).removeprefix("torch."))
            # a new file each time: mode w+ is zero-filled and sparse until written
            mapped = np.memmap(folder / f"{name}.bin", dtype=kind, mode="w+", shape=(n, *shape))
            self._tensors[name] = torch.from_numpy(mapped)
        self._device = like.device

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def read(self, name: str, rows: Tensor) -> Tensor:
        """Return a copy of those samples on the training device."""
        tensor = self._tensors[name]
        return tensor[rows.to(tensor.device)].to(self._device)

    def write(self, name: str, rows: Tensor, value: Tensor) -> None:
        """Store those samples."""
        tensor = self._tensors[name]
        tensor[rows.to(tensor.device)] = value.to(tensor.device, tensor.dtype)

    def swap(self, name: str, value: Tensor) -> None:
        """Copy a whole variable in, as a checkpoint has it."""
        self._tensors[name].copy_(value)

    def close(self) -> None:
        """Drop the mapped files; the variables are lost."""
        names, self._tensors = list(self._tensors), {}
        if self.folder is not None:
            for name in names:
                (self.folder / f"{name}.bin").unlink(missing_ok=True)
            with suppress(OSError):
                self.folder.rmdir()


def variables_bytes(n: int, shapes: dict[str, torch.Size], itemsize: int) -> int:
    """Return the size of all variables.

    >>> variables_bytes(60000, {"U1": torch.Size([128]), "U2": torch.Size([10])}, 4)
    33120000
    """
    return sum(n * math.prod(shape) * itemsize for shape in shapes.values())


def size_text(n_bytes: float) -> str:
    """Return a size as a person says it.

    >>> size_text(1000), size_text(33120000), size_text(3 * GIB)
    ('1.0 KiB', '31.6 MiB', '3.0 GiB')
    """
    for unit, name in ((GIB, "GiB"), (2**20, "MiB")):
        if n_bytes >= unit / 2:
            return f"{n_bytes / unit:.1f} {name}"
    return f"{n_bytes / 1024:.1f} KiB"


def check_room(
    needed: int, like: Tensor, folder: Path | None, limit: int | None, where: str, mappable: bool = True
) -> None:
    """Refuse variables that will not fit, before anything is made; ``mappable`` ones could go to a file."""
    have = limit if limit is not None else room(like, folder)
    if needed > have:
        medium = f"on the disk of {folder}" if folder is not None else f"in the memory of {like.device}"
        in_memory = "keep them in a file (variables=FOLDER)" if mappable else "train by block-admm, which needs fewer"
        help_ = "free some space" if folder is not None else in_memory
        raise OptionError(
            f"{where}: the decoupling variables and duals need {size_text(needed)} and {size_text(have)} are "
            f"free {medium}; {help_}, use fewer samples, or fewer blocks."
        )


def room(like: Tensor, folder: Path | None) -> int:
    """Return the bytes that are free: on disk for a folder, on the GPU or in main memory otherwise."""
    if folder is not None:
        existing = next((p for p in (folder, *folder.absolute().parents) if p.exists()), Path("/"))
        return shutil.disk_usage(existing).free
    if like.is_cuda:
        return int(torch.cuda.mem_get_info(like.device)[0])
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 2**62  # unknown here: nothing to compare with


def names_of(prefix: str, shapes: Sequence[torch.Size]) -> dict[str, torch.Size]:
    """Return ``prefix1``, ``prefix2`` … with the shapes of the blocks' outputs."""
    return {f"{prefix}{t}": shape for t, shape in enumerate(shapes, 1)}
