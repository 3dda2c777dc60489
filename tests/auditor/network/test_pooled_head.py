"""Heads that pool, in closed form: against the network's own logits and a fine midpoint rule along the ray."""

import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.explainers.contributions import contributions
from auditor.network.above_layer import prepare_above_layer
from auditor.network.pooled_head import PooledHead


class Net(nn.Module):
    """A map of 6 channels on 5 x 7 positions, then the head under test."""

    def __init__(self, *head: nn.Module) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(2, 6, 3, stride=2), nn.ReLU())
        self.head = nn.Sequential(*head)

    def forward(self, x):
        return self.head(self.features(x))


HEADS = {
    "pool, linear": lambda: (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(6, 4)),
    "convolution, relu, pool": lambda: (
        nn.Dropout(),
        nn.Conv2d(6, 4, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ),
    "convolution, pool": lambda: (nn.Conv2d(6, 4, 1, bias=False), nn.AvgPool2d((5, 7)), nn.Flatten()),
}
OTHERS = {
    "a wider convolution": lambda: (nn.Conv2d(6, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    "a hidden layer": lambda: (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4)),
    "pooling to a grid": lambda: (nn.AdaptiveAvgPool2d((2, 3)), nn.Flatten(), nn.Linear(36, 4)),
    "a strided convolution": lambda: (nn.Conv2d(6, 4, 1, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    "the maximum": lambda: (nn.Conv2d(6, 4, 1), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten()),
}  # fmt: skip


def subject_of(make) -> Subject:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Subject(Net(*make()), input_shape=(2, 11, 15))


@pytest.mark.parametrize("name", HEADS)
def test_the_head_is_read_off_and_contributions_are_those_of_a_fine_rule(name):
    subject = subject_of(HEADS[name])
    above = prepare_above_layer(subject, "features")
    assert above is not None
    assert above.head is not None
    assert above.head.has_relu == ("relu" in name)
    g = torch.Generator().manual_seed(1)
    z = subject.activations(torch.rand(3, 2, 11, 15, generator=g), ["features"])["features"]
    with torch.no_grad():
        torch.testing.assert_close(above.head.logits(z.flatten(2)), subject.forward_from("features", z))
        logits = subject.forward_from("features", z)
    W, S = torch.rand(6, 3, generator=g) - 0.2, torch.rand(3, 3, 35, generator=g)
    targets = [3, 0, 1]
    result = contributions(subject, "features", subject.layout("features"), z, logits, W, S, targets)
    torch.testing.assert_close(result.contributions, slow(subject, W, S, targets), rtol=0, atol=2e-4)  # 4,000 points
    assert float(result.error.max()) < 1e-6
    whole = result.bias + result.contributions.sum(1) + result.residual
    torch.testing.assert_close(whole, logits[torch.arange(3), targets].double(), rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        hat = subject.forward_from("features", (W @ S).view(3, 6, 5, 7))
    torch.testing.assert_close(result.logits_hat, hat, rtol=1e-4, atol=1e-5)


def slow(subject, W, S, targets, n=4000):
    """The path integral by its definition, image by image, point by point in blocks."""
    c = torch.zeros(S.shape[:2], dtype=torch.float64)
    for i, k in enumerate(targets):
        for t in torch.split((torch.arange(n) + 0.5) / n, 400):
            z = (t[:, None, None] * (W @ S[i])).view(-1, 6, 5, 7).requires_grad_(True)
            (gradient,) = torch.autograd.grad(subject.forward_from("features", z)[:, k].sum(), z)
            c[i] += (S[i] * (W.T @ gradient.flatten(2).sum(0))).sum(-1).double() / n
    return c


@pytest.mark.parametrize("name", OTHERS)
def test_another_head_is_left_to_the_rules(name):
    above = prepare_above_layer(subject_of(OTHERS[name]), "features")
    assert above is not None
    assert above.head is None


@pytest.mark.parametrize(
    ("weight", "bias", "s", "share"),
    [(2.0, -1.0, 1.0, 0.5), (-2.0, 1.0, 1.0, 0.5), (2.0, 1.0, 1.0, 1.0), (2.0, -5.0, 1.0, 0.0), (3.0, 1.0, 0.0, 1.0)],
)
def test_a_position_counts_for_the_share_of_the_ray_where_it_is_above_zero(weight, bias, s, share):
    """One channel, one concept, one position: relu(weight s t + bias)."""
    head = PooledHead(torch.tensor([[weight]]), torch.tensor([bias]), has_relu=True)
    start, c, end = head.along_the_ray(torch.ones(1, 1), torch.full((1, 1, 1), s), torch.tensor([0]))
    assert float(c) == pytest.approx(share * weight * s)
    assert float(start) == max(bias, 0)
    assert float(end) == pytest.approx(max(weight * s + bias, 0))
    assert float(start + c.sum()) == pytest.approx(float(end))
