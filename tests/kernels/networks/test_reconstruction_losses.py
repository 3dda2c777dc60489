import math

import pytest
import torch

from auditor.kernels.networks.reconstruction_losses import (
    dimension_errors,
    faithfulness,
    live_pull_away,
    pull_away,
    running_reconstruction,
    sparse_reconstruction,
)


def test_known_answers():
    E = torch.tensor([[1.0, 0, 1], [1, 1, 0]], dtype=torch.float64)
    torch.testing.assert_close(float(pull_away(E)), 1 / 3, rtol=0, atol=1e-9)  # eps 1e-12 under the root
    Q = torch.tensor([0.0, 1, 9], dtype=torch.float64)
    assert round(float(sparse_reconstruction(Q, 1.0)), 6) == 0.998577
    assert round(float(sparse_reconstruction(Q, 10.0)), 6) == 2.302918


@pytest.mark.parametrize("seed", range(3))
def test_losses_against_plain_loops(seed):
    g = torch.Generator().manual_seed(seed)
    K, M, D, n = 2, 7, 5, 3
    E, Z, Zh = (torch.rand(*s, generator=g, dtype=torch.float64) for s in ((K, M, n), (M, D), (K, M, D)))
    y, yb, w = (torch.rand(K, M, generator=g, dtype=torch.float64) for _ in range(3))
    for k in range(K):
        fs = sum(float(w[k, i] * (yb[k, i] - y[k, i]) ** 2) for i in range(M)) / M
        Q = [sum(float(Zh[k, i, d] - Z[i, d]) ** 2 for i in range(M)) / M for d in range(D)]
        sr = sum(math.log(1 + 3 * x) for x in Q) / D
        pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
        pt = sum(float(torch.cosine_similarity(E[k, :, a], E[k, :, b], dim=0)) ** 2 for a, b in pairs) / len(pairs)
        assert abs(float(faithfulness(yb, y, w)[k]) - fs) < 1e-12
        assert abs(float(sparse_reconstruction(dimension_errors(Zh, Z), 3.0)[k]) - sr) < 1e-12
        assert abs(float(pull_away(E)[k]) - pt) < 1e-9  # eps under the root


def test_surrogate_has_the_gradient_of_the_log_penalty_when_the_running_error_is_exact():
    Q = torch.rand(2, 6, dtype=torch.float64, requires_grad=True)
    (want,) = torch.autograd.grad(sparse_reconstruction(Q, 10.0).sum(), Q)
    (got,) = torch.autograd.grad(running_reconstruction(Q, Q, 10.0).sum(), Q)
    torch.testing.assert_close(got, want)


def test_a_dead_column_counts_as_zero_and_gives_finite_gradients():
    E = torch.rand(1, 8, 3)
    E[..., 1] = 0
    E.requires_grad_()
    loss = pull_away(E).sum()
    loss.backward()
    assert torch.isfinite(E.grad).all()
    alive = torch.tensor([[True, False, True]])
    torch.testing.assert_close(live_pull_away(E, alive), pull_away(E[..., [0, 2]]))
    assert pull_away(E).item() < live_pull_away(E, alive).item()  # why the live figure is printed beside it


def test_one_column_pulls_nothing_away():
    E = torch.rand(3, 5, 1, requires_grad=True)
    loss = pull_away(E)
    assert loss.tolist() == [0, 0, 0]
    loss.sum().backward()
    assert not E.grad.any()
    one_alive = torch.tensor([[True, False]])
    assert live_pull_away(torch.rand(1, 4, 2), one_alive).tolist() == [0]
