"""Gaussian moments against closed forms, sampling, and exported graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from auditor.perturbation.gaussian_moments import ClosedFormError, Moments


def sampled(net: nn.Module, mean: Tensor, var: Tensor, draws: int = 100_000, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Plain truth: draw, run, take moments. mean is (1, ...)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        out = net(mean + var.sqrt() * torch.randn(draws, *mean.shape[1:], generator=generator))
    return out.mean(0), out.var(0)


@pytest.mark.parametrize(("m", "v", "mean", "var"), [(0, 1, 0.398942, 0.340845), (1, 4, 1.395593, 2.213763)])
def test_relu_moments(m: float, v: float, mean: float, var: float) -> None:
    out = nn.functional.relu(Moments.of(torch.tensor([[float(m)]]).double(), torch.tensor([[float(v)]]).double()))
    assert float(out.mean_) == pytest.approx(mean, abs=2e-6)
    assert float(out.variance()) == pytest.approx(var, abs=2e-6)


def test_leaky_relu_moments_match_sampling() -> None:
    m, v = torch.tensor([[0.4, -1.2]]), torch.tensor([[1.5, 0.7]])
    out = nn.LeakyReLU(0.2)(Moments.of(m, v))
    mean, var = sampled(nn.LeakyReLU(0.2), m, v, 400_000)
    torch.testing.assert_close(out.mean_[0], mean, rtol=0, atol=0.01)
    torch.testing.assert_close(out.variance()[0], var, rtol=0.02, atol=0)


def linear_net() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 3, (3, 2), padding=1, stride=2),
        nn.BatchNorm2d(3),
        nn.AvgPool2d(2, stride=1, padding=1, count_include_pad=False),
        nn.AdaptiveAvgPool2d((2, 3)),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(18, 4),
    ).eval()
    bn = net[1]
    assert isinstance(bn, nn.BatchNorm2d)
    bn.running_mean, bn.running_var = torch.tensor([0.1, -0.2, 0.4]), torch.tensor([0.5, 1.2, 2.0])
    return net


def moments_of(net: nn.Module, mean: Tensor, var: Tensor, low_rank: bool) -> Moments:
    if not low_rank:
        return net(Moments.of(mean, var))
    n = mean[0].numel()
    factor = torch.diag(var.flatten().sqrt()).view(n, 1, *mean.shape[1:])
    return net(Moments.of(mean, factor=factor))


@pytest.mark.parametrize("layer", range(7))
def test_each_linear_layer_is_exact(layer: int) -> None:
    """Independent inputs into one linear layer: both forms are exact, checked against the layer's own matrix."""
    net = linear_net()
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(1, 2, 11, 9, generator=generator)
    with torch.no_grad():
        for before in list(net)[:layer]:
            mean = before(mean)
        one, var = net[layer], torch.rand(mean.shape, generator=generator) + 0.1
        jacobian = torch.autograd.functional.jacobian(one, mean)
        exact = (jacobian.flatten(-mean.dim()).square() * var.flatten()).sum(-1).view_as(one(mean))
        for low_rank in (False, True):
            out = moments_of(one, mean, var, low_rank)
            torch.testing.assert_close(out.mean_, one(mean))
            torch.testing.assert_close(out.variance(), exact)


def test_low_rank_is_exact_for_linear_networks_and_diagonal_for_one_layer() -> None:
    net = linear_net()
    generator = torch.Generator().manual_seed(1)
    mean, var = torch.randn(1, 2, 11, 9, generator=generator), torch.rand(1, 2, 11, 9, generator=generator)
    out = moments_of(net, mean, var, low_rank=True)
    true_mean, true_var = sampled(net, mean, var)
    assert ((out.mean_[0] - true_mean).abs() <= 4 * (true_var / 100_000).sqrt()).all()
    torch.testing.assert_close(out.variance()[0], true_var, rtol=4 * (2 / 100_000) ** 0.5, atol=0)


class Residual(nn.Module):
    """Everything at once: residual sum, concatenation, methods instead of modules, preprocessing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        for i, statistic in enumerate(
            (self.norm.running_mean, self.norm.running_var, self.norm.weight, self.norm.bias)
        ):
            assert statistic is not None
            nn.init.uniform_(statistic, 0.2 + i, 0.9 + i)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = (x - 0.2) / 0.7
        h = torch.relu(self.a(x))
        h = h + self.norm(self.b(h)).relu()
        h = torch.cat([h, 2 * h], dim=1).mean((2, 3))
        return self.head(h.view(h.size(0), -1))


def test_runs_any_forward_and_its_exported_graph_alike() -> None:
    net = Residual().eval()
    x, var = torch.rand(2, 1, 7, 5), torch.rand(2, 1, 7, 5)
    exported = torch.export.unflatten(torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim("b")},)))
    for moments in (lambda: Moments.of(x, var), lambda: Moments.of(x, factor=var[None].repeat(3, 1, 1, 1, 1))):
        plain, graph = net(moments()), exported(moments())
        torch.testing.assert_close(plain.mean_, graph.mean_)
        torch.testing.assert_close(plain.variance(), graph.variance())
        assert plain.variance().min() > 0


def test_without_variance_it_is_the_network() -> None:
    net, x = Residual().eval(), torch.rand(3, 1, 7, 5)
    out = net(Moments.of(x, torch.zeros_like(x)))
    torch.testing.assert_close(out.mean_, net(x), rtol=0, atol=1e-3)  # EPS in every root
    assert out.variance().max() < 1e-4


def test_gradients_reach_the_input_and_are_finite_at_zero_variance() -> None:
    net = Residual().eval()
    s = torch.ones(1, 1, 7, 5, requires_grad=True)
    out = net(Moments.of(s * 0.5, (1 - s) ** 2))
    (g,) = torch.autograd.grad(out.mean_.sum() + out.variance().sum(), s)
    assert g.isfinite().all()
    assert g.abs().max() > 0


@pytest.mark.parametrize(
    ("module", "named"),
    [(nn.MaxPool2d(2), "max_pool2d"), (nn.Sigmoid(), "sigmoid"), (nn.GELU(), "gelu"), (nn.LayerNorm(4), "layer_norm")],
)
def test_an_operation_without_a_rule_is_named(module: nn.Module, named: str) -> None:
    with pytest.raises(ClosedFormError, match=named):
        module(Moments.of(torch.zeros(1, 4, 4, 4), torch.ones(1, 4, 4, 4)))


def test_train_mode_is_refused() -> None:
    with pytest.raises(ClosedFormError, match="eval mode"):
        nn.Dropout(0.5)(Moments.of(torch.zeros(1, 4), torch.ones(1, 4)))
