"""Sub-problems of ADMM training against grid searches, numpy and scipy; known answers of [BlockADMM] and [dlADMM]."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch.nn import functional as nf

from auditor.kernels.admm.subproblems import (
    cross_entropy_prox,
    fit_affine,
    majorant_inverse,
    relu_coupling,
    soft,
    solve_activations,
    spd_solve,
    squared_prox,
)


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("beta", "gamma"), [(1.0, 1.0), (0.3, 2.0), (10.0, 0.7)])
def test_relu_coupling_reaches_the_best_of_a_fine_grid(beta, gamma):
    m, t = randn(40, seed=1) * 2, randn(40, seed=2) * 2
    z = relu_coupling(m, t, beta, gamma)
    grid = torch.linspace(-9, 9, 36001, dtype=torch.float64)

    def value(point):
        return beta * (point - m[:, None]).square() + gamma * (t[:, None] - point.relu()).square()

    best = value(grid[None].expand(40, -1)).amin(1)
    here = value(z[:, None])[:, 0]
    assert (here <= best + 1e-12).all()
    torch.testing.assert_close(here, best, rtol=0, atol=1e-5)  # the grid's step is 5e-4, curvature below 25


def test_relu_coupling_known_answer():
    m, t = torch.tensor([-1, -0.2, 0.5, -2]), torch.tensor([0.3, 1, 2, 3])
    torch.testing.assert_close(relu_coupling(m, t, 1.0, 1.0), torch.tensor([-1, 0.4, 1.25, -2]))


def test_weights_with_identity_inputs():
    Z, U, decay, beta = randn(7, 5, seed=3), randn(7, 5, seed=4), 0.35, 2.0
    W = fit_affine(torch.eye(7, dtype=torch.float64), Z + U, 2 * decay / beta)
    torch.testing.assert_close(W, (Z + U).T / (1 + 2 * decay / beta), rtol=1e-6, atol=1e-8)  # the floor is 1e-8


def test_weights_are_the_ridge_regression_of_numpy():
    A, T = randn(31, 13, seed=5), randn(31, 4, seed=6)
    stacked = np.vstack([A.numpy(), np.sqrt(0.7) * np.eye(13)])
    expected = np.linalg.lstsq(stacked, np.vstack([T.numpy(), np.zeros((13, 4))]), rcond=None)[0].T
    np.testing.assert_allclose(fit_affine(A, T, 0.7).numpy(), expected, rtol=1e-6, atol=1e-8)


def test_weights_towards_old_ones_stay_there_when_the_ridge_is_heavy():
    A, T, old = randn(31, 13), randn(31, 4, seed=1), randn(4, 13, seed=2)
    torch.testing.assert_close(fit_affine(A, T, 1e9, towards=old), old, rtol=1e-6, atol=1e-6)


def test_activations_zero_the_gradient():
    W, T, P, beta, gamma = randn(6, 13), randn(17, 6, seed=1), randn(17, 13, seed=2), 3.0, 0.4
    A = solve_activations(W, T, P, beta, gamma)
    gradient = beta * (A @ W.T - T) @ W + gamma * (A - P)
    assert gradient.abs().max() < 1e-5  # the floor of 1e-8 of the diagonal moves the solution by so much


def test_solve_survives_a_singular_gram():
    v = torch.ones(5, 1)
    assert spd_solve(v @ v.T, v, 0.0).isfinite().all()


def test_squared_prox_lies_between():
    y, v = randn(9), randn(9, seed=1)
    z = squared_prox(y, v, 3.0)
    torch.testing.assert_close((z - y) + 3.0 * (z - v), torch.zeros(9, dtype=torch.float64), rtol=0, atol=1e-14)


@pytest.mark.parametrize("beta", [0.05, 1.0, 20.0])
def test_cross_entropy_prox_is_what_lbfgs_finds(beta):
    v, labels = randn(5, 7, seed=8) * 3, torch.tensor([0, 6, 3, 3, 1])
    z = cross_entropy_prox(labels, v, beta, steps=4000, tol=1e-13)

    def objective(point):
        t = torch.tensor(point.reshape(5, 7), requires_grad=True)
        value = nf.cross_entropy(t, labels, reduction="sum") + 0.5 * beta * (t - v).square().sum()
        value.backward()
        return value.item(), t.grad.numpy().ravel()

    best = minimize(objective, v.numpy().ravel(), jac=True, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-9})
    np.testing.assert_allclose(z.numpy().ravel(), best.x, atol=1e-5)


def test_cross_entropy_prox_never_ends_above_its_start():
    v, labels = randn(50, 4, seed=9) * 5, torch.arange(50) % 4
    start = cross_entropy_prox(labels, v, 1e-3, steps=300)

    def value(z):
        return nf.cross_entropy(z, labels, reduction="none") + 0.5e-3 * (z - v).square().sum(1)

    for steps in (1, 2, 3, 7, 20):
        assert (value(cross_entropy_prox(labels, v, 1e-3, steps, start=start)) <= value(start)).all()


def test_soft_is_the_prox_of_l1():
    w, k = torch.linspace(-2, 2, 41, dtype=torch.float64), 0.3
    grid = torch.linspace(-3, 3, 60001, dtype=torch.float64)
    best = grid[(0.5 * (grid - w[:, None]).square() + k * grid.abs()).argmin(1)]
    torch.testing.assert_close(soft(w, k), best, rtol=0, atol=1e-4)


def test_a_full_majorant_step_never_rises_through_a_linear_block():
    W, z, near, aim = randn(6, 13), randn(17, 13, seed=1), randn(17, 13, seed=2), randn(17, 6, seed=3)
    matrix = majorant_inverse(W.T @ W, 0.5, 2.0)
    exact = solve_activations(W, aim, near, 2.0, 0.5)
    step = z - (2.0 * (z @ W.T - aim) @ W + 0.5 * (z - near)) @ matrix
    torch.testing.assert_close(step, exact, rtol=1e-5, atol=1e-6)  # one Newton step solves a quadratic


def plain_fista(labels, v, beta, steps, start=None, curvature=0.5):
    """The iteration with its momentum, written out; returns the last point."""
    z = ahead = v if start is None else start
    t = 1.0
    for _ in range(steps):
        p = ahead.exp() / ahead.exp().sum(1, keepdim=True)
        slope = p - torch.eye(v.shape[1], dtype=v.dtype)[labels] + beta * (ahead - v)
        new, t_next = ahead - slope / (curvature + beta), (1 + (1 + 4 * t * t) ** 0.5) / 2
        ahead = new + (t - 1) / t_next * (new - z)
        z, t = new, t_next
    return z


@pytest.mark.parametrize("beta", [0.05, 3.0])
@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_cross_entropy_prox_takes_the_steps_of_fista(beta, steps):
    v, labels = randn(5, 7, seed=8), torch.tensor([0, 6, 3, 3, 1])
    torch.testing.assert_close(
        cross_entropy_prox(labels, v, beta, steps, tol=0.0), plain_fista(labels, v, beta, steps), rtol=1e-10, atol=1e-12
    )


def test_cross_entropy_prox_puts_back_the_rows_that_rose_and_no_others(monkeypatch):
    monkeypatch.setattr("auditor.kernels.admm.subproblems.SOFTMAX_CURVATURE", 0.0)  # steps too long: some rows rise
    v, labels = randn(60, 4, seed=9), torch.arange(60) % 4
    start = v + randn(60, 4, seed=10)
    n_put_back = 0
    for steps in (1, 2, 5):
        z = plain_fista(labels, v, 0.05, steps, start, curvature=0.0)
        got = cross_entropy_prox(labels, v, 0.05, steps, tol=0.0, start=start)
        for i in range(60):
            values = [
                float(point[i].logsumexp(0) - point[i, labels[i]] + 0.025 * (point[i] - v[i]).square().sum())
                for point in (z, start)
            ]
            rose = values[0] > values[1]
            n_put_back += rose
            torch.testing.assert_close(got[i], start[i] if rose else z[i], rtol=1e-9, atol=1e-9)
    assert 5 < n_put_back < 3 * 60


def test_cross_entropy_prox_stops_when_nothing_moves():
    v, labels = randn(3, 4), torch.tensor([0, 1, 2])
    one = plain_fista(labels, v, 1.0, 1)
    torch.testing.assert_close(cross_entropy_prox(labels, v, 1.0, steps=50, tol=10.0), one)
    torch.testing.assert_close(cross_entropy_prox(labels, v, 1.0), plain_fista(labels, v, 1.0, 60), rtol=0, atol=1e-6)


def test_the_floor_of_a_solve_is_a_share_of_the_mean_diagonal():
    gram, right = torch.diag(torch.tensor([4.0, 0.0]).double()), torch.tensor([[1.0], [1.0]]).double()
    got = spd_solve(gram, right, 0.0).flatten()
    torch.testing.assert_close(got, torch.tensor([1 / (4 + 2e-8), 1 / 2e-8], dtype=torch.float64), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        spd_solve(gram, right, 1.0).flatten(), torch.tensor([0.2, 1.0]).double(), rtol=1e-6, atol=0
    )
    assert torch.equal(gram, torch.diag(torch.tensor([4.0, 0.0]).double()))


def test_single_precision_falls_back_to_double_where_cholesky_fails():
    v = torch.ones(5, 1)
    got = spd_solve(v @ v.T, v, 0.0)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.full((5, 1), 0.2), rtol=1e-3, atol=0)


def test_a_gram_matrix_at_hand_is_taken():
    A, T = randn(31, 5), randn(31, 2, seed=1)
    torch.testing.assert_close(fit_affine(A, T, 0.3, gram=A.T @ A), fit_affine(A, T, 0.3))
    torch.testing.assert_close(fit_affine(A, T, 0.0, gram=torch.eye(5).double()), T.T @ A, rtol=1e-6, atol=1e-6)
    old = randn(2, 5, seed=2)
    pulled = torch.linalg.solve(A.T @ A + 0.3 * torch.eye(5).double(), A.T @ T + 0.3 * old.T).T
    torch.testing.assert_close(fit_affine(A, T, 0.3, towards=old), pulled, rtol=1e-6, atol=1e-6)


def test_the_majorant_is_the_inverse_of_its_curvature():
    gram = randn(5, 7) @ randn(5, 7).T
    before = gram.clone()
    want = torch.linalg.inv(0.5 * torch.eye(5).double() + 2.0 * gram)
    torch.testing.assert_close(majorant_inverse(gram, 0.5, 2.0), want)
    assert torch.equal(gram, before)
