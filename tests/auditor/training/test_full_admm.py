"""Full ADMM against its formulas in plain numpy."""

import itertools

import numpy as np
import pytest
import torch

from auditor.errors import NumericsError
from auditor.training.full_admm import FullAdmmConfig, full_admm
from tests.auditor.training.three_clouds import blobs, mlp

N, WIDTH = 120, 13


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def test_full_admm_has_duals_everywhere_and_taylor_on_the_last_layer_only():
    """With equal starts the first cycle agrees (duals are zero), the second does not."""
    x, y = blobs(N)
    losses = {}
    for variant in ("full", "taylor"):
        cycles = full_admm(mlp(WIDTH, 11, 3), x, y, FullAdmmConfig(variant=variant, start="forward"))
        losses[variant] = [c.loss for c in itertools.islice(cycles, 2)]
    assert losses["full"][0] == losses["taylor"][0]
    assert losses["full"][1] != losses["taylor"][1]


def slow_relu_coupling(m, t, beta, gamma):
    """The better of the two branches, element by element."""
    out = np.empty_like(m)
    for i in np.ndindex(m.shape):
        candidates = [min(m[i], 0.0), max((beta * m[i] + gamma * t[i]) / (beta + gamma), 0.0)]
        out[i] = min(candidates, key=lambda z, i=i: beta * (z - m[i]) ** 2 + gamma * (t[i] - max(z, 0.0)) ** 2)
    return out


def slow_full_admm(W, b, X, Y, cfg, n_cycles):
    """[Khorram2020], algorithm 1, in numpy with explicit inverses; yields weights, biases and residuals."""
    L, beta, gamma = len(W), cfg.beta, cfg.gamma
    duals = [cfg.variant == "full" or layer == L - 1 for layer in range(L)]
    Z, A = [], [X]
    for layer in range(L):
        Z.append(A[-1] @ W[layer].T + b[layer])
        A.append(np.maximum(Z[-1], 0))
    A.pop()
    U, V = [np.zeros_like(z) for z in Z], [np.zeros_like(a) for a in A[1:]]
    for _ in range(n_cycles):
        for layer in range(L):
            a = np.hstack([A[layer], np.ones((len(X), 1))])
            ridge = 2 * cfg.decay / beta * np.eye(a.shape[1])
            both = (Z[layer] + U[layer]).T @ a @ np.linalg.inv(a.T @ a + ridge)
            W[layer], b[layer] = both[:, :-1], both[:, -1]
        for layer in range(L - 1):
            m = A[layer] @ W[layer].T + b[layer] - U[layer]
            Z[layer] = slow_relu_coupling(m, A[layer + 1] + V[layer], beta, gamma)
            up = W[layer + 1]
            right = beta * (Z[layer + 1] + U[layer + 1] - b[layer + 1]) @ up
            right = right + gamma * (np.maximum(Z[layer], 0) - V[layer])
            A[layer + 1] = right @ np.linalg.inv(beta * up.T @ up + gamma * np.eye(up.shape[1]))
        m = A[-1] @ W[-1].T + b[-1] - U[-1]
        Z[-1] = (Y + beta * m) / (1 + beta)
        residuals = [Z[i] - A[i] @ W[i].T - b[i] for i in range(L)]
        for layer in range(L):
            U[layer] = U[layer] + duals[layer] * cfg.dual_step * residuals[layer]
            if layer < L - 1 and cfg.variant == "full":
                V[layer] = V[layer] + cfg.dual_step * (A[layer + 1] - np.maximum(Z[layer], 0))
        yield W, b, [float(np.sqrt((r**2).mean())) for r in residuals]


@pytest.mark.parametrize("variant", ["full", "taylor"])
@pytest.mark.parametrize("dual_step", [1.0, 0.4])
def test_three_cycles_are_the_formulas(variant, dual_step):
    x, y = blobs(40, 7)
    blocks = [block.double() for block in mlp(7, 6, 5, 3)]
    linears = [blocks[0][0], blocks[1][0], blocks[2]]
    W = [lin.weight.detach().numpy().copy() for lin in linears]
    b = [lin.bias.detach().numpy().copy() for lin in linears]
    cfg = FullAdmmConfig(variant=variant, beta=3.0, gamma=0.7, decay=0.2, dual_step=dual_step, start="forward")
    expected = slow_full_admm(
        W, b, x.double().numpy(), np.eye(3)[y.numpy()], cfg, 3
    )  # the watch over residuals may halve the dual step after
    for cycle, (W, b, residuals) in zip(full_admm(blocks, x.double(), y, cfg), expected, strict=False):
        assert cycle.residuals == pytest.approx(residuals, rel=1e-3)  # the solver lifts the Gram matrix by 1e-8
        for lin, matrix, bias in zip(linears, W, b, strict=True):
            np.testing.assert_allclose(lin.weight.detach().numpy(), matrix, rtol=0, atol=1e-5)
            np.testing.assert_allclose(lin.bias.detach().numpy(), bias, rtol=0, atol=1e-5)
        assert cycle.beta == (3.0, 3.0, 3.0)
        assert cycle.dual_step == dual_step
        z = x.double().numpy()
        for layer in range(3):
            z = z @ W[layer].T + b[layer]
            z = np.maximum(z, 0) if layer < 2 else z
        assert cycle.loss == pytest.approx(0.5 * ((z - np.eye(3)[y.numpy()]) ** 2).sum() / 40, rel=1e-4)
    assert cycle.epoch == 3


def test_the_published_start_is_small_and_seeded():
    x, y = blobs(N)
    losses = []
    for seed in (0, 0, 1):
        cycles = full_admm(mlp(WIDTH, 11, 3, seed=len(losses)), x, y, FullAdmmConfig(seed=seed))
        losses.append(next(cycles).loss)
    assert losses[0] == losses[1] != losses[2]  # the blocks' own weights do not matter
    assert losses[0] == pytest.approx(0.5, rel=0.05)  # everything is of the size of 1e-4: |0 - onehot|^2 / 2


def test_too_long_dual_steps_are_halved_or_stop():
    x, y = blobs(N)
    cycles = full_admm(mlp(WIDTH, 11, 3), x, y, FullAdmmConfig(dual_step=1.9, beta=0.01, gamma=0.01))
    try:
        steps = [c.dual_step for c in itertools.islice(cycles, 60)]
    except NumericsError:
        return
    assert min(steps) < 1.9
