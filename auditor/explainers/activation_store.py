"""Activation store: a layer's output for many images, written in one pass and read back image by image, from disk.

Memory holds what is read at a time: one class. Of every class at most ``per_class`` images are stored, each image of
the class with the same chance, so that the file grows with the images up to a bound.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from auditor.errors import DataError


class ActivationStore:
    """Native outputs of one layer by row of the data, in a temporary file that is gone when it is closed."""

    def __init__(self, per_class: int, seed: int) -> None:
        self.per_class = per_class
        self._rng = np.random.default_rng(seed)
        self._file = tempfile.TemporaryFile(prefix="auditor-")  # noqa: SIM115 - closed by `close`
        self._slot_of: dict[int, int] = {}  # row of the data -> slot of the file
        self._rows: dict[int, list[int]] = defaultdict(list)  # class -> rows
        self.counts: dict[int, int] = defaultdict(int)  # class -> images met, stored or not
        self._shape: tuple[int, ...] = ()
        self._dtype = torch.float32

    def __enter__(self) -> ActivationStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._slot_of)

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    @property
    def classes(self) -> list[int]:
        """Classes with at least one image, in order."""
        return sorted(self._rows)

    def rows_of(self, index: int) -> list[int]:
        """Return the rows stored of a class, in order."""
        return sorted(self._rows.get(index, []))

    def __contains__(self, row: int) -> bool:
        return row in self._slot_of

    def put(self, rows: Sequence[int], classes: Sequence[int], z: Tensor) -> None:
        """Store outputs ``z`` (batch, …) of rows of the data whose classes are given."""
        self._shape, self._dtype = tuple(z.shape[1:]), z.dtype
        for row, index, value in zip(rows, classes, z.detach().cpu().contiguous(), strict=True):
            self.counts[index] += 1
            stored = self._rows[index]
            if len(stored) < self.per_class:
                slot = len(self._slot_of)
                stored.append(row)
            else:
                drawn = int(self._rng.integers(self.counts[index]))
                if drawn >= self.per_class:
                    continue
                slot = self._slot_of.pop(stored[drawn])
                stored[drawn] = row
            self._slot_of[row] = slot
            self._write(slot, value.numpy().tobytes())

    def read(self, rows: Sequence[int]) -> Tensor:
        """Return the outputs of rows, (rows, …), in the order asked for."""
        out = torch.empty((len(rows), *self._shape), dtype=self._dtype)
        size = self._size
        flat = out.numpy().reshape(-1).view(np.uint8).reshape(len(rows), size)
        for i, row in enumerate(rows):
            content = os.pread(self._file.fileno(), size, self._slot_of[row] * size)
            flat[i] = np.frombuffer(content, np.uint8)
        return out

    @property
    def _size(self) -> int:
        return int(np.prod(self._shape)) * self._dtype.itemsize

    def _write(self, slot: int, content: bytes) -> None:
        try:
            written = os.pwrite(self._file.fileno(), content, slot * self._size)
        except OSError as error:
            written, reason = -1, str(error)
        else:
            reason = "no room is left"
        if written != len(content):
            raise DataError(
                f"activations of {len(self._slot_of)} images, {self._size / 1e6:.1f} MB each, do not fit into "
                f"{tempfile.gettempdir()} ({reason}); set TMPDIR to a folder with more room, or take fewer images."
            )
