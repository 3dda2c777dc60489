"""Portions of a batch: as many images at once as the graph and the memory of a GPU take.

A GPU that runs out of memory is no reason to stop: the portion is halved, this is said once, and the pass is made
again. From then on the smaller portion holds for this subject.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from auditor.errors import ModelError

log = logging.getLogger(__name__)
T = TypeVar("T")


class Portions:
    """How many rows go through the network at once; ``most`` is None as long as any number does.

    >>> def network(x):
    ...     if len(x) > 3:
    ...         raise torch.OutOfMemoryError("CUDA out of memory")
    ...     return x.sum(1)
    >>> portions = Portions()
    >>> [len(part) for part in portions.map(network, torch.ones(8, 2))], portions.most
    ([2, 2, 2, 2], 2)
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self._is_reported = False

    def map(self, run: Callable[[Tensor], T], rows: Tensor, most: int | None = None) -> list[T]:
        """Return ``run`` of each portion of ``rows``, in order; ``most`` bounds this call further."""
        results: list[T] = []
        at, n_rows = 0, int(rows.shape[0])
        while at < n_rows or not results:
            sizes = [n for n in (self.most, most, n_rows - at) if n is not None]
            size = max(min(sizes), 1)
            part = rows if size >= n_rows else rows[at : at + size]  # Gaussian moments cannot be sliced
            result = self._run(run, part, size)
            if result is not None:
                results.append(result[0])
                at += size
        return results

    def _run(self, run: Callable[[Tensor], T], part: Tensor, size: int) -> tuple[T] | None:
        """Return the result, or None where memory ran out and the portion is smaller now.

        What is raised holds the frames that hold the tensors: memory is free again only when it has been dropped.
        """
        try:
            return (run(part),)
        except torch.OutOfMemoryError as error:
            if size == 1:
                raise ModelError(
                    "the GPU has not enough free memory for a single image; end what else runs on it, or take "
                    "--device cpu."
                ) from error
        self._halve(size)
        return None

    def _halve(self, size: int) -> None:
        self.most = max(1, size // 2)
        if not self._is_reported:
            log.warning("the GPU ran out of memory with %d images at once; fewer go at once from here on", size)
            self._is_reported = True
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def joined(parts: list[Tensor]) -> Tensor:
    """Return the results of portions as one tensor, without a copy where there is one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
