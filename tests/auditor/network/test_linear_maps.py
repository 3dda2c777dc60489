"""Every linear map against its explicit matrix, with the positive and with the negative part of the weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from auditor.network.aten_graph import AtenGraph
from auditor.network.linear_maps import Attention, Clipped, Dense, linear_map, rows_times


class Lambda(nn.Module):
    def __init__(self, f) -> None:
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


MATRIX = torch.randn(6, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
KERNEL = MATRIX.reshape(2, 3, 2, 2).clone()
MAPS = {
    "linear": (nn.Linear(6, 5), (3, 6)),
    "product with a constant": (Lambda(lambda x: x @ MATRIX), (3, 6)),
    "affine product": (Lambda(lambda x: torch.addmm(MATRIX[0], x, MATRIX)), (6,)),
    "conv": (nn.Conv2d(3, 4, 3, padding=1), (3, 5, 7)),
    "conv without padding": (nn.Conv2d(2, 3, (2, 3)), (2, 5, 6)),
    "strided uneven conv": (nn.Conv2d(2, 3, (3, 2), stride=(2, 3), padding=(1, 0)), (2, 6, 8)),
    "dilated conv": (nn.Conv2d(2, 3, 3, dilation=2, padding=2), (2, 6, 7)),
    "more padding than kernel": (nn.Conv2d(2, 3, 2, padding=3), (2, 4, 3)),
    "grouped conv": (nn.Conv2d(4, 6, 3, groups=2, stride=2), (4, 7, 6)),
    "same padding, even kernel": (nn.Conv2d(2, 2, 4, padding="same"), (2, 6, 5)),
    "same padding, dilated": (nn.Conv2d(2, 2, (2, 3), padding="same", dilation=(3, 2)), (2, 6, 7)),
    "valid padding": (nn.Conv2d(2, 2, 3, padding="valid"), (2, 5, 6)),
    "conv1d": (nn.Conv1d(3, 2, 3, stride=2, padding=1), (3, 10)),
    "conv3d": (nn.Conv3d(1, 2, 2), (1, 3, 4, 3)),
    "transposed conv": (nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1), (2, 4, 3)),
    "transposed conv1d in groups": (nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2, dilation=2), (4, 5)),
    "transposed conv by default": (Lambda(lambda x: F.conv_transpose2d(x, KERNEL)), (2, 4, 3)),
    "average pool": (nn.AvgPool2d(2), (2, 5, 6)),
    "padded average pool": (nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True), (2, 6, 7)),
    "adaptive average pool": (nn.AdaptiveAvgPool2d((2, 3)), (2, 5, 7)),
}


def explicit(net, shape) -> torch.Tensor:
    """The matrix (outputs, inputs) without the bias."""
    return (
        torch.autograd.functional.jacobian(net, torch.zeros(1, *shape, dtype=torch.float64))
        .flatten(0, -len(shape) - 2)
        .flatten(1)
    )


def map_of(net, x):
    graph = AtenGraph.trace(net, x)
    return linear_map(graph, graph.run(x), graph.output, frozenset(), {})


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", MAPS)
def test_spread_and_gather_follow_the_explicit_matrix(name, sign):
    net, shape = MAPS[name]
    net = net.double()
    g = torch.Generator().manual_seed(0)
    x = torch.rand(2, *shape, generator=g, dtype=torch.float64)
    linear = map_of(net, x)
    W = (sign * explicit(net, shape)).clamp(min=0)
    with torch.no_grad():
        got = linear.spread(x, sign)
        torch.testing.assert_close(got.flatten(1), x.flatten(1) @ W.T, rtol=1e-12, atol=1e-12)
        q = torch.randn(3, *got.shape, generator=g, dtype=torch.float64)
        back = linear.gather(q, sign)
    assert back.shape == (3, *x.shape)
    torch.testing.assert_close(back.flatten(2), q.flatten(2) @ W, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("f", "dims", "keepdim"),
    [(lambda x: x.mean((2, 3)), (2, 3), False), (lambda x: x.mean(-1, keepdim=True), (3,), True),
     (lambda x: x.sum(1), (1,), False), (lambda x: x.sum((3, 1)), (1, 3), False)],
)  # fmt: skip
def test_mean_and_sum_are_a_sum_because_the_factor_cancels(f, dims, keepdim):
    x = torch.rand(2, 3, 4, 5, dtype=torch.float64)
    linear = map_of(Lambda(f), x)
    total = linear.spread(x)
    torch.testing.assert_close(total, x.sum(dims, keepdim))
    q = torch.rand(3, *total.shape, dtype=torch.float64)
    back = linear.gather(q)
    want = torch.zeros(3, 2, 3, 4, 5, dtype=torch.float64)
    for k in range(3):
        leaf = x.clone().requires_grad_()
        (leaf.sum(dims, keepdim) * q[k]).sum().backward()
        want[k] = leaf.grad
    torch.testing.assert_close(back, want)
    assert not linear.spread(x, -1).any()
    assert linear.gather(q, -1).shape == want.shape
    assert not linear.gather(q, -1).any()


@pytest.mark.parametrize("form", ["plain", "scale", "mask", "bias", "causal", "by hand"])
def test_attention_weights_are_those_that_attention_applies(form):
    def net(x):
        q, k, v = x, x.flip(1), x * 2.0
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        if form == "by hand":
            return (q @ k.transpose(1, 2)).softmax(-1) @ v
        options = {"scale": {"scale": 0.3}, "mask": {"attn_mask": mask}, "causal": {"is_causal": True},
                   "bias": {"attn_mask": mask.double()}}.get(form, {})  # fmt: skip
        return F.scaled_dot_product_attention(q, k, v, **options)

    x = torch.rand(2, 4, 3, dtype=torch.float64)
    linear = map_of(Lambda(net), x)
    assert isinstance(linear, Attention)
    torch.testing.assert_close(linear.spread(x * 2.0), net(x))
    torch.testing.assert_close(linear.weights.sum(-1), torch.ones(2, 4).double())
    q = torch.rand(3, 2, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(linear.gather(q), torch.einsum("bij,nbic->nbjc", linear.weights, q))
    assert not linear.spread(x, -1).any()
    assert not linear.gather(q, -1).any()


def test_what_is_not_linear_is_none():
    x = torch.rand(2, 3, 4, dtype=torch.float64)
    assert map_of(Lambda(torch.relu), x) is None


def linear_attention(x):
    q, k, v = torch.relu(x), torch.relu(x - 0.4), x * 2.0
    return q @ (k.transpose(1, 2) @ v)


def talking_heads(x):
    q, k, v = x, x.flip(1), x * 2.0
    weights = (q @ k.transpose(1, 2)).softmax(-1) * 1.5 - 0.1  # what is done to weights may make some negative
    return weights @ v


def from_the_right(x):
    return (x * 2.0).transpose(1, 2) @ (x @ x.transpose(1, 2)).softmax(-1)


@pytest.mark.parametrize(("f", "child"), [(linear_attention, 1), (talking_heads, 1), (from_the_right, 0)])
def test_of_a_product_of_two_signals_one_is_weights(f, child):
    x = torch.rand(2, 4, 3, dtype=torch.float64)
    graph = AtenGraph.trace(Lambda(f), x)
    values = graph.run(x)
    linear = linear_map(graph, values, graph.output, frozenset(), {})
    left, right = (values[n] for n in graph.output.args)
    assert linear.child is graph.output.args[child]
    weights = (right, left)[child].clamp(min=0)
    a = (left, right)[child]
    want = weights @ a if child else a @ weights
    torch.testing.assert_close(linear.spread(a), want)
    q = torch.rand(3, *want.shape, dtype=torch.float64)
    got = linear.gather(q)
    torch.testing.assert_close((got * a).sum(), (q * want).sum())  # <f^T q, a> = <q, f a>
    assert not linear.spread(a, -1).any()
    assert not linear.gather(q, -1).any()


def test_values_that_several_heads_share_get_the_mass_of_all_of_them():
    class Shared(nn.Module):
        def forward(self, x):
            q, k, v = x.view(2, 4, 2, 3).transpose(1, 2), x[:, None, :, :3], x[:, None, :, 3:] * 2.0
            return F.scaled_dot_product_attention(q, k, v)

    x = torch.rand(2, 4, 6, dtype=torch.float64)
    graph = AtenGraph.trace(Shared(), x)
    values = graph.run(x)
    linear = linear_map(graph, values, graph.output, frozenset(), {})
    q = torch.rand(3, *values[graph.output].shape, dtype=torch.float64)
    v = values[linear.child]
    got = linear.gather(q)
    assert got.shape == (3, *v.shape)
    torch.testing.assert_close((got * v).sum(), (q * linear.spread(v)).sum())


@pytest.mark.parametrize("part", ["all", "some outputs", "one token", "nothing"])
def test_large_masses_are_gathered_where_they_are(part):
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(96, 70, generator=generator)
    q = torch.rand(3, 2, 120, 96, generator=generator)
    if part == "some outputs":
        q[..., 30:] = 0
    elif part == "one token":
        q[:, :, 1:] = 0
    elif part == "nothing":
        q.zero_()
    dense = Dense(None, Clipped(W, {}, "node"))
    torch.testing.assert_close(dense.gather(q), q @ W.clamp(min=0), rtol=1e-4, atol=1e-4)  # sums of 96 float32
    torch.testing.assert_close(dense.gather(q, -1), q @ W.neg().clamp(min=0), rtol=1e-4, atol=1e-4)
    rows = torch.rand(37, 5, generator=generator)
    w = torch.rand(4, 5, generator=generator)
    torch.testing.assert_close(rows_times(rows, w), rows @ w.T)
    torch.testing.assert_close(rows_times(rows.double(), w.double()), rows.double() @ w.double().T)


def test_clipped_weights_are_made_once_and_again_after_training():
    weight, memory = torch.randn(3, 2, 2, 2), {}
    clipped = Clipped(weight, memory, "node")
    first = clipped(1)
    assert clipped(1) is first
    assert torch.equal(first, weight.clamp(min=0))
    assert torch.equal(clipped(-1), (-weight).clamp(min=0))
    assert torch.equal(clipped.mirrored(), first.flip(2, 3).transpose(0, 1))
    weight.mul_(-1)
    assert torch.equal(clipped(1), weight.clamp(min=0))
    assert torch.equal(clipped.mirrored(), weight.clamp(min=0).flip(2, 3).transpose(0, 1))
