"""Block coordinate descent against its formulas in plain numpy."""

import itertools

import numpy as np
import pytest
import torch

from auditor.errors import NumericsError
from auditor.training.block_coordinate_descent import BcdConfig, bcd
from auditor.training.cycle import accuracy
from tests.auditor.training.test_full_admm import slow_relu_coupling
from tests.auditor.training.three_clouds import blobs, mlp, weights


def slow_bcd(W, b, X, Y, cfg, n_cycles):
    """[Zeng2019] in numpy with explicit inverses: V_L, Z_L, W_L, V_{L-1}, …; yields weights, biases, residuals."""
    L, gamma, rho, alpha = len(W), cfg.gamma, cfg.rho, cfg.alpha
    Z, V = [], [X]
    for layer in range(L):
        Z.append(V[-1] @ W[layer].T + b[layer])
        V.append(np.maximum(Z[-1], 0) if layer < L - 1 else Z[-1])
    for _ in range(n_cycles):
        for layer in reversed(range(L)):
            m = V[layer] @ W[layer].T + b[layer]
            if layer == L - 1:
                V[L] = (Y + gamma * Z[layer] + alpha * V[L]) / (1 + gamma + alpha)
                Z[layer] = (gamma * V[L] + rho * m) / (gamma + rho)
            else:
                up = W[layer + 1]
                right = rho * (Z[layer + 1] - b[layer + 1]) @ up + gamma * np.maximum(Z[layer], 0)
                V[layer + 1] = right @ np.linalg.inv(rho * up.T @ up + gamma * np.eye(up.shape[1]))
                centre = (rho * m + alpha * Z[layer]) / (rho + alpha)
                Z[layer] = slow_relu_coupling(centre, V[layer + 1], rho + alpha, gamma)
            v = np.hstack([V[layer], np.ones((len(X), 1))])
            old = np.hstack([W[layer], b[layer][:, None]])
            right = rho * Z[layer].T @ v + alpha * old
            both = right @ np.linalg.inv(rho * v.T @ v + alpha * np.eye(v.shape[1]))
            W[layer], b[layer] = both[:, :-1], both[:, -1]
        yield W, b, [float(np.sqrt(((Z[i] - V[i] @ W[i].T - b[i]) ** 2).mean())) for i in range(L)]


def test_four_sweeps_are_the_formulas():
    x, y = blobs(40, 7)
    blocks = [block.double() for block in mlp(7, 6, 5, 3)]
    linears = [blocks[0][0], blocks[1][0], blocks[2]]
    cfg = BcdConfig(gamma=1.3, rho=0.7, alpha=2.0, init=0.4, seed=3)
    g = torch.Generator().manual_seed(3)
    W, b = [], []
    for lin in linears:  # the authors' start: normal weights, biases of a tenth
        W.append(0.4 * torch.randn(lin.weight.shape, generator=g, dtype=torch.float64).numpy())
        torch.rand(len(lin.bias), generator=g, dtype=torch.float64)
        b.append(np.full(len(lin.bias), 0.1))
    expected = slow_bcd(W, b, x.double().numpy(), np.eye(3)[y.numpy()], cfg, 4)
    for cycle, (W, b, residuals) in zip(bcd(blocks, x.double(), y, cfg), expected, strict=False):
        assert cycle.residuals == pytest.approx(residuals, rel=1e-3)  # the solver lifts the Gram matrix by 1e-8
        for lin, matrix, bias in zip(linears, W, b, strict=True):
            np.testing.assert_allclose(lin.weight.detach().numpy(), matrix, rtol=0, atol=1e-5)
            np.testing.assert_allclose(lin.bias.detach().numpy(), bias, rtol=0, atol=1e-5)
        out = x.double().numpy()
        for layer in range(3):
            out = out @ W[layer].T + b[layer]
            out = np.maximum(out, 0) if layer < 2 else out
        assert cycle.loss == pytest.approx(0.5 * ((out - np.eye(3)[y.numpy()]) ** 2).sum() / 40, rel=1e-4)
    assert cycle.epoch == 4
    assert cycle.beta == (0.7,) * 3


def test_it_learns_from_the_authors_defaults():
    x, y = blobs(120)
    blocks = mlp(13, 11, 3)
    losses = [c.loss for c in itertools.islice(bcd(blocks, x, y), 40)]
    assert losses[-1] < 0.3 * losses[0]
    assert accuracy(blocks, x, y) > 0.95


def test_samples_that_are_not_finite_leave_the_weights():
    x, y = blobs()
    x[3, 2] = torch.nan
    blocks = mlp(13, 11, 3)
    before = weights(blocks)
    with pytest.raises(NumericsError, match="bcd: the loss was not finite in epoch 1"):
        next(bcd(blocks, x, y))
    assert torch.equal(weights(blocks), before)
