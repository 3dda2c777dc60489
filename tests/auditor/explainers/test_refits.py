"""Refits: what the factorization gives from a random start, and its errors with their place."""

import pytest
import torch

from auditor.errors import NumericsError
from auditor.explainers.refits import Refit
from auditor.kernels.factorization.nmf import factorize
from auditor.runners.runner import LocalRunner


def test_every_seed_gives_the_factorization_of_that_start():
    X = torch.rand(7, 31, generator=torch.Generator().manual_seed(0))
    fits = list(LocalRunner().map(Refit(X, 3, 50, 1e-6), range(2)))
    for seed, fit in enumerate(fits):
        assert torch.equal(fit.W, factorize(X, 3, seed=seed, init="random", max_iter=50, tol=1e-6).W)
    assert not torch.equal(fits[0].W, fits[1].W)


def test_an_error_says_of_what():
    with pytest.raises(NumericsError, match="layer 'x': "):
        Refit(torch.full((4, 9), float("nan")), 2, what="layer 'x': ")(0)
