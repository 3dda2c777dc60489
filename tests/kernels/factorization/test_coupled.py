import numpy as np
import pytest
import torch
from scipy.optimize import nnls
from sklearn.decomposition import NMF

from auditor.kernels.factorization.coordinate_descent import sweep
from auditor.kernels.factorization.coupled import couple, kkt_residual, project_coupled, start, sweeps
from auditor.kernels.factorization.coupled_columns import Penalties, co_activation, group_norm, shrink_group


def blocks(n=31, sizes=(13, 17, 5), rank=4, seed=0, noise=0.2):
    g = torch.Generator().manual_seed(seed)
    F = torch.rand(rank, n, generator=g, dtype=torch.float64).sub(0.4).clamp_min(0)
    return [
        torch.rand(s, rank, generator=g, dtype=torch.float64).sub(0.3).clamp_min(0) @ F
        + noise * torch.rand(s, n, generator=g, dtype=torch.float64)
        for s in sizes
    ]


def after(n_sweeps, *args, **kwargs):
    states = sweeps(*args, **kwargs)
    for _ in range(n_sweeps):
        next(states)
    return next(states)


@pytest.mark.filterwarnings("ignore")
def test_equals_the_stacked_sklearn_oracle():
    X = blocks()
    P, F = start(X, 3, 1, "random", (False,) * 3)
    got = after(30, X, P, F, Penalties((1e-2,) * 3, 0.7), signed=(False,) * 3, solver="mu")
    stacked, n, m = torch.cat(X).numpy(), 31, 35
    oracle = NMF(3, solver="mu", init="custom", l1_ratio=0, alpha_W=1e-2 / n, alpha_H=0.7 / m, tol=0, max_iter=30)
    W = oracle.fit_transform(stacked, W=torch.cat(P).numpy().copy(), H=F.numpy().copy())
    np.testing.assert_allclose(torch.cat(got.P).numpy(), W, rtol=0, atol=1e-10)
    np.testing.assert_allclose(got.F.numpy(), oracle.components_, rtol=0, atol=1e-10)


def test_hals_equals_the_stacked_sweep():
    X = blocks()
    P, F = start(X, 3, 1, "random", (False,) * 3)
    got = after(5, X, P, F, Penalties((1e-2,) * 3, 0.7), signed=(False,) * 3, solver="hals")
    W, H, stacked, eye = torch.cat(P), F, torch.cat(X), torch.eye(3, dtype=torch.float64)
    for _ in range(5):
        W = sweep(W.T.contiguous(), (stacked @ H.T).T.contiguous(), H @ H.T + 1e-2 * eye).T
        H = sweep(H, W.T @ stacked, W.T @ W + 0.7 * eye)
    torch.testing.assert_close(got.F, H, rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.cat(got.P), W, rtol=0, atol=1e-10)


def test_rank_one_is_exact_in_two_sweeps():
    g = torch.Generator().manual_seed(0)
    f = torch.rand(1, 9, generator=g, dtype=torch.float64) + 0.1
    X = [torch.rand(s, 1, generator=g, dtype=torch.float64) @ f for s in (5, 7)]
    for solver in ("mu", "hals"):
        fit = couple(X, 1, penalties=Penalties((0.0, 0.0), 0.0), solver=solver, max_iter=2)
        assert max(fit.relative_errors) < 1e-10


@pytest.mark.parametrize("solver", ["mu", "hals"])
@pytest.mark.parametrize("variant", [{}, {"group": 0.5}, {"tv": 0.3, "ortho": 0.2}, {"ortho": 0.5}])
@pytest.mark.parametrize("signed", [False, True])
def test_objective_never_rises_and_is_the_true_one(solver, variant, signed):
    X = blocks()
    free = (False, False, signed)
    if signed:
        X[2] = X[2] - 0.5
    groups = torch.arange(31) % 3
    penalties = Penalties((1e-4,) * 3, 0.1, groups=groups, **variant)
    fit = couple(X, 4, penalties=penalties, signed=free, solver=solver, max_iter=200, tol=0)
    assert all(b <= a for a, b in zip(fit.objective, fit.objective[1:], strict=False))
    assert len(fit.objective) > 50 or fit.kkt < 1e-6  # it did not stop at once for a rise
    true = sum(float((x - p @ fit.F).square().sum()) for x, p in zip(X, fit.P, strict=True))
    true += sum(1e-4 * float(p.square().sum()) for p in fit.P) + penalties.of_latent(fit.F)
    assert fit.objective[-1] == pytest.approx(true, rel=1e-9)
    assert fit.F.min() >= 0
    assert min(float(p.min()) for p in fit.P[:2]) >= 0
    assert not signed or float(fit.P[2].min()) < 0


def test_group_prox_by_hand():
    v = torch.tensor([3.0, -4.0, 4.0])
    torch.testing.assert_close(shrink_group(v, 1.0), torch.tensor([2.4, 0.0, 3.2]))
    assert shrink_group(v, 6.0).abs().max() == 0


def test_group_penalty_gives_each_group_its_factor():
    g = torch.Generator().manual_seed(3)
    X = torch.zeros(10, 24, dtype=torch.float64)
    X[:5, :12] = torch.rand(5, 1, generator=g).double() @ (torch.rand(1, 12, generator=g).double() + 0.5)
    X[5:, 12:] = torch.rand(5, 1, generator=g).double() @ (torch.rand(1, 12, generator=g).double() + 0.5)
    groups = (torch.arange(24) >= 12).long()
    fit = couple([X], 2, penalties=Penalties((1e-3,), 0.0, group=0.05, groups=groups), max_iter=500, tol=1e-9)
    used = torch.stack([fit.F[:, groups == label].norm(dim=1) > 0 for label in (0, 1)])
    assert used.sum(1).tolist() == [1, 1]
    assert fit.relative_errors[0] < 0.3


def test_terms_by_hand():
    F = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert co_activation(F) == pytest.approx(22)
    assert group_norm(F, None) == pytest.approx(5**0.5 + 5)
    assert group_norm(F, torch.tensor([0, 1])) == pytest.approx(10)
    assert Penalties((), 0.0, tv=1.0).of_latent(F) == pytest.approx(2 * (1 + 1e-6) ** 0.5)


def test_scalings():
    X = blocks()
    common = couple(X, 3, normalise="common", max_iter=20, tol=0)
    torch.testing.assert_close(torch.cat(common.P).norm(dim=0), torch.ones(3).double())
    scaled = couple(X, 3, penalties=Penalties((0.0,) * 3, 0.0, group=0.1), scale_rows=True, max_iter=20, tol=0)
    torch.testing.assert_close(scaled.F.mean(1), torch.ones(3).double())
    per_block = couple(X, 3, normalise="per-block", max_iter=5, tol=0)
    for p in per_block.P:
        torch.testing.assert_close(p.norm(dim=0), torch.ones(3).double())


def test_projection_with_and_without_a_block():
    X = blocks()
    fit = couple(X, 3, penalties=Penalties((1e-4,) * 3, 0.3), max_iter=3000, tol=1e-12)
    again = project_coupled(X, fit.P, 0.3)
    assert float((again - fit.F).norm() / fit.F.norm()) < 1e-2
    part = project_coupled([X[0], None, None], fit.P, 0.3)
    A = np.vstack([fit.P[0].numpy(), np.sqrt(0.3) * np.eye(3)])
    want = np.stack([nnls(A, np.append(x, np.zeros(3)))[0] for x in X[0].T.numpy()], axis=1)
    np.testing.assert_allclose(part.numpy(), want, atol=1e-8)
    with pytest.raises(ValueError, match="all blocks are missing"):
        project_coupled([None, None, None], fit.P, 0.3)


@pytest.mark.parametrize(
    ("X", "rank", "sentence"),
    [
        ([], 1, "at least one block"),
        ([torch.zeros(0, 4)], 1, "block '0' is empty"),
        ([torch.ones(3, 4), torch.ones(3, 5)], 1, "block '1' has 5 examples, the first one 4"),
        ([torch.ones(3, 4), -torch.ones(3, 4)], 1, "block '1' must be non-negative"),
        ([torch.full((3, 4), torch.nan)], 1, "NaN or infinite"),
        ([torch.ones(3, 4)], 4, "rank must be 1 to 3"),
    ],
)
def test_bad_input_gets_one_sentence(X, rank, sentence):
    with pytest.raises(ValueError, match=sentence):
        couple(X, rank)


def full_objective(X, P, F, penalties):
    """J with every term written out."""
    value = penalties.latent * F.square().sum() + penalties.ortho * (F.sum(0).square().sum() - F.square().sum())
    value = value + penalties.tv * (F.diff(dim=1).square() + 1e-6).sqrt().sum()
    for x, p, l2 in zip(X, P, penalties.basis, strict=True):
        value = value + (x - p @ F).square().sum() + l2 * p.square().sum()
    return value


@pytest.mark.parametrize("variant", [{}, {"tv": 0.7}, {"ortho": 0.4}, {"tv": 0.2, "ortho": 0.3}])
def test_the_residual_is_half_the_gradient_of_the_objective(variant):
    X = blocks()
    X[2] = X[2] - 0.5
    P, F = start(X, 3, 1, "random", (False, False, True))
    penalties = Penalties((0.1, 0.2, 0.3), 0.5, **variant)
    P, F = [p.requires_grad_() for p in P], F.requires_grad_()
    slopes = torch.autograd.grad(full_objective(X, P, F, penalties) / 2, [F, *P])
    P, F = [p.detach() for p in P], F.detach()
    pulls = sum(p.T @ x for p, x in zip(P, X, strict=True))
    parts = [torch.minimum(F / F.max(), slopes[0] / pulls.abs().max()).abs().max()]
    for i, (x, p) in enumerate(zip(X, P, strict=True)):
        slope = slopes[1 + i] / (x @ F.T).abs().max()
        parts.append((slope if i == 2 else torch.minimum(p / p.max(), slope)).abs().max())
    assert kkt_residual(X, P, F, penalties, (False, False, True)) == pytest.approx(float(max(parts)), rel=1e-9)


@pytest.mark.parametrize("variant", [{}, {"tv": 0.7}, {"ortho": 0.4}, {"tv": 0.2, "ortho": 0.3}])
def test_with_free_least_squares_bases_only_the_latent_side_is_left(variant):
    X = blocks()
    F = start(X, 3, 1, "random", (True,) * 3)[1].requires_grad_()
    P = [x @ F.detach().T @ torch.linalg.inv(F.detach() @ F.detach().T) for x in X]
    penalties = Penalties((0.0,) * 3, 0.5, **variant)
    (slope,) = torch.autograd.grad(full_objective(X, P, F, penalties) / 2, [F])
    pulls = sum(p.T @ x for p, x in zip(P, X, strict=True))
    F = F.detach()
    want = torch.minimum(F / F.max(), slope / pulls.abs().max()).abs().max()
    assert float(want) > 0.01
    assert kkt_residual(X, P, F, penalties, (True,) * 3) == pytest.approx(float(want), rel=1e-9)


@pytest.mark.parametrize("variant", [{"tv": 0.7}, {"ortho": 0.4}, {"tv": 0.2, "ortho": 0.3}])
@pytest.mark.parametrize("signed", [False, True])
def test_a_multiplicative_step_divides_what_pulls_down_into_what_pulls_up(variant, signed):
    """F * (up / down)^e with down - up half the gradient, TV by its majoriser, e = 1/2 where a basis is signed."""
    X = blocks()
    free = (False, False, signed)
    if signed:
        X[2] = X[2] - 0.5
    P, F = start(X, 3, 1, "random", free)
    penalties = Penalties((0.1, 0.2, 0.3), 0.5, **variant)
    got = after(1, X, P, F, penalties, signed=free, solver="mu")
    up, down = torch.zeros_like(F), penalties.latent * F + penalties.ortho * (F.sum(0) - F)
    for x, p in zip(X, got.P, strict=True):
        B, H = p.T @ x, p.T @ p
        up = up + (B.clamp_min(0) + (-H).clamp_min(0) @ F if signed else B)
        down = down + ((-B).clamp_min(0) + H.clamp_min(0) @ F if signed else H @ F)
    if penalties.tv:
        for i in range(F.shape[0]):
            for k in range(F.shape[1]):
                for other in (k - 1, k + 1):
                    if 0 <= other < F.shape[1]:
                        weight = penalties.tv / 2 / float((F[i, k] - F[i, other]).square() + 1e-6) ** 0.5
                        up[i, k] += weight * F[i, other]
                        down[i, k] += weight * F[i, k]
    torch.testing.assert_close(got.F, F * (up / down) ** (0.5 if signed else 1.0))
    for x, p, new, l2 in zip(X[:2], P[:2], got.P[:2], penalties.basis, strict=False):
        torch.testing.assert_close(new, p * (x @ F.T) / (p @ F @ F.T + l2 * p))


def test_a_vanishing_group_penalty_changes_nothing():
    X = blocks()
    P, F = start(X, 3, 1, "random", (False,) * 3)
    plain = after(4, X, P, F, Penalties((0.1,) * 3, 0.5, ortho=0.3), signed=(False,) * 3)
    grouped = after(4, X, P, F, Penalties((0.1,) * 3, 0.5, ortho=0.3, group=1e-14), signed=(False,) * 3)
    torch.testing.assert_close(grouped.F, plain.F, rtol=1e-9, atol=1e-9)


def test_it_stops_when_ten_sweeps_gain_less_than_the_tolerance():
    fit = couple(blocks(), 3, tol=1e-3)
    rises = [
        abs(fit.objective[t - 10] - fit.objective[t]) <= 1e-3 * fit.objective[t] for t in range(10, fit.n_iter + 1)
    ]
    assert rises == [False] * (len(rises) - 1) + [True]
    assert fit.n_iter == len(fit.objective) - 1
