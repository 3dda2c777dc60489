"""Examples: a layer's activations with logits and labels, read once and held in little memory.

Up to `IN_MEMORY` bytes activations stay as they are. Beyond that they are held in half precision, and beyond twice
that in a memory-mapped file without a name, which the kernel may drop from memory and which is gone with the process.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from auditor.errors import DataError
from auditor.explainers.fitted_images import FittedImages

IN_MEMORY = 512 * 2**20  # bytes of activations
LARGEST_HALF = 65_504.0  # what half precision can hold


@dataclass(frozen=True)
class Examples:
    """Activations, logits and labels (-1: unknown) of a set of images, and which to learn, choose and report on."""

    Z: Tensor  # (examples, dims) or (examples, channels, height, width), in float32 or half precision
    logits: Tensor
    labels: Tensor
    parts: FittedImages

    def positives(self, classes: Sequence[int]) -> Tensor:
        """Return (classes, examples): of the class by label, by the model's own prediction where there is none."""
        classes_of_rows = torch.where(self.labels >= 0, self.labels, self.logits.argmax(1))
        return classes_of_rows == torch.as_tensor(list(classes)).unsqueeze(1)

    def part(self, rows: Tensor) -> Examples:
        """Return the examples that ``rows`` selects."""
        return Examples(self.Z[rows].float(), self.logits[rows], self.labels[rows], self.parts.rows(rows))

    @property
    def learned(self) -> Examples:
        """The examples to learn from."""
        return self.part(self.parts.learn)

    @property
    def trial_rows(self) -> Tensor:
        """Which examples choose the best epoch; those learned from where there are none."""
        return self.parts.choose if bool(self.parts.choose.any()) else self.parts.learn

    @property
    def report_rows(self) -> Tensor:
        """Which examples to report on; all of them where none could be held out."""
        return self.parts.report if bool(self.parts.report.any()) else torch.ones(len(self.Z), dtype=torch.bool)

    @property
    def trial(self) -> Examples:
        """The examples that choose the best epoch."""
        return self.part(self.trial_rows)

    @property
    def reported(self) -> Examples:
        """The examples to report on."""
        return self.part(self.report_rows)


class ActivationRows:
    """Takes activations batch by batch and gives them back as one tensor, in memory, half precision or a file."""

    def __init__(self, n: int, in_memory: int | None = None) -> None:
        self.n, self.in_memory = n, IN_MEMORY if in_memory is None else in_memory
        self._Z: Tensor | None = None
        self._filled = 0

    def put(self, z: Tensor) -> None:
        """Take the activations of the next images, (batch, …)."""
        if self._Z is None:
            self._Z = self._allocate(z)
        if self._Z.dtype == torch.float16 and float(z.abs().max()) > LARGEST_HALF:
            wide = self._room(z.shape[1:], torch.float32, 2 * self.in_memory)
            wide[: self._filled] = self._Z[: self._filled]
            self._Z = wide
        stop = self._filled + len(z)
        self._Z[self._filled : stop] = z
        self._filled = stop

    def tensor(self) -> Tensor:
        """Return all that was put in; nothing put in is an empty tensor."""
        return torch.empty(0) if self._Z is None else self._Z[: self._filled]

    def _allocate(self, z: Tensor) -> Tensor:
        if self.n * z[0].numel() * 4 <= self.in_memory:
            return torch.empty(self.n, *z.shape[1:])
        return self._room(z.shape[1:], torch.float16, self.in_memory)

    def _room(self, shape: Sequence[int], dtype: torch.dtype, in_memory: int) -> Tensor:
        """Return room for all images, in a file beyond ``in_memory`` bytes."""
        whole = (self.n, *shape)
        if self.n * int(np.prod(shape)) * dtype.itemsize <= in_memory:
            return torch.empty(whole, dtype=dtype)
        n_bytes = self.n * int(np.prod(shape)) * dtype.itemsize
        with tempfile.TemporaryFile(prefix="auditor-") as file:  # the mapping keeps it alive
            try:
                os.posix_fallocate(file.fileno(), 0, n_bytes)  # a mapped file that finds no room later ends the process
            except OSError as error:
                raise DataError(
                    f"xnn: activations of {self.n} images take {n_bytes / 1e9:.1f} GB, which {tempfile.gettempdir()} "
                    f"does not have ({error}); set TMPDIR to a folder with more room, or lower max_images."
                ) from None
            kind = np.float16 if dtype == torch.float16 else np.float32
            return torch.from_numpy(np.memmap(file, dtype=kind, mode="r+", shape=whole))
