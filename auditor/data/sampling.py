"""Sampling: a choice of images that is spread over the classes, follows from a seed, and can be described in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Sample:
    """Which rows of a source were taken, in order; ``per_class`` counts them by class, without those of no label."""

    rows: Array
    total: int
    per_class: tuple[int, ...]
    seed: int | None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def words(self) -> str:
        """Return what was taken.

        >>> stratified([0] * 9 + [1] * 90, 10, seed=3).words
        '10 of 99 images, 5 of each of 2 classes, seed 3'
        >>> stratified([-1] * 1155, 200).words
        '200 of 1,155 images, drawn without regard to classes since they have no labels, seed 0'
        """
        how = [f"{len(self):,} of {self.total:,} images"]
        if self.per_class:
            low, high = min(self.per_class), max(self.per_class)
            each = f"{low:,}" if low == high else f"{low:,} to {high:,}"
            n = len(self.per_class)
            how.append(f"{each} of each of {n:,} classes" if n > 1 else "all of one class")
            unlabelled = len(self) - sum(self.per_class)
            if unlabelled:
                how.append(f"{unlabelled:,} without a label")
        elif len(self) < self.total:
            how.append("drawn without regard to classes since they have no labels")
        if self.seed is not None and len(self) < self.total:
            how.append(f"seed {self.seed}")
        return ", ".join(how)


def shares(sizes: Sequence[int], n: int) -> list[int]:
    """Return how many to take of groups of these sizes so that ``n`` are taken in all, as evenly as the sizes allow.

    A group that is too small gives all it has and the others give more; what is left over goes to the first groups.

    >>> shares([3, 50, 50], 43), shares([5, 5], 3)
    ([3, 20, 20], [2, 1])
    """
    counts = [0] * len(sizes)
    left = min(n, sum(sizes))
    while left:
        open_groups = [i for i, size in enumerate(sizes) if counts[i] < size]
        step = left // len(open_groups)
        if step == 0:
            for i in open_groups[:left]:
                counts[i] += 1
            break
        for i in open_groups:
            more = min(step, sizes[i] - counts[i])
            counts[i] += more
            left -= more
    return counts


def one_of_each_run(total: int, n: int, seed: int = 0) -> Array:
    """Return ``n`` of ``total`` rows: one at random from each of ``n`` runs of neighbours of equal length.

    >>> one_of_each_run(9, 3, seed=1).tolist(), one_of_each_run(2, 3).tolist()
    ([1, 4, 8], [0, 1])
    """
    if n >= total:
        return np.arange(total)
    edges = np.arange(n + 1) * total // n
    return edges[:-1] + np.random.default_rng(seed).integers(0, edges[1:] - edges[:-1])


def stratified(labels: Any, n: int, seed: int = 0) -> Sample:
    """Return ``n`` rows, as many of every class as can be had, drawn at random within each; all rows where n is more.

    ``labels`` (rows,) are class numbers; rows below 0 have none and count as a class of their own. Which classes give
    one more where ``n`` does not divide evenly is drawn too.
    """
    of_row = np.asarray(labels, dtype=np.int64).reshape(-1)
    classes, class_of, sizes = np.unique(np.maximum(of_row, -1), return_inverse=True, return_counts=True)
    if n >= len(of_row):
        rows = np.arange(len(of_row))
    else:
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(classes))
        take = np.zeros(len(classes), dtype=np.int64)
        take[order] = shares([int(s) for s in sizes[order]], n)
        parts = [rng.permutation(np.flatnonzero(class_of == k))[: take[k]] for k in range(len(classes))]
        rows = np.sort(np.concatenate(parts)) if parts else np.arange(0)
    counts = [int((class_of[rows] == k).sum()) for k, label in enumerate(classes) if label >= 0]
    return Sample(rows, len(of_row), tuple(c for c in counts if c), seed)
