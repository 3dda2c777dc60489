"""Each rule against its operation written out: where every unit of mass goes, and that none appears or disappears."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from auditor.attribution.excitation_rules import pass_down, safe_reciprocal
from auditor.errors import LayerError
from tests.auditor.attribution.slow_walk import dense_matrix, reference_rule, seeded, walk_of

aten = torch.ops.aten
WEIGHTS = torch.tensor([0.5, -2.0, 0.0, 3.0], dtype=torch.float64)


class Lambda(nn.Module):
    def __init__(self, f) -> None:
        super().__init__()
        self.f = f
        self.register_buffer("weights", WEIGHTS)

    def forward(self, x):
        return self.f(x) if self.f.__code__.co_argcount == 1 else self.f(x, self.weights)


def images(*shape, seed=0):
    return torch.rand(*shape, generator=seeded(seed), dtype=torch.float64) + 0.1


def masses(walk, n=3, signed=False):
    p = images(n, *walk.values[walk.graph.output].shape, seed=7)
    return p - 0.6 if signed else p


MOVES = {
    "permute": (lambda x: x.permute(0, 3, 1, 2), (2, 3, 4, 5)),
    "permute, counted from the end": (lambda x: x.permute(-4, -2, -1, 1), (2, 3, 4, 5)),
    "permute with the batch": (lambda x: x.permute(2, 0, 1), (2, 3, 4)),
    "transpose": (lambda x: x.transpose(1, 3), (2, 3, 4, 5)),
    "transpose, counted from the end": (lambda x: x.transpose(-1, -3), (2, 3, 4, 5)),
    "transpose with the batch": (lambda x: x.transpose(0, 2), (2, 3, 4)),
    "slice with a step": (lambda x: x[:, :, 1:5:2], (2, 3, 6)),
    "slice of the last dimension": (lambda x: x[..., -3:-1], (2, 3, 6)),
    "slice, counted from the end": (lambda x: aten.slice.Tensor(x, -2, 1, 3), (2, 4, 3)),
    "slice of the batch": (lambda x: x[1:], (3, 4)),
    "slice without arguments": (lambda x: aten.slice.Tensor(x), (2, 3, 4)),
    "select": (lambda x: x[:, 2], (2, 3, 4)),
    "select from the end": (lambda x: x.select(-1, -2), (2, 3, 4)),
    "select an image": (lambda x: x[1], (2, 3, 4)),
    "expand": (lambda x: x.expand(-1, 3, 4, -1), (2, 3, 1, 5)),
    "expand in front": (lambda x: x.expand(3, 4, 2, 5), (4, 1, 5)),
    "concatenate": (lambda x: torch.cat([x[:, :2], x, x[:, 1:]], 1), (2, 3, 4)),
    "concatenate the last dimension": (lambda x: torch.cat([x[..., :1], x], -1), (2, 3, 4)),
    "concatenate the batch": (lambda x: torch.cat([x, x[:1]]), (2, 3)),
    "concatenate by keyword": (lambda x: torch.ops.aten.cat.default([x[:, :2], x], dim=1), (2, 3)),
    "pad": (lambda x: F.pad(x, (1, 2, 0, 3)), (2, 3, 4, 5)),
    "pad and crop": (lambda x: F.pad(x, (-1, 2)), (2, 3, 5)),
    "pad with zero": (lambda x: aten.constant_pad_nd.default(x, [1, 0], 0.0), (2, 3)),
    "roll": (lambda x: x.roll((1, 2), (1, 3)), (2, 3, 4, 5)),
    "roll, counted from the end": (lambda x: x.roll((3, -1), (-1, -2)), (2, 3, 4, 5)),
    "split": (lambda x: x.split(2, 1)[1], (2, 5, 3)),
    "split of the batch": (lambda x: x.split(1)[1], (2, 5)),
    "split with sizes": (lambda x: x.split([1, 3, 2], -1)[1], (2, 2, 6)),
    "split with sizes, first and last": (lambda x: torch.cat(x.split([1, 3, 2], 2)[::2], 2), (2, 2, 6)),
    "split with sizes by keyword": (lambda x: aten.split_with_sizes.default(x, [1, 2], dim=1)[1], (2, 3)),
    "chunk": (lambda x: x.chunk(3, 2)[2], (2, 2, 7)),
    "unbind": (lambda x: x.unbind(1)[2], (2, 3, 4)),
    "unbind from the end": (lambda x: x.unbind(-1)[1], (2, 3, 4)),
    "unbind the batch": (lambda x: x.unbind()[1], (2, 3)),
    "reshape": (lambda x: x.reshape(2, 4, 3), (2, 3, 4)),
    "flatten": (lambda x: x.flatten(1), (2, 3, 4)),
    "squeeze": (lambda x: x.squeeze(2), (2, 3, 1, 4)),
    "unsqueeze": (lambda x: x.unsqueeze(-1), (2, 3)),
    "unflatten": (lambda x: x.unflatten(1, (2, 3)), (2, 6)),
    "clone": (lambda x: x.clone() * 1.0, (2, 3)),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_only_moves_values_moves_their_mass_back(name):
    """Such an operation is a matrix of zeros and ones, so the mass goes down by its transpose."""
    operation, shape = MOVES[name]
    x = images(*shape)
    walk = walk_of(Lambda(operation), x)
    p = masses(walk, signed=True)
    matrix = torch.autograd.functional.jacobian(operation, x).reshape(p[0].numel(), -1)
    assert set(matrix.unique().tolist()) <= {0.0, 1.0}
    want = (p.flatten(1) @ matrix).view(3, *shape)
    torch.testing.assert_close(walk.down(walk.graph.output, p, walk.graph.input), want, rtol=0, atol=1e-12)


POOLS = {
    "overlapping": (nn.MaxPool2d(3, stride=2, padding=1), (2, 3, 7, 9)),
    "plain": (nn.MaxPool2d(2), (2, 3, 7, 9)),
    "uneven and dilated": (nn.MaxPool2d((2, 3), stride=(1, 2), dilation=(2, 1)), (2, 3, 7, 9)),
    "with indices": (lambda x: F.max_pool2d_with_indices(x, 3, 2)[0], (2, 3, 7, 9)),
    "adaptive": (nn.AdaptiveMaxPool2d((2, 3)), (2, 3, 7, 9)),
    "one dimension": (lambda x: aten.max_pool1d.default(x, [3], [2]), (2, 3, 9)),
    "a single channel": (nn.MaxPool2d(2), (2, 1, 6, 5)),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", POOLS)
def test_max_pool_hands_all_mass_to_the_winner(name, channels_last):
    pool, shape = POOLS[name]
    x = images(*shape)
    if channels_last and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    walk = walk_of(pool if isinstance(pool, nn.Module) else Lambda(pool), x)
    p = masses(walk, signed=True)
    got = walk.down(walk.graph.output, p, walk.graph.input)
    for k in range(3):
        leaf = x.clone().requires_grad_()
        (pool(leaf) * p[k]).sum().backward()
        torch.testing.assert_close(got[k], leaf.grad)


def step(walk, target, p):
    """Run the rule of the one operation ``target`` and return what each input got."""
    (node,) = [n for n in walk.graph.steps if n.target is target]
    return dict(pass_down(walk, node, p))


def split_by_hand(p, parts, slopes):
    """Unit by unit: p x_i^+ s_i^+ / sum_k x_k^+ s_k^+, nothing where the sum is 0."""
    got = [torch.zeros_like(p) for _ in parts]
    for k in range(len(p)):
        for i in range(p[k].numel()):
            excited = [max(float(x.flatten()[i]), 0) * max(s, 0) for x, s in zip(parts, slopes, strict=True)]
            if sum(excited) > 0:
                for g, e in zip(got, excited, strict=True):
                    g[k].view(-1)[i] = p[k].flatten()[i] * e / sum(excited)
    return got


SUMS = {
    "sum": (lambda a, b: a + b, (1, 1)),
    "difference": (lambda a, b: a - b, (1, -1)),
    "weighted sum": (lambda a, b: torch.add(a, b, alpha=2.5), (1, 2.5)),
    "sum with a negative weight": (lambda a, b: torch.add(a, b, alpha=-2.0), (1, -2)),
    "difference with a negative weight": (lambda a, b: torch.sub(a, b, alpha=-3.0), (1, 3)),
}


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_splits_by_the_positive_parts_of_its_branches(name, broadcast):
    combine, slopes = SUMS[name]

    def net(x):
        one, two = torch.relu(x - 0.5), torch.relu(x.flip(1) - 0.7)
        return combine(one, two[:, :, :1] if broadcast else two)

    x = images(2, 3, 4)
    walk = walk_of(Lambda(net), x)
    node = walk.graph.output
    assert node.target is (aten.sub.Tensor if "difference" in name else aten.add.Tensor)
    p = masses(walk)
    one, two = torch.relu(x - 0.5), torch.relu(x.flip(1) - 0.7)
    two = two[:, :, :1] if broadcast else two
    want = split_by_hand(p, [one.expand(2, 3, 4), two.expand(2, 3, 4)], slopes)
    children = list(pass_down(walk, node, p))
    assert [n for n, _ in children] == list(node.args[:2])
    torch.testing.assert_close(children[0][1], want[0], rtol=0, atol=1e-12)
    shared = want[1].sum(-1, keepdim=True) if broadcast else want[1]
    torch.testing.assert_close(children[1][1], shared, rtol=0, atol=1e-12)
    alive = one.expand(2, 3, 4) * max(slopes[0], 0) + two.expand(2, 3, 4) * max(slopes[1], 0) > 0
    assert 0 < int((~alive).sum()) < alive.numel()
    handed = sum(mass.flatten(1).sum(1) for _, mass in children)
    torch.testing.assert_close(handed, (p * alive).flatten(1).sum(1), rtol=0, atol=1e-12)  # conserved


CONSTANTS = {
    "a constant is a bias": (lambda x, w: x + w, 1.0),
    "a constant in front": (lambda x, w: w + x, 1.0),
    "a constant taken off": (lambda x, w: x - w, 1.0),
    "a number": (lambda x, w: x - 0.25, 1.0),
    "taken off a constant there is no excitatory child": (lambda x, w: w - x, 0.0),
    "a negative weight neither": (lambda x, w: torch.add(w, x, alpha=-2.0), 0.0),
    "a weight of zero neither": (lambda x, w: torch.add(w, x, alpha=0.0), 0.0),
    "a constant that repeats the signal": (lambda x, w: x[:, :1] + w, 1.0),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_get_no_mass(name):
    operation, share = CONSTANTS[name]
    x = images(2, 4)
    walk = walk_of(Lambda(operation), x)
    p = masses(walk)
    got = walk.down(walk.graph.output, p, walk.graph.input)
    if "repeats" in name:
        torch.testing.assert_close(got[..., 0], p.sum(-1), rtol=0, atol=1e-12)
        assert not got[..., 1:].any()
    else:
        torch.testing.assert_close(got, p * share, rtol=0, atol=0)


class Gated(nn.Module):
    """A signal times a gate, which may be moved about or stand in front."""

    def __init__(self, form) -> None:
        super().__init__()
        self.form = form

    def forward(self, x):
        gate = {"hard": F.hardsigmoid, "soft": lambda t: t.softmax(1)}.get(self.form, torch.sigmoid)(x[:, :, :1])
        if self.form == "moved":
            return gate.view(2, 3).unsqueeze(2).expand(2, 3, 4) * torch.relu(x)
        return gate * torch.relu(x) if self.form == "in front" else torch.relu(x) * gate


@pytest.mark.parametrize("form", ["plain", "in front", "moved", "hard", "soft"])
def test_a_gate_lets_all_mass_through_to_the_signal(form):
    walk = walk_of(Gated(form), images(2, 3, 4))
    p = masses(walk)
    children = step(walk, aten.mul.Tensor, p)
    (signal,) = children
    assert signal.target is aten.relu.default
    torch.testing.assert_close(children[signal], p, rtol=0, atol=0)


POSITIVE = (WEIGHTS > 0).double()
PRODUCTS = {
    "by a constant": (lambda x, w: x * w, POSITIVE),
    "constant in front": (lambda x, w: w * x, POSITIVE),
    "by a negative number": (lambda x, w: x * -2.0, torch.zeros(4)),
    "by a positive number": (lambda x, w: x * 0.5, torch.ones(4)),
    "over a number": (lambda x, w: x / 4.0, torch.ones(4)),
    "over a negative constant": (lambda x, w: x / (w - 4.0), torch.zeros(4)),
    "of two gates": (lambda x, w: torch.sigmoid(x) * torch.sigmoid(2 * x), torch.ones(4)),
    "squared": (lambda x, w: x * x, torch.ones(4)),
    "over something of itself": (lambda x, w: x / (x.sum(1, keepdim=True) + 1.0), torch.ones(4)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_hands_mass_to_the_signal_where_the_factor_is_positive(name):
    operation, factor = PRODUCTS[name]
    walk = walk_of(Lambda(operation), images(2, 4))
    node = walk.graph.output
    p = masses(walk)
    ((_, got),) = pass_down(walk, node, p)
    torch.testing.assert_close(got, p * factor.double(), rtol=0, atol=0)


def test_mass_of_a_signal_that_a_constant_repeats_is_added_up():
    walk = walk_of(Lambda(lambda x, w: x[:, :1] * w), images(2, 3))
    p = masses(walk)
    ((_, got),) = pass_down(walk, walk.graph.output, p)
    torch.testing.assert_close(got, (p * POSITIVE).sum(-1, keepdim=True), rtol=0, atol=1e-12)


def test_division_by_a_signal_gives_nothing_to_the_divisor():
    walk = walk_of(Lambda(lambda x: torch.relu(x) / torch.exp(x)), images(2, 4))
    ((child, got),) = pass_down(walk, walk.graph.output, p := masses(walk))
    assert child.target is aten.relu.default
    torch.testing.assert_close(got, p)


def test_of_two_signals_multiplied_each_gets_half():
    walk = walk_of(Lambda(lambda x: torch.relu(x) * torch.tanh(x)), images(2, 4))
    p = masses(walk)
    parts = list(pass_down(walk, walk.graph.output, p))
    assert [n.target for n, _ in parts] == [aten.relu.default, aten.tanh.default]
    for _, mass in parts:
        torch.testing.assert_close(mass, p / 2, rtol=0, atol=0)
    assert any("each gets half" in note for note in walk.notes)


def rms_norm(x):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


@pytest.mark.parametrize(
    ("gated", "signal"),
    [
        (lambda x: (x + 1.0) * F.silu(x), aten.add.Tensor),  # a gated linear unit
        (lambda x: F.gelu(x) * (x + 1.0), aten.add.Tensor),
        (lambda x: (x + 1.0) * (x * 2.0).mean(1, keepdim=True), aten.add.Tensor),  # channel attention without sigmoid
    ],
)
def test_what_gates_is_a_weight(gated, signal):
    walk = walk_of(Lambda(gated), images(2, 4))
    ((child, mass),) = pass_down(walk, walk.graph.output, p := masses(walk))
    assert child.target is signal
    torch.testing.assert_close(mass, p, rtol=0, atol=0)


def test_a_norm_written_out_passes_all_mass_to_what_it_norms():
    walk = walk_of(Lambda(rms_norm), images(2, 4))
    ((child, mass),) = pass_down(walk, walk.graph.output, p := masses(walk))
    assert child is walk.graph.input
    torch.testing.assert_close(mass, p, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["linear", "convolution", "permuted"])
def test_a_negative_layer_scale_equals_folding_it_into_the_linear_map(layout):
    torch.manual_seed(0)
    gamma = torch.tensor([0.5, -2.0, -0.1, 3.0], dtype=torch.float64)
    linear = nn.Linear(6, 4).double() if layout != "convolution" else nn.Conv2d(6, 4, (1, 3)).double()
    folded = copy.deepcopy(linear)
    broad = gamma if layout == "linear" else gamma.view(4, 1, 1)
    with torch.no_grad():
        folded.weight.mul_(gamma.view(-1, *[1] * (linear.weight.dim() - 1)))
        folded.bias.mul_(gamma)

    class Scaled(nn.Module):
        def __init__(self, inner, scale):
            super().__init__()
            self.inner, self.scale = inner, nn.Parameter(scale) if scale is not None else None

        def forward(self, x):
            y = self.inner(x)
            y = y.permute(0, 3, 1, 2) if layout == "permuted" else y
            return torch.relu(y if self.scale is None else y * self.scale)

    shape = {"linear": (2, 5, 6), "convolution": (2, 6, 3, 5), "permuted": (2, 3, 5, 6)}[layout]
    one, two = walk_of(Scaled(linear, broad), images(*shape)), walk_of(Scaled(folded, None), images(*shape))
    p = masses(one) * (one.values[one.graph.output] > 0)
    got = one.down(one.graph.output, p, one.graph.input)
    torch.testing.assert_close(got, two.down(two.graph.output, p, two.graph.input))
    torch.testing.assert_close(got.sum(), p.sum())  # positive inputs: every parent that fires has an excited child


CHOICES = {
    "flip": (lambda x: x.flip(2), (2, 3, 4)),
    "gather by index": (lambda x: x[:, torch.tensor([2, 0, 0])], (2, 3, 4)),
    "index select": (lambda x: x.index_select(1, torch.tensor([1, 1, 2])), (2, 3, 4)),
    "repeat": (lambda x: x.repeat(1, 2, 3), (2, 3, 4)),
    "unfold": (lambda x: F.unfold(x, 2, stride=1), (2, 3, 4, 5)),
    "windows": (lambda x: x.unfold(2, 2, 2), (2, 3, 6)),
    "largest of a dimension": (lambda x: x.amax(1), (2, 3, 4)),
    "largest with its index": (lambda x: x.max(2)[0], (2, 3, 4)),
    "the larger of two": (lambda x: torch.maximum(x, x.flip(1)), (2, 4)),
    "where": (lambda x: torch.where(torch.arange(4) % 2 == 0, x, x.flip(1)), (2, 4)),
    "pixel shuffle": (lambda x: F.pixel_shuffle(x, 2), (2, 8, 3, 2)),
    "pixel unshuffle": (lambda x: F.pixel_unshuffle(x, 2), (2, 2, 4, 6)),
    "channel shuffle": (lambda x: F.channel_shuffle(x, 2), (2, 4, 3, 2)),
    "stack": (lambda x: torch.stack([x, x.flip(1)], 1), (2, 3)),
    "patch merging": (lambda x: torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1), (2, 4, 6, 3)),
    "window partition": (lambda x: x.view(2, 2, 2, 3, 2, 5).permute(0, 1, 3, 2, 4, 5).reshape(12, 4, 5), (2, 4, 6, 5)),
    "shifted window": (lambda x: x.roll((-1, -2), (1, 2)).view(2, 2, 2, 3, 2, 5).transpose(2, 3), (2, 4, 6, 5)),
    "roll of all dimensions": (lambda x: x.roll(3), (2, 3, 4)),
}


@pytest.mark.parametrize("name", CHOICES)
def test_mass_goes_back_to_the_inputs_that_the_outputs_are(name):
    f, shape = CHOICES[name]
    x = images(*shape)
    walk = walk_of(Lambda(f), x)
    p = masses(walk, signed=True)
    got = walk.down(walk.graph.output, p, walk.graph.input)
    leaf = x.clone().requires_grad_()
    want = torch.stack([torch.autograd.grad(f(leaf), leaf, q)[0] for q in p])  # every output is one input
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got.flatten(1).sum(1), p.flatten(1).sum(1))


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_interpolation_follows_its_explicit_matrix(mode):
    def f(x):
        return F.interpolate(x, (5, 7), mode=mode)

    x = images(2, 1, 3, 4)
    x[0, 0, :2] = 0
    walk = walk_of(Lambda(f), x)
    p = masses(walk)
    got = walk.down(walk.graph.output, p, walk.graph.input)
    W = dense_matrix(f, (1, 3, 4))
    for k in range(len(p)):
        for i in range(2):
            want = reference_rule(W, x[i].flatten(), p[k, i].flatten())
            torch.testing.assert_close(got[k, i].flatten(), want)


@pytest.mark.parametrize("norm", ["group", "rms"])
def test_other_norms_pass_mass_where_their_weight_is_positive(norm):
    module = (nn.GroupNorm(2, 4) if norm == "group" else nn.RMSNorm(4)).double()
    module.weight.data = WEIGHTS.clone()
    walk = walk_of(module, images(2, 4, 3) if norm == "group" else images(2, 3, 4))
    p = masses(walk)
    positive = (WEIGHTS > 0).double().view(4, 1) if norm == "group" else (WEIGHTS > 0).double()
    torch.testing.assert_close(walk.down(walk.graph.output, p, walk.graph.input), p * positive, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(2, 4), (2, 4, 3, 5)])
@pytest.mark.parametrize("gamma", [[1.0, 2.0, 0.5, 3.0], [1.0, 0.0, 0.5, 3.0], [1.0, -2.0, 0.0, 3.0]])
def test_batch_norm_with_nothing_to_fold_into_passes_positive_channels(gamma, shape):
    norm = (nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d)(4).double().eval()
    norm.weight.data = torch.tensor(gamma, dtype=torch.float64)
    walk = walk_of(norm, images(*shape))
    p = masses(walk)
    got = walk.down(walk.graph.output, p, walk.graph.input)
    scale = torch.tensor([float(g > 0) for g in gamma], dtype=torch.float64).view(1, 1, 4, *[1] * (len(shape) - 2))
    torch.testing.assert_close(got, p * scale, rtol=0, atol=0)
    assert any("negative scale" in note for note in walk.notes) == (min(gamma) < 0)


def test_layer_norm_passes_mass_where_its_weight_is_positive():
    norm = nn.LayerNorm(4).double()
    norm.weight.data = WEIGHTS.clone()
    walk = walk_of(norm, images(2, 3, 4))
    p = masses(walk)
    got = walk.down(walk.graph.output, p, walk.graph.input)
    torch.testing.assert_close(got, p * POSITIVE, rtol=0, atol=0)
    assert "layer norm: mass passed through" in walk.notes
    plain = walk_of(nn.LayerNorm(4, elementwise_affine=False).double(), images(2, 3, 4))
    torch.testing.assert_close(plain.down(plain.graph.output, p, plain.graph.input), p, rtol=0, atol=0)
    short = walk_of(Lambda(lambda x: aten.layer_norm.default(x, [4])), images(2, 3, 4))
    torch.testing.assert_close(short.down(short.graph.output, p, short.graph.input), p, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("operation", "sentence"),
    [
        (lambda x: x.cumsum(1), r"no rule for aten\.cumsum.default \(in layer 'the model itself'\)"),
        (lambda x: aten.constant_pad_nd.default(x, [1, 0], 1.0), "with mode 1.0"),
        (lambda x: x.softmax(1), "never start above a softmax"),
        (lambda x: x.log_softmax(1), "never start above a softmax"),
        (lambda x: F.pad(x, (1, 1), mode="reflect"), "with mode 'reflect'|reflection_pad1d"),
    ],
)
def test_what_has_no_rule_is_one_clear_sentence(operation, sentence):
    walk = walk_of(Lambda(operation), images(2, 3, 4))
    with pytest.raises(LayerError, match=sentence):
        list(pass_down(walk, walk.graph.output, masses(walk)))


def test_an_operation_without_a_rule_names_its_layer():
    walk = walk_of(nn.Sequential(nn.Identity(), Lambda(lambda x: x.cumsum(1))), images(2, 4))
    with pytest.raises(LayerError, match="in layer '1'"):
        list(pass_down(walk, walk.graph.output, masses(walk)))


def test_parents_without_children_lose_their_mass():
    den = torch.tensor([2.0, 0.0, -1.0, 1e-31, 1e-30, 4.0], dtype=torch.float64)
    assert safe_reciprocal(den).tolist() == [0.5, 0, 0, 0, 0, 0.25]
    assert safe_reciprocal(torch.tensor([2e-30], dtype=torch.float64)).item() == pytest.approx(5e29)


@pytest.mark.parametrize("activation", [torch.relu, torch.tanh, F.gelu, F.hardswish, F.leaky_relu])
def test_an_activation_passes_mass_to_its_input(activation):
    walk = walk_of(Lambda(lambda x: activation(x - 0.5)), images(2, 3))
    p = masses(walk)
    ((child, got),) = pass_down(walk, walk.graph.output, p)
    assert child is walk.graph.output.args[0]
    assert got is p


def test_of_two_gates_the_first_is_the_signal():
    walk = walk_of(Lambda(lambda x: torch.sigmoid(x) * F.hardsigmoid(x)), images(2, 3))
    ((child, _),) = pass_down(walk, walk.graph.output, masses(walk))
    assert child.target is aten.sigmoid.default


def test_a_layer_norm_with_a_weight_and_nothing_else():
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weights", WEIGHTS)

        def forward(self, x):
            return aten.layer_norm.default(x, [4], self.weights)

    walk = walk_of(Norm(), images(2, 4))
    p = masses(walk)
    torch.testing.assert_close(walk.down(walk.graph.output, p, walk.graph.input), p * POSITIVE, rtol=0, atol=0)
