"""What reads the scores: logits in every layout, contributions by closed forms, the identity."""

import pytest
import torch
from torch import nn

from auditor.explainers.deepfacto.score_heads import BlocksHead, LinearScoreHead, along_path, axis_of, native_scores
from auditor.kernels.factorization.deepfacto import LinearHead
from auditor.subject.layers import Layout
from auditor.training.factorization import Factorization, Lift

LAYOUTS = [
    (Layout("map", 6, (3, 5)), (2, 6, 3, 5)),
    (Layout("map-last", 6, (4, 4)), (2, 4, 4, 6)),
    (Layout("tokens", 6, (3, 5)), (2, 15, 6)),
    (Layout("vector", 6, (1, 1)), (2, 6)),
]


@pytest.mark.parametrize(("layout", "shape"), LAYOUTS)
def test_scores_have_the_layers_own_shape(layout, shape):
    """The native scores are those that the factorization itself gives for the layer's output."""
    z = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    M = torch.rand(6, 3, generator=torch.Generator().manual_seed(1))
    block = Factorization(M, axis_of(layout))
    S = Factorization(M)(layout.to_positions(z))
    torch.testing.assert_close(native_scores(S, layout), block(z))
    lifted = Lift(M, axis_of(layout))(native_scores(S, layout)).detach()
    assert lifted.shape == z.shape
    torch.testing.assert_close(layout.to_positions(lifted), M @ S, rtol=1e-5, atol=1e-6)


def test_of_a_linear_map_contributions_are_its_terms():
    g = torch.Generator().manual_seed(0)
    head = LinearScoreHead(LinearHead(torch.randn(4, 3, 2, generator=g), torch.randn(4, generator=g), torch.rand(5, 2)))
    S, targets = torch.rand(6, 3, 5, generator=g), torch.arange(6) % 4
    made = head.contributions(S, targets)
    total = (made.bias + made.parts.sum(1)).float()
    torch.testing.assert_close(total, head.logits(S).gather(1, targets[:, None])[:, 0])
    path = along_path(head.head.logits, S, targets)
    torch.testing.assert_close(path.parts, made.parts, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.module()(S.unflatten(2, (1, 5))), head.logits(S))
    assert not bool(made.error.any())


def test_the_path_integral_of_a_polynomial_is_exact():
    """f(S) = (a'S)(b'S): the integral along t S gives  S_k (a_k b'S + b_k a'S) / 2."""
    g = torch.Generator().manual_seed(1)
    a, b = torch.randn(3, 4, generator=g).double(), torch.randn(3, 4, generator=g).double()

    def f(S):
        return ((S * a).sum((1, 2)) * (S * b).sum((1, 2)))[:, None] + 2

    S = torch.rand(5, 3, 4, generator=g).double()
    made = along_path(f, S, torch.zeros(5, dtype=torch.long))
    left, right = (S * a).sum(2), (S * b).sum(2)
    exact = 0.5 * (left * right.sum(1, keepdim=True) + right * left.sum(1, keepdim=True))
    torch.testing.assert_close(made.parts, exact, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(made.bias, torch.full((5,), 2.0).double())
    assert float(made.error.max()) < 1e-10


def fine_sum(f, S, index, n=4000):
    """The integral by the midpoint rule with so many points."""
    total = torch.zeros_like(S)
    for t in (torch.arange(n) + 0.5) / n:
        at = (t * S).requires_grad_(True)
        (grad,) = torch.autograd.grad(f(at).gather(1, index).sum(), at)
        total += grad / n
    return (S * total).sum(-1)


def test_above_relus_the_sum_is_exact_and_the_terms_are_near_a_fine_sum():
    torch.manual_seed(0)
    layout = Layout("map", 6, (3, 4))
    lift = Lift(torch.rand(6, 3))
    above = nn.Sequential(nn.ReLU(), nn.Conv2d(6, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(10, 3))
    with torch.no_grad():
        lift.bias.normal_()
    head = BlocksHead(lift, above, layout)
    S, targets = torch.rand(70, 3, 12), torch.arange(70) % 3  # more rows than go through at once
    made, logits = head.contributions(S, targets), head.logits(S)
    gap = made.bias + made.parts.sum(1) - logits.double().gather(1, targets[:, None])[:, 0]
    assert float(gap.abs().max()) < 1e-6
    few = slice(0, 3)
    fine = fine_sum(lambda s: head.top(native_scores(s, layout)), S[few], targets[few, None]).detach()
    torch.testing.assert_close(made.parts[few].float(), fine, rtol=0.02, atol=0.005)  # a kink between points is shared
    assert head.cells == 0
    torch.testing.assert_close(head.module()(S.unflatten(2, (3, 4))), logits)
    assert all(p.grad is None for p in head.top.parameters())
