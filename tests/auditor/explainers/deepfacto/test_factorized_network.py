"""The exportable network: its unrolled projection against scipy, its head against the formula."""

import numpy as np
import pytest
import torch
from scipy.optimize import nnls
from torch import nn

from auditor.explainers.deepfacto.factorized_network import FactorizedNetwork, ScoreLayer
from auditor.explainers.deepfacto.score_heads import PooledLinear
from auditor.kernels.factorization.deepfacto import LinearHead
from auditor.subject.layers import layout_of


def basis(channels=7, rank=3, seed=0):
    M = torch.rand(channels, rank, generator=torch.Generator().manual_seed(seed))
    return M / M.norm(dim=0)


@pytest.mark.parametrize("shape", [(7, 4, 6), (1 + 24, 7), (7,)])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_scores_are_nnls_of_every_position(shape, scale):
    layout = layout_of(shape, (16, 24))
    z = torch.rand(2, *shape, generator=torch.Generator().manual_seed(1))
    M = basis()
    S = ScoreLayer(M, scale, layout, n_steps=400)(z)
    assert S.shape == (2, 3, *layout.grid)
    positions = layout.to_positions(z)
    at_bound = 0
    for i in range(2):
        for p in range(layout.n_positions):
            exact = nnls(M.double().numpy(), positions[i, :, p].double().numpy() / scale)[0]
            np.testing.assert_allclose(S.flatten(2)[i, :, p].numpy(), exact, atol=1e-4)
            at_bound += (exact == 0).any()
    assert at_bound > 0 or layout.n_positions == 1  # the bound matters somewhere


def test_more_steps_come_nearer():
    layout, M = layout_of((7, 4, 6), (16, 24)), basis(seed=3)
    z = torch.rand(2, 7, 4, 6, generator=torch.Generator().manual_seed(1))
    exact = ScoreLayer(M, 1.0, layout, 2000)(z)
    errors = [float((ScoreLayer(M, 1.0, layout, n)(z) - exact).norm()) for n in (0, 5, 20, 80)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.01 * errors[0]
    start = ScoreLayer(M, 1.0, layout, 0)(z).flatten(2)
    step = 1 / float(torch.linalg.eigvalsh(M.T @ M)[-1])
    torch.testing.assert_close(start, (step * M.T @ z.flatten(2)).clamp_min(0), rtol=1e-4, atol=1e-5)


def plain_fista(M, z, n_steps):
    """Accelerated projected gradient with a restart per column, one column at a time."""
    G, c = M.T @ M, M.T @ z
    step = 1 / float(torch.linalg.eigvalsh(G)[-1])
    out = torch.empty_like(c)
    for p in range(z.shape[1]):
        here = ahead = (step * c[:, p]).clamp_min(0)
        t = 1.0
        for _ in range(n_steps):
            following = (ahead - step * (G @ ahead - c[:, p])).clamp_min(0)
            t_next = (1 + (1 + 4 * t * t) ** 0.5) / 2
            turned = float((ahead - following) @ (following - here)) > 0
            ahead = following + (0.0 if turned else (t - 1) / t_next) * (following - here)
            here, t = following, t_next
        out[:, p] = here
    return out


def test_the_steps_are_those_of_the_paper():
    layout, M = layout_of((7, 4, 6), (16, 24)), basis(seed=3).double()
    z = torch.rand(1, 7, 4, 6, generator=torch.Generator().manual_seed(1)).double()
    for n in (1, 2, 7, 30):
        made = ScoreLayer(M, 1.0, layout, n)(z).flatten(2)[0]
        torch.testing.assert_close(made, plain_fista(M, z.flatten(2)[0], n), rtol=0, atol=1e-9)


@pytest.fixture
def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = nn.Sequential(nn.Conv2d(1, 7, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(7 * 24, 2))
    g = torch.Generator().manual_seed(0)
    pool = torch.rand(24, 2, generator=g)
    head = LinearHead(torch.randn(4, 3, 2, generator=g), torch.randn(4, generator=g), pool)
    return FactorizedNetwork(
        body, "0", ScoreLayer(basis(), 1.0, layout_of((7, 4, 6), (4, 6)), 60), PooledLinear(head)
    ), head


def test_logits_are_the_head_on_the_scores_of_the_layer(network):
    net, head = network
    x = torch.rand(3, 1, 4, 6)
    with torch.no_grad():
        S = net.scores(net.body[0](x)).flatten(2)  # the layer's output, before the ReLU after it changes it in place
        torch.testing.assert_close(net(x), head.logits(S), rtol=1e-4, atol=1e-5)
    assert not net.body[0]._forward_hooks


def test_the_hook_is_gone_after_an_error(network):
    net, _ = network
    with pytest.raises(RuntimeError):
        net(torch.rand(3, 2, 4, 6))
    assert not net.body[0]._forward_hooks
