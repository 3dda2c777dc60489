"""The certified bound against explicit Jacobians, operation by operation, and on networks of torchvision."""

import math
import re

import pytest
import torch
import torchvision
from torch import nn

from auditor import Subject
from auditor.network.aten_graph import AtenGraph
from auditor.stability.bound_signal import Signal
from auditor.stability.certified_bound import bounds_at, bounds_of, certified_bound


class Skip(nn.Module):
    """A linear residual block: its norm is that of 1 + A, not 1 + |A|."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x - 0.5 * self.inner(x)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(2, 1, (1, 3), padding=(0, 1))

    def forward(self, x):
        return torch.cat([self.a(x), self.b(x)], 1)


class Lambda(nn.Module):
    def __init__(self, f) -> None:
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


def norms(channels: int) -> nn.BatchNorm2d:
    bn = nn.BatchNorm2d(channels)
    with torch.no_grad():
        for t in (bn.weight, bn.bias, bn.running_mean):
            t.copy_(torch.randn(channels))
        bn.running_var.copy_(torch.rand(channels) + 0.3)
    return bn


LINEAR = {
    "conv and batch norm": lambda: nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False), norms(3)),
    "batch norm alone": lambda: norms(2),
    "transposed": lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1),
    "same padding": lambda: nn.Conv2d(2, 3, (2, 3), padding="same"),
    "average": lambda: nn.AvgPool2d(3, 2, 1),
    "average, uneven": lambda: nn.AvgPool2d((2, 3), (1, 2), (1, 0), ceil_mode=True, count_include_pad=False),
    "adaptive": lambda: nn.AdaptiveAvgPool2d((3, 2)),
    "global mean": lambda: Lambda(lambda x: x.mean((2, 3))),
    "sum": lambda: Lambda(lambda x: x.sum(2, keepdim=True)),
    "skip": lambda: Skip(nn.Conv2d(2, 2, 3, padding=1)),
    "branches": Branches,
    "scaled": lambda: Lambda(lambda x: (x * torch.tensor([2.0, -3.0]).view(2, 1, 1) + 1) / 4),
    "turned": lambda: Lambda(lambda x: x.permute(0, 2, 3, 1).flatten(2)[:, 1:].transpose(1, 2)),
    "deep": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(60, 7), nn.Linear(7, 9)),
    "padded": lambda: nn.Sequential(nn.ZeroPad2d((1, 0, 2, 1)), nn.Conv2d(2, 2, 2)),
}


def jacobian(net: nn.Module, shape, std) -> torch.Tensor:
    """The explicit matrix with respect to pixels, column by column."""
    x = torch.rand(1, *shape, dtype=torch.float64)
    scale = torch.tensor(std, dtype=torch.float64).view(-1, 1, 1)
    j = torch.autograd.functional.jacobian(lambda p: net(p / scale), x)
    return j.reshape(-1, x.numel())


@pytest.mark.parametrize("name", LINEAR)
def test_linear_networks_have_their_exact_norm(name, monkeypatch):
    torch.manual_seed(3)
    net = LINEAR[name]().eval().double()
    std = (0.25, 0.5)
    graph = AtenGraph.trace(net, torch.rand(2, 2, 6, 7, dtype=torch.float64))
    first, second = bounds_at(graph, graph.output, std)
    truth = float(torch.linalg.matrix_norm(jacobian(net, (2, 6, 7), std), 2))
    assert first.value == pytest.approx(truth, rel=1e-6)  # rounded up in every step
    assert first.value >= truth * (1 - 1e-12)
    assert second.value == 0
    # the same where nothing is multiplied out: every operation's own constant
    monkeypatch.setattr("auditor.stability.bound_signal.MOST_ENTRIES", 0)
    rough, _ = bounds_at(graph, graph.output, std)
    assert first.value * (1 - 1e-9) <= rough.value <= 4 * truth


BENT = {
    "relu": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(60, 5)),
    "max pool": lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.MaxPool2d(3, 2, 1), nn.LeakyReLU(1.5)),
    "adaptive max": lambda: nn.Sequential(nn.AdaptiveMaxPool2d((4, 3)), nn.PReLU(2)),
    "smooth": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 2), nn.Sigmoid(), nn.Flatten()),
    "modern": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.GELU(), nn.Conv2d(4, 2, 1), nn.SiLU()),
    "softplus": lambda: nn.Sequential(nn.Flatten(), nn.Linear(84, 6), nn.Softplus(2), nn.Linear(6, 4), nn.ELU()),
    "residual": lambda: nn.Sequential(Skip(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU())), nn.Flatten()),
    "last norm": lambda: nn.Sequential(nn.Flatten(), nn.Linear(84, 6), nn.LayerNorm(6)),
}


@pytest.mark.parametrize("name", BENT)
def test_no_pair_exceeds_the_bounds(name):
    torch.manual_seed(5)
    net = BENT[name]().eval().double()
    graph = AtenGraph.trace(net, torch.rand(2, 2, 6, 7, dtype=torch.float64))
    first, second = bounds_at(graph, graph.output, (0.5, 0.5))
    assert math.isfinite(first.value)
    at = [torch.randn(1, 2, 6, 7, dtype=torch.float64) for _ in range(6)]
    jacobians = [torch.autograd.functional.jacobian(lambda p: net(p / 0.5), x).reshape(-1, 84) for x in at]
    largest = max(float(torch.linalg.matrix_norm(j, 2)) for j in jacobians)
    assert 0 < largest <= first.value
    smooth = name in ("smooth", "softplus")
    assert (second.value is not None) == smooth
    if smooth:
        pairs = [(a, b) for a in range(6) for b in range(a)]
        ratios = [torch.linalg.matrix_norm(jacobians[a] - jacobians[b], 2) / (at[a] - at[b]).norm() for a, b in pairs]
        assert 0 < float(max(ratios)) <= second.value
    else:
        assert "gradient of" in second.reason


def test_what_is_not_lipschitz_is_named():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(7, 1, batch_first=True)

        def forward(self, x):
            t = x.flatten(1, 2)
            return self.inner(t, t, t, need_weights=False)[0].mean(1)

    for net, word in [
        (Attention(), "softmax|attention"),
        (Lambda(lambda x: (x * x).flatten(1)), "mul.* multiplies two"),
    ]:
        bound = certified_bound(Subject(net, input_shape=(2, 6, 7)), "")
        assert bound.value is None
        assert re.search(word, bound.reason), bound.reason


@pytest.mark.parametrize(
    "name",
    ["squeezenet1_1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mobilenet_v3_small", "resnet18"))],
)
def test_networks_of_torchvision_get_a_bound_or_a_reason(name):
    torch.manual_seed(0)
    subject = Subject(getattr(torchvision.models, name)(), input_shape=(3, 33, 35), std=0.25)
    first, second = bounds_of(subject, "")
    assert second.value is None
    if name == "mobilenet_v3_small":
        assert first.value is None
        assert "mul in features.1.block.1 multiplies two signals" in first.reason
        return
    assert 0 < first.value < 1e30
    x = torch.rand(2, *subject.input_shape)
    with torch.no_grad():
        a = subject.logits(x)
    assert float((a[0] - a[1]).norm() / (x[0] - x[1]).norm()) < first.value
    assert certified_bound(subject, "") is first  # kept


def test_an_unknown_layer_gives_a_reason(tiny):
    assert "no operation belongs to layer 'nosuch'" in certified_bound(tiny, "nosuch").reason


def test_a_signal_that_does_not_change_has_no_kinks():
    still = Signal((3,), 0.0, 0.0).bent(1.0, math.inf, "relu")
    assert still.second == 0
