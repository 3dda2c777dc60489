"""How probability mass walks down through each ATen operation in excitation backprop.

[ExcitationBP]: a parent  i  hands its mass to a child  j  with
probability  w_ij^+ a_j / sum_k w_ik^+ a_k,  so for any linear map  f

    p_in = a * f^T( p / f(a; W^+) ; W^+ ),          0/0 := 0,  biases ignored.

``a`` is the child's *excitation*, its activation made non-negative: as it is after ReLU or sigmoid, shifted by its
lower bound after tanh or ELU, clipped at 0 (and noted) where there is no bound or a small one (GELU, SiLU, hardswish,
linear bottlenecks). A mass has the neurons in front, ``(neurons, *shape of the node)``: one walk serves all of them.

Where the paper leaves a choice: a residual sum splits by the positive parts of its branches; a gate  x * sigmoid(g)
and an attention matrix are weights, so the gated signal and the values get the mass; layer norm passes it through like
batch norm; a channel with a negative scale that cannot be folded has no excitatory child and loses its mass. Clipping
small negative activations costs mass where a parent has few children (depthwise convolutions after SiLU or hardswish);
`ExcitationBackprop.lost` says how much, layer by layer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from auditor.errors import LayerError
from auditor.network.aten_graph import BATCH_NORM, AtenGraph, Node, source

aten = torch.ops.aten
Flow = Iterator[tuple[Node, Tensor]]

GATES = {aten.sigmoid.default, aten.hardsigmoid.default, aten.softmax.int, aten._softmax.default}
NON_NEGATIVE = {*GATES, aten.relu.default, aten.relu6.default, aten.softplus.default}
ACTIVATIONS = {
    *NON_NEGATIVE, aten.tanh.default, aten.elu.default, aten.celu.default, aten.selu.default, aten.hardtanh.default,
    aten.clamp.default, aten.clamp_min.default, aten.silu.default, aten.hardswish.default, aten.gelu.default,
    aten.leaky_relu.default, aten.mish.default, aten.prelu.default, aten._prelu_kernel.default,
    aten.dropout.default, aten.alpha_dropout.default, aten.feature_dropout.default,
}  # fmt: skip
ACTIVATIONS -= {aten.softmax.int, aten._softmax.default}
RESHAPES = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.squeeze.dim,
    aten.squeeze.dims, aten.squeeze.default, aten.unsqueeze.default, aten.unflatten.int, aten.clone.default,
    aten.contiguous.default, aten.alias.default, aten.detach.default, aten._to_copy.default, aten.to.dtype,
    aten.lift_fresh_copy.default,
}  # fmt: skip
MAX_POOLS = {aten.max_pool2d.default, aten.max_pool1d.default, aten.adaptive_max_pool2d.default,
             aten.max_pool2d_with_indices.default}  # fmt: skip
SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int}
MOVES = {*RESHAPES, aten.permute.default, aten.transpose.int, aten.slice.Tensor, aten.select.int, aten.expand.default,
         aten.cat.default, aten.dropout.default, aten.pad.default, aten.constant_pad_nd.default,
         aten.roll.default}  # fmt: skip


class Walk(Protocol):
    """What a rule may ask of the walk it is part of."""

    graph: AtenGraph
    values: dict[Node, Any]
    pinned: frozenset[Node]

    def excitation(self, node: Node) -> Tensor:
        """Non-negative activation of ``node``."""

    def note(self, text: str) -> None:
        """Remember that a variant was used."""


def pass_down(walk: Walk, node: Node, p: Tensor) -> Flow:
    """Yield ``(child, its mass)`` for an operation that is not a linear map with weights."""
    rule = RULES.get(node.target)
    if rule is None:
        layer = max(node.meta.get("layers", ()), key=len, default="") or "the model itself"
        raise LayerError(
            f"excitation backprop: there is no rule for {node.target} (in layer '{layer}'). Start below it or stop "
            f"above it, or use another heatmap method (grad_cam needs no rules)."
        )
    yield from rule(walk, node, p)


def _like(walk: Walk, node: Node, p: Tensor) -> Tensor:
    """Zeros of the shape a mass on ``node`` has."""
    return p.new_zeros((len(p), *walk.values[node].shape))


def _same(walk: Walk, node: Node, p: Tensor) -> Flow:
    yield _node(node.args[0]), p


def _reshape(walk: Walk, node: Node, p: Tensor) -> Flow:
    child = _node(node.args[0])
    yield child, p.reshape(len(p), *walk.values[child].shape)


def _permute(walk: Walk, node: Node, p: Tensor) -> Flow:
    dims = [d % (p.dim() - 1) for d in node.args[1]]
    inverse = [0] * len(dims)
    for to, come_from in enumerate(dims):
        inverse[come_from] = to + 1
    yield _node(node.args[0]), p.permute(0, *inverse)


def _transpose(walk: Walk, node: Node, p: Tensor) -> Flow:
    a, b = ((d % (p.dim() - 1)) + 1 for d in node.args[1:3])
    yield _node(node.args[0]), p.transpose(a, b)


def _slice(walk: Walk, node: Node, p: Tensor) -> Flow:
    child = _node(node.args[0])
    whole = _like(walk, child, p)
    dim, *rest = _resolved(walk, node.args[1:]) or [0]
    aten.slice.Tensor(whole, dim % (whole.dim() - 1) + 1, *rest).copy_(p)
    yield child, whole


def _select(walk: Walk, node: Node, p: Tensor) -> Flow:
    child = _node(node.args[0])
    whole = _like(walk, child, p)
    dim, index = _resolved(walk, node.args[1:])
    whole.select(dim % (whole.dim() - 1) + 1, index).copy_(p)
    yield child, whole


def _expand(walk: Walk, node: Node, p: Tensor) -> Flow:
    child = _node(node.args[0])
    yield (
        child,
        p.sum_to_size(len(p), *[1] * (p.dim() - 1 - walk.values[child].dim()), *walk.values[child].shape).view(
            len(p), *walk.values[child].shape
        ),
    )


def _cat(walk: Walk, node: Node, p: Tensor) -> Flow:
    parts = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    dim = dim % (p.dim() - 1)
    sizes = [walk.values[part].shape[dim] for part in parts]
    yield from zip(parts, torch.split(p, sizes, dim + 1), strict=True)


def _pad(walk: Walk, node: Node, p: Tensor) -> Flow:
    """Crop: padding is a constant and gets nothing."""
    sides = _resolved(walk, [node.args[1]])[0]
    if len(node.args) > 2 and node.args[2] not in ("constant", 0, 0.0):
        raise LayerError(f"excitation backprop: there is no rule for {node.target} with mode {node.args[2]!r}.")
    yield _node(node.args[0]), F.pad(p, [-int(side) for side in sides])


def _roll(walk: Walk, node: Node, p: Tensor) -> Flow:
    shifts, dims = node.args[1], node.args[2]
    yield (
        _node(node.args[0]),
        p.roll([-s for s in shifts], [d % (p.dim() - 1) + 1 for d in dims]),
    )


def _getitem(walk: Walk, node: Node, p: Tensor) -> Flow:
    several, index = _node(node.args[0]), node.args[1]
    if several.target not in SPLITS:
        yield several, p  # batch norm and pools with indices: the first output is the signal
        return
    child = _node(several.args[0])
    whole = _like(walk, child, p)
    dim = several.args[2] if len(several.args) > 2 else several.kwargs.get("dim", 0)
    if several.target is aten.unbind.int:
        dim = several.args[1] if len(several.args) > 1 else 0
        whole.select(dim % (whole.dim() - 1) + 1, index).copy_(p)
    else:
        dim = dim % (whole.dim() - 1)
        start = sum(t.shape[dim] for t in walk.values[several][:index])
        whole.narrow(dim + 1, start, p.shape[dim + 1]).copy_(p)
    yield child, whole


def _max_pool(walk: Walk, node: Node, p: Tensor) -> Flow:
    child = _node(node.args[0])
    x = walk.values[child]
    args = _resolved(walk, node.args[1:])
    if node.target is aten.adaptive_max_pool2d.default:
        _, where = F.adaptive_max_pool2d(x, args[0], return_indices=True)
    elif node.target is aten.max_pool1d.default:
        _, where = aten.max_pool1d_with_indices.default(x, *args)
    else:
        _, where = aten.max_pool2d_with_indices.default(x, *args)
    spatial = 1 if node.target is aten.max_pool1d.default else 2
    if spatial == 2 and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        n, c = x.shape[:2]
        where, q = where.permute(0, 2, 3, 1).reshape(1, n, -1, c), p.permute(0, 1, 3, 4, 2).reshape(len(p), n, -1, c)
        last = p.new_zeros(len(p), n, x.shape[2] * x.shape[3], c)
        last.scatter_add_(2, where.expand(len(p), -1, -1, -1), q)
        yield child, last.view(len(p), n, *x.shape[2:], c).permute(0, 1, 4, 2, 3)
        return
    lead = x.shape[:-spatial]
    flat = p.new_zeros(len(p), lead.numel(), x.shape[-spatial:].numel())
    flat.scatter_add_(2, where.reshape(1, lead.numel(), -1).expand(len(p), -1, -1), p.reshape(len(p), lead.numel(), -1))
    yield child, flat.view(len(p), *x.shape)


def _sum_of(walk: Walk, node: Node, p: Tensor) -> Flow:
    """Split  y = x1 + alpha x2  by the positive parts of the branches; constants are biases and get nothing."""
    sign = -1.0 if node.target is aten.sub.Tensor else 1.0
    slopes = (1.0, sign * float(node.kwargs.get("alpha", 1.0)))
    branches = [(n, s) for n, s in zip(node.args[:2], slopes, strict=True) if _is_live(walk, n)]
    if len(branches) == 1 and branches[0][1] > 0:
        yield branches[0][0], p.sum_to_size(len(p), *walk.values[branches[0][0]].shape)
        return
    excited = [(n, walk.excitation(n) * max(s, 0.0)) for n, s in branches]
    total = torch.zeros_like(walk.values[node])
    for _, a in excited:
        total = total + a
    per_unit = p * safe_reciprocal(total)
    for n, a in excited:
        yield n, (per_unit * a).sum_to_size(len(p), *walk.values[n].shape)


def _product(walk: Walk, node: Node, p: Tensor) -> Flow:
    """Mass goes through a scale or a gate to the signal it acts on."""
    live = [n for n in node.args[:2] if _is_live(walk, n)]
    if node.target is aten.div.Tensor:
        live = live[:1]  # x / (something of x), as in response normalisation: the numerator is the signal
    signals = [n for n in live if source(n, _moves).target not in GATES]
    if len(live) == 1:
        (signal,) = live
        factor = next((a for a in node.args[:2] if a is not signal), signal)
        p = p * (torch.as_tensor(walk.values[factor] if isinstance(factor, Node) else factor) > 0)
    elif len(signals) == 1:
        (signal,) = signals
    elif len(set(live)) == 1 or not signals:
        signal = live[0]  # x * x; or a product of gates
    else:
        layer = max(node.meta.get("layers", ()), key=len, default="")
        raise LayerError(
            f"excitation backprop: there is no rule for a product of two signals ({node.target} in layer '{layer}'); "
            f"one factor must be a constant or a gate (sigmoid, hardsigmoid, softmax)."
        )
    yield signal, p.sum_to_size(len(p), *walk.values[signal].shape)


def _scaled(walk: Walk, node: Node, p: Tensor) -> Flow:
    """Batch norm that could not be folded: every channel has one child, excitatory if its scale is positive."""
    slope, _ = walk.graph.scale(node)
    if bool((slope < 0).any()):
        walk.note("batch norm with negative scale and nothing to fold into: those channels lose their mass")
    yield _node(node.args[0]), p * (slope > 0).view(1, 1, -1, *[1] * (p.dim() - 3))


def _layer_norm(walk: Walk, node: Node, p: Tensor) -> Flow:
    walk.note("layer norm: mass passed through")
    gamma = node.args[2] if len(node.args) > 2 else None
    if gamma is not None:
        p = p * (walk.values[gamma] > 0)
    yield _node(node.args[0]), p


def _softmax(walk: Walk, node: Node, p: Tensor) -> Flow:
    raise LayerError(
        "excitation backprop: never start above a softmax; name the layer that gives the logits as the start instead."
    )


def _is_live(walk: Walk, operand: Any) -> bool:
    """Whether the operand depends on the image."""
    return isinstance(operand, Node) and operand in walk.graph.live


def _moves(node: Node) -> bool:
    return node.target in MOVES and not isinstance(node.args[0], (list, tuple))


def _node(arg: Any) -> Node:
    assert isinstance(arg, Node)
    return arg


def _resolved(walk: Walk, args: Any) -> list[Any]:
    return [walk.values[a] if isinstance(a, Node) else a for a in args]


def safe_reciprocal(den: Tensor, smallest: float = 1e-30) -> Tensor:
    """Return 1/den, and 0 where ``den`` is 0 (a parent without excitatory children loses its mass)."""
    return F.threshold(den, smallest, torch.inf).reciprocal_()


RULES: dict[Any, Callable[[Walk, Node, Tensor], Flow]] = {
    **dict.fromkeys(ACTIVATIONS, _same),
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(MAX_POOLS, _max_pool),
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.expand.default: _expand,
    aten.cat.default: _cat,
    aten.pad.default: _pad,
    aten.constant_pad_nd.default: _pad,
    aten.roll.default: _roll,
    operator.getitem: _getitem,
    aten.add.Tensor: _sum_of,
    aten.sub.Tensor: _sum_of,
    aten.mul.Tensor: _product,
    aten.div.Tensor: _product,
    BATCH_NORM: _scaled,
    aten.layer_norm.default: _layer_norm,
    aten.softmax.int: _softmax,
    aten._softmax.default: _softmax,
    aten.log_softmax.int: _softmax,
}
