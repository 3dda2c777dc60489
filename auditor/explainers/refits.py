"""Refits: the same factorization from other, random starts, each wherever a runner has room."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from auditor.errors import NumericsError
from auditor.kernels.factorization.nmf import Factorization, factorize
from auditor.runners.runner import as_many_threads


@dataclass(frozen=True)
class Refit:
    """Factorizes columns X (channels, n) from a random start of a seed.

    >>> Refit(torch.rand(4, 20), 2, max_iter=5)(seed=1).W.shape
    torch.Size([4, 2])
    """

    X: Tensor
    rank: int
    max_iter: int = 300
    tol: float | None = None
    signed: bool = False
    what: str = ""  # in front of what an error says
    threads: int = field(default_factory=torch.get_num_threads)

    def __call__(self, seed: int) -> Factorization:
        """Return the factorization."""
        try:
            with as_many_threads(self.threads):
                refit = partial(factorize, seed=seed, init="random", max_iter=self.max_iter, signed=self.signed)
                return refit(self.X, self.rank) if self.tol is None else refit(self.X, self.rank, tol=self.tol)
        except ValueError as error:
            raise NumericsError(f"{self.what}{error}") from error
