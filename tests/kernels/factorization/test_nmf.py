import numpy as np
import pytest
import torch
from sklearn.decomposition import NMF

from auditor.kernels.factorization.coordinate_descent import multiply, multiply_reference, sweep, sweep_reference
from auditor.kernels.factorization.nmf import Factorization, Status, factorize, kkt_residual


def low_rank(channels, positions, rank, seed=0, noise=0.1, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    W = torch.rand(channels, rank, generator=g, dtype=dtype).sub(0.4).clamp_min(0)
    S = torch.rand(rank, positions, generator=g, dtype=dtype).sub(0.6).clamp_min(0)
    return W @ S + noise * torch.rand(channels, positions, generator=g, dtype=dtype)


@pytest.mark.parametrize("shape", [(13, 17), (1, 1), (5, 1), (1, 9), (64, 1030), (7, 600)])
@pytest.mark.parametrize("n_sweeps", [1, 3])
@pytest.mark.parametrize("rank", [1, 3, 4, 9])
def test_fast_sweep_equals_the_formula(shape, rank, n_sweeps):
    g = torch.Generator().manual_seed(rank)
    W = torch.randn(shape[0], rank, generator=g, dtype=torch.float64)
    W[:, rank // 2] *= float(rank != 3)  # one dead component
    X = torch.randn(*shape, generator=g, dtype=torch.float64)
    F = torch.rand(rank, shape[1], generator=g, dtype=torch.float64)
    before = F.clone()
    fast, plain = sweep(F, W.T @ X, W.T @ W, n_sweeps), sweep_reference(F, W.T @ X, W.T @ W, n_sweeps)
    torch.testing.assert_close(fast, plain, rtol=1e-10, atol=1e-10)  # the order of a rank-long sum differs
    assert torch.equal(F, before)


@pytest.mark.parametrize("solver", ["hals", "mu"])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(("channels", "positions", "rank"), [(13, 17, 4), (13, 17, 1), (6, 1, 1), (1, 8, 1), (9, 5, 5)])
def test_objective_never_rises_and_is_the_true_one(solver, signed, channels, positions, rank):
    X = low_rank(channels, positions, 3) - (0.3 if signed else 0)
    X[0] *= float(channels < 3)  # an empty row
    fit = factorize(X, rank, solver=solver, signed=signed, tol=0, max_iter=200)
    assert all(b <= a for a, b in zip(fit.objective, fit.objective[1:], strict=False))
    true = float(((X - fit.W @ fit.S) ** 2).sum())
    assert fit.objective[-1] == pytest.approx(true, rel=1e-6, abs=1e-10 * float((X**2).sum()))
    assert fit.relative_error == pytest.approx((true / float((X**2).sum())) ** 0.5, abs=1e-7)
    assert fit.S.min() >= 0
    assert signed or fit.W.min() >= 0
    assert fit.W.shape == (channels, rank)
    assert fit.S.shape == (rank, positions)


@pytest.mark.parametrize("signed", [False, True])
def test_semi_and_plain_rank_one_are_exact(signed):
    X = torch.outer(torch.tensor([1.0, 2.0, 0.5]), torch.tensor([3.0, 0.0, 1.0, 2.0])).double()
    fit = factorize(X, 1, signed=signed, max_iter=3, tol=0)
    assert fit.relative_error < 1e-10
    torch.testing.assert_close(fit.W.norm(dim=0), torch.ones(1).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_at_least_as_good_as_sklearn(dtype):
    X = low_rank(40, 300, 8, dtype=dtype)
    peer = NMF(6, solver="cd", init="nndsvda", tol=1e-6, max_iter=500, random_state=0).fit(X.numpy())
    fit = factorize(X, 6, tol=1e-6, max_iter=500)
    assert fit.relative_error <= 1.01 * peer.reconstruction_err_ / float(X.norm())


def test_long_run_reaches_a_stationary_point():
    X = low_rank(13, 57, 4)
    fit = factorize(X, 4, tol=1e-13, max_iter=20_000)
    assert fit.status is Status.CONVERGED
    assert fit.kkt < 1e-4
    assert fit.kkt < 1e-2 * factorize(X, 4, max_iter=2, tol=0).kkt
    assert fit.kkt == pytest.approx(kkt_residual(1000 * X, fit.W * 7, fit.S * 1000 / 7), rel=1e-3, abs=1e-9)


def test_same_seed_same_bytes_other_seed_other_bytes():
    X = low_rank(32, 2000, 5, dtype=torch.float32)
    one, two, other = (factorize(X, 5, seed=s, init="random", max_iter=5) for s in (3, 3, 4))
    assert torch.equal(one.W, two.W)
    assert torch.equal(one.S, two.S)
    assert not torch.equal(one.W, other.W)


def test_warm_start_goes_on_where_it_stopped():
    X = low_rank(13, 57, 4)
    first = factorize(X, 4, max_iter=10, tol=0)
    second = factorize(X, 4, max_iter=10, tol=0, W0=first.W, S0=first.S)
    assert second.objective[0] == pytest.approx(first.objective[-1], rel=1e-9)
    assert second.objective[-1] < first.objective[-1]


def test_dead_component_comes_back():
    X = low_rank(13, 57, 6, noise=0.0)
    start = factorize(X, 3, max_iter=20, tol=0)
    W0 = torch.cat([start.W, torch.zeros(13, 1).double()], dim=1)
    S0 = torch.cat([start.S, torch.zeros(1, 57).double()])
    fit = factorize(X, 4, W0=W0, S0=S0, max_iter=50, tol=0)
    assert fit.S[3].max() > 0
    assert fit.objective[-1] < 0.9 * start.objective[-1]


def test_all_zeros_and_constant():
    fit = factorize(torch.zeros(4, 6), 2)
    assert isinstance(fit, Factorization)
    assert fit.relative_error == 0
    assert torch.isfinite(fit.W).all()
    assert fit.S.abs().max() == 0
    assert factorize(torch.ones(4, 6), 2).relative_error < 1e-5


def test_on_step_sees_every_iteration():
    seen = []
    fit = factorize(low_rank(13, 17, 4), 3, max_iter=7, tol=0, on_step=lambda t, f: seen.append((t, f)))
    assert [t for t, _ in seen] == list(range(1, 8))
    assert [f for _, f in seen] == fit.objective[1:]
    assert fit.status is Status.STEP_LIMIT


@pytest.mark.parametrize(
    ("X", "rank", "sentence"),
    [
        (torch.tensor([[1.0, -2.0], [1.0, 1.0]]), 1, "non-negative, got a smallest value of -2"),
        (torch.tensor([[1.0, np.nan], [1.0, 1.0]]), 1, "must be finite"),
        (torch.tensor([[1.0, np.inf], [1.0, 1.0]]), 1, "must be finite"),
        (torch.ones(3, 5), 4, "got rank 4 for 3 x 5"),
        (torch.ones(3, 5), 0, "got rank 0"),
        (torch.ones(3), 1, "must be \\(channels, positions\\)"),
    ],
)
def test_bad_input_gets_one_sentence(X, rank, sentence):
    with pytest.raises(ValueError, match=sentence):
        factorize(X, rank)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("init", ["auto", "columns", "random"])
def test_many_positions_start_on_samples_and_end_as_well(signed, init):
    X = low_rank(24, 3000, 5, dtype=torch.float32) - (0.2 if signed else 0)
    fit = factorize(X, 4, signed=signed, init=init)
    plain = factorize(
        X, 4, signed=signed, W0=torch.rand(24, 4, generator=torch.Generator().manual_seed(1)), max_iter=500
    )
    assert fit.relative_error <= 1.02 * plain.relative_error
    assert all(b <= a for a, b in zip(fit.objective, fit.objective[1:], strict=False))


def test_high_rank_and_target_error():
    X = low_rank(90, 150, 80, dtype=torch.float32)
    fit = factorize(X, 70, target_error=0.05)
    assert fit.relative_error <= 0.05 * (1 + 1e-4)
    assert fit.status is Status.CONVERGED
    assert fit.n_iter < factorize(X, 70, target_error=0.02, max_iter=500).n_iter


@pytest.mark.parametrize("shape", [(13, 17), (5, 1), (70, 5000)])
def test_fast_multiplication_equals_the_formula(shape):
    g = torch.Generator().manual_seed(0)
    W, X, F = (
        torch.rand(shape[0], 3, generator=g),
        torch.rand(*shape, generator=g),
        torch.rand(3, shape[1], generator=g),
    )
    got, want = multiply(F, W.T @ X, W.T @ W), multiply_reference(F, W.T @ X, W.T @ W, 1e-9)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
