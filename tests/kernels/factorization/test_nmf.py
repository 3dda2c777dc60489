import numpy as np
import pytest
import torch
from sklearn.decomposition import NMF

from auditor.kernels.factorization.nmf import (
    Factorization,
    Status,
    factorize,
    free_basis,
    hals,
    kkt_residual,
    multiplicative,
)


def low_rank(channels, positions, rank, seed=0, noise=0.1, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    W = torch.rand(channels, rank, generator=g, dtype=dtype).sub(0.4).clamp_min(0)
    S = torch.rand(rank, positions, generator=g, dtype=dtype).sub(0.6).clamp_min(0)
    return W @ S + noise * torch.rand(channels, positions, generator=g, dtype=dtype)


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
    calls = []
    fit = factorize(low_rank(13, 17, 4), 3, max_iter=7, tol=0, on_step=lambda t, f: calls.append((t, f)))
    assert [t for t, _ in calls] == list(range(1, 8))
    assert [f for _, f in calls] == fit.objective[1:]
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


def test_a_multiplicative_step_is_the_published_one():
    X = low_rank(9, 13, 3)
    g = torch.Generator().manual_seed(1)
    W, S = torch.rand(9, 3, generator=g).double(), torch.rand(3, 13, generator=g).double()
    states = multiplicative(X, W, S, float(X.square().sum()))
    next(states)
    step = next(states)
    W_want = W * (X @ S.T) / (W @ S @ S.T + 1e-9)
    torch.testing.assert_close(step.W, W_want)
    torch.testing.assert_close(step.S, S * (W_want.T @ X) / (W_want.T @ W_want @ S + 1e-9))
    assert step.objective == pytest.approx(float((X - step.W @ step.S).square().sum()), rel=1e-9)


def test_a_signed_multiplicative_step_splits_the_signs():
    X = low_rank(9, 13, 3) - 0.3
    S = torch.rand(3, 13, generator=torch.Generator().manual_seed(1)).double()
    states = multiplicative(X, torch.zeros(9, 3).double(), S, float(X.square().sum()), signed=True)
    next(states)
    step = next(states)
    W = X @ S.T @ torch.linalg.inv(S @ S.T)
    torch.testing.assert_close(step.W, W)
    torch.testing.assert_close(free_basis(X @ S.T, S @ S.T), W)
    B, G = W.T @ X, W.T @ W
    rise = B.clamp_min(0) + (-G).clamp_min(0) @ S
    fall = (-B).clamp_min(0) + G.clamp_min(0) @ S
    assert (G < 0).any()
    torch.testing.assert_close(step.S, S * (rise / (fall + 1e-9)).sqrt())


def test_the_start_follows_the_rank_and_the_sign():
    X = low_rank(72, 80, 70)

    def first(rank, init, signed=False):
        return factorize(X, rank, init=init, signed=signed, max_iter=1, tol=0).objective[0]

    assert first(64, "auto") == first(64, "nndsvda") != first(64, "columns")
    assert first(65, "auto") == first(65, "columns") != first(65, "nndsvda")
    assert first(65, "auto", signed=True) == first(65, "nndsvda", signed=True) != first(65, "columns", signed=True)
    assert len({first(3, init) for init in ("random", "nndsvda", "columns")}) == 3


@pytest.mark.parametrize("init", ["columns", "random"])  # NNDSVDa fills zeros of W and S with the mean of X, a unit
def test_units_of_the_activations_do_not_matter(init):
    X = low_rank(24, 3000, 5)
    one, other = (factorize(scale * X, 4, init=init, max_iter=5, tol=0) for scale in (1.0, 2.0**-12))
    torch.testing.assert_close(one.W, other.W, rtol=1e-6, atol=1e-8)
    assert one.kkt == pytest.approx(other.kkt, rel=1e-6)


def test_it_stops_at_the_first_step_that_gains_less_than_a_tenth_of_the_tolerance():
    fit = factorize(low_rank(13, 57, 4), 3, tol=1e-3)
    gains = [(a - b) / b for a, b in zip(fit.objective, fit.objective[1:], strict=False)]
    assert all(gain > 1e-4 for gain in gains[:-1])
    assert gains[-1] <= 1e-4
    assert fit.n_iter == len(gains)
    n = fit.n_iter  # no step before gained so little: the last gain is the limit itself
    for share, status in ((1.02, Status.CONVERGED), (0.98, Status.STEP_LIMIT)):
        again = factorize(low_rank(13, 57, 4), 3, tol=share * 10 * gains[-1], max_iter=n)
        assert (again.n_iter, again.status) == (n, status)


@pytest.mark.parametrize("signed", [False, True])
def test_the_residual_by_hand(signed):
    """With unit columns of W and unit rows of S the gradients are W^T (W S - X) and (W S - X) S^T."""
    W = torch.tensor([[0.6, 0.0], [0.8, 1.0]]).double()
    S = torch.tensor([[0.8, 0.6], [0.0, 1.0]]).double()
    X = torch.tensor([[1.0, 2.0], [0.5, 3.0]]).double()
    grad_W, grad_S = (W @ S - X) @ S.T, W.T @ (W @ S - X)
    side = grad_W.abs() if signed else torch.minimum(W, grad_W).abs()
    want = max(float(side.max() / W.max()), float(torch.minimum(S, grad_S).abs().max() / S.max()))
    assert kkt_residual(X, W, S, signed=signed) == pytest.approx(want)
    assert kkt_residual(5 * X, 10 * W, S / 2, signed=signed) == pytest.approx(want)
    assert kkt_residual(X, W, S, B=W.T @ X, signed=signed) == pytest.approx(want)


def test_without_a_push_a_step_is_plain_hals():
    """The first step from the start has nothing to push on from but its own unit columns."""
    X = low_rank(9, 13, 3)
    g = torch.Generator().manual_seed(1)
    W, S = torch.rand(9, 3, generator=g).double(), torch.rand(3, 13, generator=g).double()
    states = hals(X, W, S, float(X.square().sum()))
    first, second, third = next(states), next(states), next(states)
    assert first.objective == pytest.approx(float((X - W @ S).square().sum()))
    for state in (second, third):
        assert state.objective == pytest.approx(float((X - state.W @ state.S).square().sum()), rel=1e-9)
        torch.testing.assert_close(state.B, state.W.T @ X)
    assert third.objective < second.objective < first.objective


@pytest.mark.parametrize("signed", [False, True])
def test_a_dead_component_takes_over_what_is_left_of_the_worst_position(signed):
    X = low_rank(9, 13, 3) - (0.3 if signed else 0.0)
    fit = factorize(X, 2, signed=signed, max_iter=5, tol=0)
    W, S = torch.zeros(9, 3).double(), torch.zeros(3, 13).double()
    W[:, ::2], S[::2] = fit.W, fit.S
    states = hals(X, W, S, float(X.square().sum()), signed=signed)
    _, dying, revived = next(states), next(states), next(states)
    assert dying.S[1].max() == 0
    left = X - dying.W @ dying.S
    worst = left[:, left.norm(dim=0).argmax()]
    worst = worst if signed else worst.clamp_min(0)
    torch.testing.assert_close(revived.W[:, 1], worst / worst.norm(), rtol=1e-6, atol=1e-6)
    assert revived.S[1].max() > 0
    assert revived.objective < dying.objective
