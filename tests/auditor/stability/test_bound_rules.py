"""Each rule of the certified bound against explicit Jacobians: tight where the rule is exact, never below the truth."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from auditor.kernels.networks.operator_norm import convolution_norm
from auditor.network.aten_graph import AtenGraph
from auditor.stability.bound_rules import ACTIVATIONS, GELU
from auditor.stability.certified_bound import bounds_at

aten = torch.ops.aten
KERNEL = torch.randn(3, 2, 2, 2, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
SIGNS = torch.tensor([2.0, -3.0], dtype=torch.float64).view(2, 1, 1)


class Lambda(nn.Module):
    def __init__(self, f) -> None:
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def as_module(f) -> nn.Module:
    return (f if isinstance(f, nn.Module) else Lambda(f)).double().eval()


def graph_of(f, shape) -> AtenGraph:
    return AtenGraph.trace(as_module(f), random(2, *shape))


def bounds(f, shape, std=None):
    graph = graph_of(f, shape)
    return bounds_at(graph, graph.output, std or (1.0,) * shape[0])


def own_constants(monkeypatch) -> None:
    """Multiply nothing out, so that every operation answers with its own constant."""
    monkeypatch.setattr("auditor.stability.bound_signal.MOST_ENTRIES", 0)


def jacobian(f, x) -> torch.Tensor:
    return torch.autograd.functional.jacobian(as_module(f), x).reshape(-1, x.numel())


def largest(matrix) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


def norms(channels, dims=2) -> nn.Module:
    torch.manual_seed(4)
    bn = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d}[dims](channels)
    with torch.no_grad():
        for t in (bn.weight, bn.bias, bn.running_mean):
            t.copy_(torch.randn(channels))
        bn.running_var.copy_(torch.rand(channels) + 0.3)
    return bn


PLAIN_NORM = nn.BatchNorm2d(2, affine=False, eps=0.5)
PLAIN_NORM.running_var.copy_(torch.tensor([0.1, 2.0]))
MATRIX, TALL = random(7, 4, seed=5), random(20, 2, seed=5)

# operations whose own constant is their norm
EXACT = {
    "linear": (nn.Linear(5, 4), (2, 5)),
    "product with a constant matrix": (lambda x: x @ MATRIX, (3, 7)),
    "product with a transposed matrix": (lambda x: x @ MATRIX.T, (3, 4)),
    "affine product": (lambda x: torch.addmm(torch.ones(4).double(), x, MATRIX), (7,)),
    "batch norm": (norms(2), (2, 3, 4)),
    "batch norm of vectors": (norms(5, 1), (5,)),
    "batch norm without weights": (PLAIN_NORM, (2, 3, 4)),
    "average": (nn.AvgPool2d(3, 2, 1), (2, 6, 7)),
    "average, uneven": (nn.AvgPool2d((2, 3), (1, 2), (1, 0), ceil_mode=True, count_include_pad=False), (2, 6, 7)),
    "average, no stride given": (nn.AvgPool2d((3, 2)), (2, 7, 6)),
    "average of one dimension": (nn.AvgPool1d(3, 2, 1), (2, 8)),
    "adaptive average": (nn.AdaptiveAvgPool2d((3, 2)), (2, 7, 5)),
    "adaptive average of one dimension": (nn.AdaptiveAvgPool1d(3), (2, 7)),
    "mean": (lambda x: x.mean((2, 3)), (2, 3, 4)),
    "mean that keeps its dimension": (lambda x: x.mean(-1, keepdim=True), (2, 3, 4)),
    "mean of all but the images": (lambda x: x.mean((1, 2, 3)), (2, 3, 4)),
    "sum": (lambda x: x.sum(2), (2, 3, 4)),
    "sum that keeps its dimension": (lambda x: x.sum((1, -1), keepdim=True), (2, 3, 4)),
    "scaled by channel": (lambda x: x * SIGNS, (2, 3, 4)),
    "scaled by channel, the factor first": (lambda x: SIGNS * x, (2, 3, 4)),
    "divided by channel": (lambda x: x / SIGNS, (2, 3, 4)),
    "scaled by a number": (lambda x: -2.5 * x, (2, 3)),
    "divided by a number": (lambda x: x / 4, (2, 3)),
    "scaled by a scalar": (lambda x: aten.mul.Scalar(x, -3.0), (2, 3)),
    "divided by a scalar": (lambda x: aten.div.Scalar(x, -0.25), (2, 3)),
    "a factor with the dimension of images": (lambda x: x * SIGNS[None], (2, 3, 4)),
    "a factor that repeats the signal": (lambda x: x * torch.full((2, 3, 4), 2.0).double(), (2, 1, 4)),
    "a constant added": (lambda x: x + SIGNS, (2, 3, 4)),
    "a constant less the signal": (lambda x: SIGNS - x, (2, 3, 4)),
    "a constant that repeats the signal added": (lambda x: x + torch.ones(2, 3, 4).double(), (2, 1, 4)),
    "a constant less a multiple": (lambda x: torch.sub(SIGNS, x, alpha=3.0), (2, 3, 4)),
    "padded": (lambda x: F.pad(x, (1, 0, 2, 1)), (2, 3, 4)),
    "padded by hand": (lambda x: aten.pad.default(x, [1, 2]), (2, 3)),
    "padded by name": (lambda x: aten.pad.default(x, [1, 2], "constant"), (2, 3)),
    "expanded": (lambda x: x.expand(-1, 2, 5, 4), (2, 1, 4)),
    "turned": (lambda x: x.permute(0, 3, 1, 2), (2, 3, 4)),
    "transposed": (lambda x: x.transpose(1, 2), (2, 3, 4)),
    "a slice": (lambda x: x[:, :, 1:3], (2, 3, 4)),
    "a choice": (lambda x: x[:, 1], (2, 3, 4)),
    "flat": (lambda x: x.flatten(1), (2, 3, 4)),
    "one of several": (lambda x: x.split([1, 2], 2)[1], (2, 3, 4)),
    "the first of two halves": (lambda x: x.chunk(2, 1)[0], (2, 3)),
    "rolled": (lambda x: x.roll(1, 2), (2, 3, 4)),
    "turned round": (lambda x: x.flip(2), (2, 3, 4)),
    "squeezed": (lambda x: x.squeeze(), (3, 1, 4)),
    "negative": (lambda x: -x, (2, 3)),
    "a class token in front": (lambda x: torch.cat([torch.ones(2, 1, 4).double(), x], 1), (3, 4)),
    "twice": (lambda x: torch.cat([x, x], 1), (2, 3)),
    "stacked": (lambda x: torch.stack([x, x, x], -1), (2, 3)),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_rules_give_the_norm_of_the_explicit_matrix(name, monkeypatch):
    f, shape = EXACT[name]
    matrix = jacobian(f, random(2, *shape))  # of two images at once: blocks of the same norm
    truth = largest(matrix)
    first, second = bounds(f, shape)
    assert first.value == pytest.approx(truth, rel=1e-6)  # rounded up in every step
    assert first.value >= truth * (1 - 1e-12)
    assert second.value == 0
    own_constants(monkeypatch)
    bound, _ = bounds(f, shape)
    assert bound.value == pytest.approx(truth, rel=1e-6)
    assert bound.value >= truth * (1 - 1e-12)


def between(move, shape_after):
    """A linear map, an operation that only moves values, and another linear map: small against the product of norms."""
    torch.manual_seed(0)
    n = math.prod(shape_after)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), Lambda(move), nn.Flatten(), nn.Linear(n, 5)).double()


def narrow(x, dim, start, end):
    return aten.slice.Tensor(x, dim, start, end)  # brackets would also slice the images


MULTIPLIED_OUT = {
    "view": (lambda x: x.view(len(x), 2, -1), (2, 24)),
    "unflatten": (lambda x: x.unflatten(1, (2, 2)), (2, 2, 3, 4)),
    "dropout": (lambda x: F.dropout(x, 0.3, False), (4, 3, 4)),
    "clone": (lambda x: x.clone(), (4, 3, 4)),
    "permute": (lambda x: x.permute(0, 2, 3, 1), (3, 4, 4)),
    "permute with negative dimensions": (lambda x: x.permute(-4, 3, 1, -2), (4, 4, 3)),
    "transpose": (lambda x: x.transpose(1, 2), (3, 4, 4)),
    "transpose from the end": (lambda x: x.transpose(-1, -2), (4, 4, 3)),
    "unsqueeze": (lambda x: x.unsqueeze(1), (1, 4, 3, 4)),
    "unsqueeze before the end": (lambda x: x.unsqueeze(-2), (4, 3, 1, 4)),
    "squeeze": (lambda x: narrow(x, 2, 0, 1).squeeze(2), (4, 4)),
    "slice": (lambda x: narrow(x, 1, 1, 3), (2, 3, 4)),
    "slice from the end": (lambda x: x[..., ::2], (4, 3, 2)),
    "select": (lambda x: x.select(1, 2), (3, 4)),
    "select from the end": (lambda x: x.select(-1, 0), (4, 3)),
    "narrow": (lambda x: aten.narrow.default(x, 1, 1, 2), (2, 3, 4)),
    "pixel shuffle": (lambda x: F.pixel_shuffle(x, 2), (1, 6, 8)),
    "channel shuffle": (lambda x: F.channel_shuffle(x, 2), (4, 3, 4)),
    "pad": (lambda x: F.pad(x, (1, 1)), (4, 3, 6)),
    "average": (lambda x: F.avg_pool2d(x, 2, 1), (4, 2, 3)),
    "adaptive average": (lambda x: F.adaptive_avg_pool2d(x, (2, 3)), (4, 2, 3)),
    "mean": (lambda x: x.mean(2), (4, 4)),
    "mean, keepdim said to be off": (lambda x: aten.mean.dim(x, [3], False).transpose(1, 2), (3, 4)),
    "mean that keeps its dimension": (lambda x: x.mean(2, keepdim=True).transpose(2, 3), (4, 4, 1)),
    "sum": (lambda x: x.sum(-1, keepdim=True), (4, 3, 1)),
    "factor": (lambda x: x * torch.arange(1.0, 5).double().view(4, 1, 1), (4, 3, 4)),
    "factor with the dimension of images": (lambda x: x * torch.arange(1.0, 5).double().view(1, 4, 1, 1), (4, 3, 4)),
    "division": (lambda x: x / torch.arange(1.0, 5).double().view(4, 1, 1), (4, 3, 4)),
    "a skip": (lambda x: x - 0.5 * x.transpose(1, 2).transpose(1, 2), (4, 3, 4)),
    "a weighted skip": (lambda x: torch.sub(x, x * 1.5, alpha=2.0), (4, 3, 4)),
    "a weighted sum": (lambda x: torch.add(x, -1.5 * x, alpha=2.0), (4, 3, 4)),
    "branches": (lambda x: torch.cat([narrow(x, 1, 0, 1), narrow(x, 1, 2, 4) * 2], 1), (3, 3, 4)),
    "branches from the end": (lambda x: torch.cat([x[..., :1], x[..., 2:]], -1), (4, 3, 3)),
    "a stack": (lambda x: torch.stack([narrow(x, 1, 0, 1), narrow(x, 1, 3, 4)], 2), (1, 2, 3, 4)),
}


@pytest.mark.parametrize("name", MULTIPLIED_OUT)
def test_linear_operations_in_a_row_are_multiplied_out(name, monkeypatch):
    move, after = MULTIPLIED_OUT[name]
    net = between(move, after)
    std = (0.5, 0.25)
    truth = largest(jacobian(lambda x: net(x / torch.tensor(std).double().view(2, 1, 1)), random(1, 2, 3, 4)))
    first, second = bounds(net, (2, 3, 4), std)
    assert first.value == pytest.approx(truth, rel=1e-6)
    assert first.value >= truth * (1 - 1e-12)
    assert second.value == 0
    own_constants(monkeypatch)
    rough, _ = bounds(net, (2, 3, 4), std)
    assert 1.05 * truth < rough.value < 40 * truth  # so that losing the matrix would be noticed


KEPT_APART = {
    "rolled": (lambda x: x, lambda x: x.roll(1, 2), (4, 3, 4)),
    "turned round": (lambda x: x, lambda x: x.flip(1), (4, 3, 4)),
    "squeezed": (lambda x: narrow(x, 2, 0, 1), lambda x: x.squeeze(), (4, 4)),
    "squeezed by several": (lambda x: narrow(x, 2, 0, 1), lambda x: x.squeeze((1, 2)), (4, 4)),
}


@pytest.mark.parametrize("name", KEPT_APART)
def test_what_cannot_be_applied_to_another_batch_keeps_its_own_constant(name):
    part, move, after = KEPT_APART[name]
    net = between(lambda x: move(part(x)), after)
    x = random(2, 2, 3, 4)
    truth, below = largest(jacobian(net, x)), largest(jacobian(lambda x: part(net[0](x)), x))
    first, _ = bounds(net, (2, 3, 4))
    assert first.value == pytest.approx(below * largest(net[3].weight.detach()), rel=1e-6)
    assert first.value > truth


CONVOLUTIONS = {
    "plain": (lambda: nn.Conv2d(2, 3, 3), {}),
    "stride": (lambda: nn.Conv2d(2, 3, (3, 2), (2, 1)), {"stride": [2, 1]}),
    "padding": (lambda: nn.Conv2d(2, 3, (3, 2), padding=(1, 0)), {"pad": [(1, 1), (0, 0)]}),
    "dilation": (lambda: nn.Conv2d(2, 3, 2, dilation=(2, 3)), {"dilation": [2, 3]}),
    "groups": (lambda: nn.Conv2d(2, 4, 3, groups=2), {"groups": 2}),
    "same": (lambda: nn.Conv2d(2, 3, (2, 4), padding="same", dilation=(1, 2)),
             {"pad": [(0, 1), (3, 3)], "dilation": [1, 2]}),
    "valid": (lambda: nn.Conv2d(2, 3, 3, padding="valid"), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_on_pixels_take_the_scale_into_their_weights(name, monkeypatch):
    make, options = CONVOLUTIONS[name]
    torch.manual_seed(1)
    conv, std = make().double(), (0.25, 4.0)
    inverse = 1 / torch.tensor(std).double()
    scale = inverse.view(1, 2, 1, 1) if conv.groups == 1 else inverse.repeat_interleave(2).view(4, 1, 1, 1)
    full = {"stride": [1, 1], "pad": [(0, 0), (0, 0)], "dilation": [1, 1], "groups": 1} | options
    with torch.no_grad():
        want = convolution_norm(conv.weight * scale, (7, 8), **full)
    truth = largest(jacobian(lambda x: conv(x * inverse.view(2, 1, 1)), random(1, 2, 7, 8)))
    first, _ = bounds(conv, (2, 7, 8), std)
    assert first.value == pytest.approx(truth, rel=1e-6)
    own_constants(monkeypatch)
    bound, _ = bounds(conv, (2, 7, 8), std)
    assert bound.value == pytest.approx(want, rel=1e-8)
    assert bound.value >= truth
    deeper, _ = bounds(nn.Sequential(nn.ReLU(), conv), (2, 7, 8), std)  # no longer on pixels: one factor for all
    with torch.no_grad():
        alone = convolution_norm(conv.weight, (7, 8), **full)
    assert deeper.value == pytest.approx(alone / 0.25, rel=1e-8)


OTHER_RANKS = {
    "one dimension": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), (2, 9)),
    "three dimensions": (lambda: nn.Conv3d(2, 2, 2, padding=(1, 0, 1)), (2, 3, 4, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1), (2, 4, 3)),
    "transposed, uneven": (lambda: nn.ConvTranspose2d(2, 4, (2, 3), (1, 2), dilation=(2, 1), groups=2), (2, 4, 3)),
    "transposed, one dimension": (lambda: nn.ConvTranspose1d(2, 3, 4, stride=3, padding=1), (2, 5)),
    "transposed, defaults": (lambda: Lambda(lambda x: F.conv_transpose2d(x, KERNEL.transpose(0, 1))), (2, 4, 3)),
    "defaults": (lambda: Lambda(lambda x: F.conv2d(x, KERNEL)), (2, 4, 3)),
}


@pytest.mark.parametrize("name", OTHER_RANKS)
def test_convolutions_of_other_ranks_are_bounded_closely(name, monkeypatch):
    torch.manual_seed(2)
    make, shape = OTHER_RANKS[name]
    net = make()
    truth = largest(jacobian(net, random(1, *shape)))
    first, _ = bounds(net, shape)
    assert first.value == pytest.approx(truth, rel=1e-6)
    own_constants(monkeypatch)
    bound, _ = bounds(net, shape)
    assert truth * (1 - 1e-12) <= bound.value <= 1.5 * truth  # small maps: the border takes its share


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_batch_norm_is_folded_into_the_map_before_it(kind):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), norms(5, 1)) if kind == "linear" else nn.Sequential(
        nn.Conv2d(1, 5, 2), norms(5))  # fmt: skip
    graph = graph_of(net, (1, 3, 4))
    first, _ = bounds_at(graph, graph.output, (0.5,))
    truth = 2 * largest(jacobian(net, random(1, 1, 3, 4)))
    assert first.value == pytest.approx(truth, rel=1e-6)


CURVED = {
    "gelu": (nn.GELU(), *GELU["none"]),
    "gelu by tanh": (nn.GELU("tanh"), *GELU["tanh"]),
    "leaky, steep below": (nn.LeakyReLU(1.5), 1.5, None),
    "leaky, falling below": (nn.LeakyReLU(-2.0), 2.0, None),
    "leaky": (nn.LeakyReLU(0.2), 1.0, None),
    "leaky by default": (lambda x: aten.leaky_relu.default(x), 1.0, None),
    "elu": (nn.ELU(), 1.0, 1.0),
    "elu with a kink": (nn.ELU(0.5), 1.0, None),
    "elu, steep below": (nn.ELU(3.0), 3.0, None),
    "elu, scaled": (lambda x: aten.elu.default(x, 0.5, 1.7, 2.0), 1.7, 3.4),
    "elu, scaled with a kink": (lambda x: aten.elu.default(x, 2.0, 1.5, 2.0), 6.0, None),
    "elu, falling": (lambda x: aten.elu.default(x, 1.0, -2.0), 2.0, 2.0),
    "softplus": (nn.Softplus(), 1.0, 0.25),
    "softplus, sharper": (nn.Softplus(2.0), 1.0, 0.5),
    "softplus that turns linear early": (nn.Softplus(1.0, 19.0), 1.0, None),
    "softplus that turns linear at the usual place": (nn.Softplus(1.0, 20.0), 1.0, 0.25),
    "softplus by default": (lambda x: aten.softplus.default(x), 1.0, 0.25),
    "prelu, steep below": (lambda x: F.prelu(x, torch.tensor([0.3, -2.0]).double()), 2.0, None),
    "prelu": (lambda x: F.prelu(x, torch.tensor([0.3, -0.5]).double()), 1.0, None),
}


@pytest.mark.parametrize("name", CURVED)
def test_activations_have_their_steepest_slope_and_largest_curvature(name):
    f, slope, curvature = CURVED[name]
    first, second = bounds(f, (2, 3))
    assert first.value == pytest.approx(slope, rel=1e-6)
    if curvature is None:
        assert second.value is None
        assert "gradient of" in second.reason
    else:
        assert second.value == pytest.approx(curvature, rel=1e-6)
    x = torch.linspace(-9, 9, 36_001, dtype=torch.float64).view(1, 1, -1).expand(1, 2, -1).contiguous().requires_grad_()
    (slopes,) = torch.autograd.grad(as_module(f)(x).sum(), x)
    steepest = float(slopes.abs().max())
    assert 0.99 * slope <= steepest <= first.value
    if curvature is not None:
        change = float(((slopes[..., 1:] - slopes[..., :-1]).abs() / (18 / 36_000)).max())
        assert 0.99 * curvature <= change <= second.value * (1 + 1e-6)


@pytest.mark.parametrize("target", [aten.tanh.default, aten.sigmoid.default, aten.silu.default], ids=str)
def test_constants_of_activations_come_from_the_table(target):
    first, second = bounds(lambda x: target(3.0 * x), (2, 3))
    s, t = ACTIVATIONS[target]
    assert first.value == pytest.approx(3 * s, rel=1e-6)
    assert second.value == pytest.approx(9 * t, rel=1e-6)


GAMMA = torch.tensor([-3.0, 0.5, 1.0, 2.0], dtype=torch.float64)
NORMED = {
    "layer norm": (lambda x: F.layer_norm(x, (4,), torch.full((4,), -2.0).double(), None, 0.1), 2 / 0.1**0.5),
    "layer norm without weights": (lambda x: F.layer_norm(x, (4,), None, None, 0.3), 0.3**-0.5),
    "layer norm, native": (lambda x: aten.native_layer_norm.default(x, [4], None, None, 0.2)[0], 0.2**-0.5),
    "layer norm, defaults": (lambda x: aten.layer_norm.default(x, [4]), 1e-5**-0.5),
    "layer norm, weights only": (lambda x: aten.layer_norm.default(
        x, [4], torch.full((4,), -2.0).double()), 2 * 1e-5**-0.5),
    "layer norm, weights and bias": (lambda x: aten.layer_norm.default(
        x, [4], torch.full((4,), -2.0).double(), torch.ones(4).double()), 2 * 1e-5**-0.5),
    "group norm, weights only": (lambda x: aten.group_norm.default(
        x, 2, torch.full((4,), 3.0).double()), 3 * 1e-5**-0.5),
    "group norm, weights and bias": (lambda x: aten.group_norm.default(
        x, 2, torch.full((4,), 3.0).double(), torch.ones(4).double()), 3 * 1e-5**-0.5),
    "group norm": (lambda x: F.group_norm(x, 2, torch.full((4,), 3.0).double(), None, 0.1), 3 / 0.1**0.5),
    "group norm without weights": (lambda x: F.group_norm(x, 2, None, None, 0.3), 0.3**-0.5),
    "group norm, defaults": (lambda x: aten.group_norm.default(x, 2), 1e-5**-0.5),
    "group norm, native": (lambda x: aten.native_group_norm.default(
        x, torch.full((4,), -5.0).double(), None, 2, 4, 1, 2, 0.2)[0], 5 * 0.2**-0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMED)
def test_norms_are_steepest_where_all_entries_are_equal(name):
    f, want = NORMED[name]
    first, second = bounds(f, (4,))
    assert first.value == pytest.approx(want, rel=1e-6)
    assert second.value is None
    at_equal = largest(jacobian(f, torch.full((2, 4), 0.7, dtype=torch.float64)))
    assert at_equal == pytest.approx(want, rel=1e-6)


def test_uneven_weights_of_a_norm_count_by_the_largest():
    first, _ = bounds(lambda x: F.layer_norm(x, (4,), GAMMA, None, 0.25), (4,))
    assert first.value == pytest.approx(6.0)
    assert largest(jacobian(lambda x: F.layer_norm(x, (4,), GAMMA, None, 0.25), torch.ones(1, 4).double())) <= 6.0


def test_a_norm_without_eps_has_no_constant():
    first, _ = bounds(lambda x: F.layer_norm(x, (4,), None, None, 0.0), (4,))
    assert first.value is None
    assert "layer_norm without eps" in first.reason


MAX_POOLS = {
    "no overlap": (nn.MaxPool2d(2), (1, 8, 8)),
    "overlap": (nn.MaxPool2d(3, 2, 1), (1, 9, 9)),
    "dense": (nn.MaxPool2d(3, 1), (1, 7, 7)),
    "uneven": (nn.MaxPool2d((4, 3), (3, 1)), (1, 10, 7)),
    "dilated": (nn.MaxPool2d(3, 2, dilation=2), (1, 11, 11)),
    "dilated and dense": (nn.MaxPool2d(2, 1, dilation=3), (1, 9, 9)),
    "one dimension": (lambda x: aten.max_pool1d.default(x, [3], [2]), (1, 11)),
    "one dimension, no stride given": (lambda x: aten.max_pool1d.default(x, [3]), (1, 11)),
    "adaptive": (nn.AdaptiveMaxPool2d((4, 3)), (1, 6, 7)),
    "adaptive, even": (nn.AdaptiveMaxPool2d((3, 2)), (1, 6, 8)),
    "adaptive, larger than its input": (nn.AdaptiveMaxPool2d((7, 2)), (1, 3, 5)),
    "adaptive, several channels": (nn.AdaptiveMaxPool2d((5, 4)), (3, 8, 6)),
}


@pytest.mark.parametrize("name", MAX_POOLS)
def test_max_pools_count_the_windows_that_one_entry_can_win(name):
    """The worst case is one entry that is the largest of all its windows: try every entry."""
    pool, shape = MAX_POOLS[name]
    module, counts = as_module(pool), []
    for i in range(math.prod(shape)):
        spike = torch.zeros(1, *shape, dtype=torch.float64)
        spike.view(-1)[i] = 1
        counts.append(int((module(spike) == 1).sum()))
    first, second = bounds(pool, shape)
    assert first.value == pytest.approx(math.sqrt(max(counts)), rel=1e-6)
    assert second.value is None


def test_the_largest_entry_of_some_dimensions_moves_no_faster_than_its_input():
    first, second = bounds(lambda x: x.amax((2, 3)), (2, 3, 4))
    assert first.value == pytest.approx(1.0)
    assert "amax" in second.reason


def test_branches_of_different_bases_add_their_constants(monkeypatch):
    one, two = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
    torch.manual_seed(1)
    for layer in (one, two):
        nn.init.normal_(layer.weight)

    class Two(nn.Module):
        def __init__(self, join) -> None:
            super().__init__()
            self.one, self.two, self.join = one, two, join

        def forward(self, x):
            return self.join(torch.relu(self.one(x)), torch.tanh(self.two(x)))

    a, b = largest(one.weight.detach()), largest(two.weight.detach())
    cases = {
        "sum": (lambda s, t: s + t, a + b),
        "weighted difference": (lambda s, t: torch.sub(s, t, alpha=2.5), a + 2.5 * b),
        "repeated": (lambda s, t: s[:, :1] + t, a * math.sqrt(3) + b),
        "joined": (lambda s, t: torch.cat([s, t], 1), math.hypot(a, b)),
    }
    for name, (join, want) in cases.items():
        first, _ = bounds(Two(join), (4,), (1.0,) * 4)
        assert first.value == pytest.approx(want, rel=1e-6), name


NOT_LIPSCHITZ = {
    "two signals multiplied": (lambda x: x * x.flip(1), "mul multiplies two signals"),
    "a signal below": (lambda x: 1.0 / x, "multiplies two signals|has no rule|reciprocal"),
    "a constant over a signal": (lambda x: SIGNS[0, 0] / x, "div multiplies two signals"),
    "two signals in a matrix product": (lambda x: x @ x.transpose(1, 2), "matmul|bmm"),
    "softmax": (lambda x: x.softmax(1), "softmax has no global Lipschitz constant"),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), "attention"),
    "no rule": (lambda x: x.cumsum(1), "cumsum has no rule for a Lipschitz constant"),
    "the larger of two signals": (lambda x: torch.maximum(x, x.flip(1)), "maximum combines signals"),
    "mean over the images": (lambda x: x.mean(0, keepdim=True), "mean mixes the images of a batch"),
    "mean over everything": (lambda x: x.mean((0, 1, 2)), "mean mixes the images of a batch"),
    "images joined": (lambda x: torch.cat([x, x]), "cat mixes the images of a batch"),
    "images joined, counted from the end": (lambda x: torch.cat([x, x], -3), "cat mixes the images of a batch"),
    "reflection": (lambda x: aten.pad.default(x, [1, 1], "reflect"), "pad with mode 'reflect'|reflection_pad"),
    "a divisor of its own": (lambda x: F.avg_pool2d(x[:, None], 2, divisor_override=3), "divisor of its own"),
    "a second result": (lambda x: aten.native_layer_norm.default(x, [5], None, None, 0.1)[1], "more than its first"),
    "factors in a product": (
        lambda x: torch.addmm(torch.ones(2).double(), x.flatten(1), TALL, beta=2.0), "addmm with factors"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_LIPSCHITZ)
def test_what_has_no_rule_is_named(name):
    f, sentence = NOT_LIPSCHITZ[name]
    first, second = bounds(f, (4, 5))
    assert first.value is None
    assert second.value is None
    assert re.search(sentence, first.reason), first.reason


def test_the_layer_is_named():
    first, _ = bounds(nn.Sequential(nn.Identity(), Lambda(lambda x: x.cumsum(1))), (4, 5))
    assert first.reason == "cumsum in 1 has no rule for a Lipschitz constant"


@pytest.mark.parametrize("target", list(ACTIVATIONS), ids=str)
def test_slopes_and_curvatures_of_activations_hold_and_are_reached(target):
    x = torch.linspace(-12, 12, 480_001, dtype=torch.float64, requires_grad=True)
    args = {"aten.hardtanh.default": (-1.0, 1.0), "aten.clamp.default": (-1.0, 1.0)}.get(str(target), ())
    args = (0.5,) if "clamp_m" in str(target) else args
    (slope,) = torch.autograd.grad(target(x, *args).sum(), x)
    s, t = ACTIVATIONS[target]
    assert 0.99 * s <= float(slope.abs().max()) <= s * (1 + 1e-9)
    if math.isfinite(t):
        curvature = (slope[1:] - slope[:-1]).abs() / (x[1] - x[0])
        assert 0.99 * t <= float(curvature.max().detach()) + 1e-12 <= t * (1 + 1e-6) + 1e-12


@pytest.mark.parametrize("form", list(GELU))
def test_gelu_constants(form):
    x = torch.linspace(-8, 8, 320_001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(nn.functional.gelu(x, approximate=form).sum(), x)
    x = x.detach()
    s, t = GELU[form]
    assert 0.99 * s <= float(slope.abs().max()) <= s
    assert 0.99 * t <= float(((slope[1:] - slope[:-1]).abs() / (x[1] - x[0])).max()) <= t * (1 + 1e-6)
