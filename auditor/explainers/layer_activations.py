"""Harvest: activations of one layer as channels by positions, sampled uniformly in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from auditor.data.source import Batch, Data
from auditor.errors import NumericsError
from auditor.progress import Progress
from auditor.runners.image_runs import counted, over_batches
from auditor.subject.layers import Layout
from auditor.subject.subject import Subject

MOST_NUMBERS = 2_500_000  # of the images of one pass: 16 photos at 224; more are no faster and take gigabytes


class Reservoir:
    """Keeps at most ``size`` columns of all that are put in, each with the same chance, whatever the batches were.

    Every column draws a random key in the order of arrival; the smallest keys stay. Memory is at most twice the size.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self._rng = np.random.default_rng(seed)
        self._columns: list[Tensor] = []
        self._keys: list[Tensor] = []
        self._held = 0

    def put(self, columns: Tensor) -> None:
        """Take columns (channels, n)."""
        keys = torch.from_numpy(self._rng.random(columns.shape[1]))
        if self._held >= self.size and self._keys:
            near = keys < self._keys[0].max()  # after a prune the first entry holds the smallest keys
            columns, keys = columns[:, near], keys[near]
        self._columns.append(columns)
        self._keys.append(keys)
        self._held += columns.shape[1]
        if self._held > 2 * self.size:
            self._prune()

    def columns(self) -> Tensor:
        """Return what was kept, (channels, at most size), in the order of arrival."""
        self._prune()
        return self._columns[0]

    def _prune(self) -> None:
        columns, keys = torch.cat(self._columns, dim=1), torch.cat(self._keys)
        if keys.numel() > self.size:
            keep = keys.topk(self.size, largest=False).indices.sort().values
            columns, keys = columns[:, keep], keys[keep]
        self._columns, self._keys, self._held = [columns.contiguous()], [keys], keys.numel()


@dataclass(frozen=True)
class LayerPass:
    """Runs the network on a batch up to its logits, and keeps what one layer puts out."""

    layer: str
    with_images: bool

    def __call__(self, subject: Subject, batch: Batch, positions: Tensor) -> tuple[Batch, Tensor, Tensor]:
        """Return the batch, its logits and activations; NaN and infinite activations are an error."""
        with torch.no_grad():
            logits, activations = subject.run(subject.in_fast_layout(batch.images), [self.layer])
        z = activations[self.layer].contiguous()
        bad = int((~torch.isfinite(z)).flatten(1).any(1).sum())
        if bad:
            raise NumericsError(
                f"layer {self.layer!r}: {bad} of {len(batch)} images give NaN or infinite activations (batch that "
                f"starts with {batch.ids[0]}); correct the model or its preprocessing first."
            )
        return batch if self.with_images else replace(batch, images=batch.images[:, :0]), logits, z


def harvest(
    subject: Subject,
    data: Data,
    layer: str,
    *,
    batch_size: int,
    progress: Progress,
    with_images: bool = True,
) -> Iterator[tuple[Batch, slice, Tensor, Tensor]]:
    """Yield batch, its rows of the data, logits and activations; NaN and infinite activations are an error.

    A pass takes ``batch_size`` images, fewer where they are large, in the layout that a CPU convolves fastest. Whoever
    needs no pixels says so, since they travel where a cluster does the passes.
    """
    start = 0
    at_once = max(8, MOST_NUMBERS // math.prod(subject.input_shape))
    report = counted(progress, "reading activations", len(data))
    work = LayerPass(layer, with_images)
    for part in over_batches(work, subject, data, batch_size=min(batch_size, at_once), progress=report):
        batch, logits, z = part.given
        rows = slice(start, start + len(batch))
        start = rows.stop
        yield batch, rows, logits.to(subject.device), z.to(subject.device)


def as_columns(layout: Layout, z: Tensor) -> Tensor:
    """Return activations (batch, …) as one matrix (channels, batch * positions)."""
    p = layout.to_positions(z)
    return p.permute(1, 0, 2).reshape(p.shape[1], -1)


def check_varies(layer: str, X: Tensor) -> None:
    """Raise when a layer puts out the same everywhere: columns X (channels, n) then hold nothing to factorize."""
    if X.shape[1] > 1 and float((X - X[:, :1]).abs().max()) <= 1e-6 * float(X.abs().max()):
        raise NumericsError(
            f"layer {layer!r}: its activations are constant, the same at every position of all images, so they hold no "
            "concepts; take another layer (auditor layers lists them)."
        )
