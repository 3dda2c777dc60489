"""How probability mass walks down through each ATen operation in excitation backprop.

[ExcitationBP]: a parent  i  hands its mass to a child  j  with
probability  w_ij^+ a_j / sum_k w_ik^+ a_k,  so for any linear map  f

    p_in = a * f^T( p / f(a; W^+) ; W^+ ),          0/0 := 0,  biases ignored.

``a`` is the child's *excitation*, its activation made non-negative: as it is after ReLU or sigmoid, shifted by its
lower bound after tanh or ELU, clipped at 0 (and noted) where there is no bound or a small one (GELU, SiLU, hardswish,
linear bottlenecks). A mass has the neurons in front, ``(neurons, *shape of the node)``: one walk serves all of them.

Where the paper leaves a choice: a residual sum splits by the positive parts of its branches; a gate  x * sigmoid(g)
and an attention matrix are weights, so the gated signal and the values get the mass: a class token's mass goes to the
tokens it reads, as much as it reads them. Norms pass mass through like batch norm; a negative layer scale
turns the rows of the linear map below it; a channel with a negative scale that cannot be folded has no excitatory child
and loses its mass. Of a product of two signals the one that gates (an activation, or one value for many) is a weight;
where neither gates both get half. `ExcitationBackprop.lost` says layer by layer what was lost.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from auditor.errors import LayerError
from auditor.network.aten_graph import BATCH_NORM, AtenGraph, Node, call, source

aten = torch.ops.aten
Flow = Iterator[tuple[Node, Tensor]]

GATES = {aten.sigmoid.default, aten.hardsigmoid.default, aten.softmax.int, aten._softmax.default}
NORMALISERS = {aten.rsqrt.default, aten.reciprocal.default}  # x * rsqrt(mean(x^2)) is a norm written out
NON_NEGATIVE = {*GATES, aten.relu.default, aten.relu6.default, aten.softplus.default}
ACTIVATIONS = {
    *NON_NEGATIVE, aten.tanh.default, aten.elu.default, aten.celu.default, aten.selu.default, aten.hardtanh.default,
    aten.clamp.default, aten.clamp_min.default, aten.silu.default, aten.hardswish.default, aten.gelu.default,
    aten.leaky_relu.default, aten.mish.default, aten.prelu.default, aten._prelu_kernel.default,
    aten.dropout.default, aten.alpha_dropout.default, aten.feature_dropout.default, aten.clamp_max.default,
    aten.abs.default, aten.square.default, aten.sqrt.default, aten.exp.default, aten.pow.Tensor_Scalar,
    aten.log_sigmoid.default,
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
# every output is one input (or a constant), at a place or by a choice that the gradient knows
CHOICES = {aten.index.Tensor, aten.index_select.default, aten.flip.default, aten.repeat.default, aten.unfold.default,
           aten.im2col.default, aten.gather.default, aten.where.self, aten.masked_fill.Scalar, aten.amax.default,
           aten.max.dim, aten.maximum.default, aten.slice_scatter.default, aten.select_scatter.default,
           aten.tile.default, aten.narrow.default}  # fmt: skip
# linear with constant weights >= 0 of its own
INTERPOLATIONS = {aten.upsample_bilinear2d.vec, aten.upsample_nearest2d.vec, aten.upsample_linear1d.vec,
                  aten.upsample_nearest1d.vec, aten.avg_pool3d.default, aten.adaptive_avg_pool3d.default,
                  aten.col2im.default}  # fmt: skip
NORMS = {aten.layer_norm.default: 2, aten.group_norm.default: 2, aten.rms_norm.default: 2,
         aten.instance_norm.default: 1}  # fmt: skip  # which argument is the weight
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
        raise no_rule(node)
    yield from rule(walk, node, p)


def no_rule(node: Node) -> LayerError:
    """Return the error that names an operation without a rule, and its layer."""
    layer = max(node.meta.get("layers", ()), key=len, default="") or "the model itself"
    return LayerError(
        f"excitation backprop: there is no rule for {node.target} (in layer '{layer}'). Start below it or stop above "
        "it, or use another heatmap method (grad_cam needs no rules)."
    )


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
    shifts, dims = node.args[1], node.args[2] if len(node.args) > 2 else []
    back = [-s for s in shifts]
    if not dims:  # all dimensions in one row
        yield _node(node.args[0]), p.flatten(1).roll(back, [1]).view_as(p)
        return
    yield _node(node.args[0]), p.roll(back, [d % (p.dim() - 1) + 1 for d in dims])


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
    if len(live) == 1:
        (signal,) = live
        factor = next((a for a in node.args[:2] if a is not signal), signal)
        if not _turns_rows(walk, signal):
            p = p * (torch.as_tensor(walk.values[factor] if isinstance(factor, Node) else factor) > 0)
        yield signal, p.sum_to_size(len(p), *walk.values[signal].shape)
        return
    signals = list(dict.fromkeys(_gated(walk, live)))
    if len(signals) > 1:
        walk.note(f"{node.target}: a product of two signals, each gets half")
    for signal in signals:
        yield signal, (p / len(signals)).sum_to_size(len(p), *walk.values[signal].shape)


def _gated(walk: Walk, live: list[Node]) -> list[Node]:
    """Return which factors of a product of signals are not gates: what gates is a weight, and weights get no mass."""
    larger = max(walk.values[n].numel() for n in live)
    tests: tuple[Callable[[Node], bool], ...] = (
        lambda n: source(n, _moves).target in GATES,
        lambda n: source(n, _moves).target in NORMALISERS,
        lambda n: walk.values[n].numel() < larger,  # one value for many: channel attention
        lambda n: source(n, _moves).target in ACTIVATIONS,  # gated linear units
    )
    for is_gate in tests:
        gates = [is_gate(n) for n in live]
        if any(gates) and not all(gates):
            return [n for n, gate in zip(live, gates, strict=True) if not gate]
    return live[:1] if source(live[0], _moves).target in GATES else live


def _turns_rows(walk: Walk, signal: Node) -> bool:
    """Whether a layer scale on ``signal`` is folded into the linear map below it, negative channels included."""
    linear = source(signal, lambda n: n.target in _LAYER_SCALE_MOVES)
    return linear in walk.graph.live and walk.graph.turned_channels(linear, walk.pinned) is not None


_LAYER_SCALE_MOVES = (aten.permute.default, aten.transpose.int, aten.dropout.default, aten.clone.default,
                      aten.contiguous.default, aten.alias.default)  # fmt: skip


def _scaled(walk: Walk, node: Node, p: Tensor) -> Flow:
    """Batch norm that could not be folded: every channel has one child, excitatory if its scale is positive."""
    slope, _ = walk.graph.scale(node)
    if bool((slope < 0).any()):
        walk.note("batch norm with negative scale and nothing to fold into: those channels lose their mass")
    yield _node(node.args[0]), p * (slope > 0).view(1, 1, -1, *[1] * (p.dim() - 3))


def _norm(walk: Walk, node: Node, p: Tensor) -> Flow:
    """Layer, group, instance and root mean square norm: one child each, excitatory if its weight is positive."""
    name = str(node.target).split(".")[1].replace("_", " ")
    walk.note(f"{name}: mass passed through")
    at = NORMS[node.target]
    gamma = node.args[at] if len(node.args) > at else None
    if gamma is not None:
        positive = walk.values[gamma] > 0
        by_channel = node.target in (aten.group_norm.default, aten.instance_norm.default)
        p = p * (positive.view(-1, *[1] * (p.dim() - 3)) if by_channel else positive)
    yield _node(node.args[0]), p


def _chosen(walk: Walk, node: Node, p: Tensor) -> Flow:
    """Mass goes back to the inputs that the outputs are, which the gradient of the operation finds."""
    children = [n for n in node.all_input_nodes if _is_live(walk, n) and walk.values[n].is_floating_point()]
    yield from zip(children, _transposed(walk, node, children, p), strict=True)


def _interpolated(walk: Walk, node: Node, p: Tensor) -> Flow:
    """Follow the rule for linear maps with the operation's own weights, all non-negative."""
    child = _node(node.args[0])
    a = walk.excitation(child)
    spread: Tensor = call(node, lambda n: a if n is child else walk.values[n])
    (back,) = _transposed(walk, node, [child], p * safe_reciprocal(spread))
    yield child, back * a


def _transposed(walk: Walk, node: Node, children: list[Node], p: Tensor) -> list[Tensor]:
    """Return the transposed Jacobian of an operation by its inputs ``children``, applied to every neuron's ``p``."""
    with torch.enable_grad():
        leaves = {n: walk.values[n].detach().requires_grad_() for n in children}
        out = call(node, lambda n: leaves.get(n, walk.values[n]))
        out = out[0] if isinstance(out, (tuple, list)) else out
        rows = [torch.autograd.grad(out, list(leaves.values()), q, retain_graph=True) for q in p]
    return [torch.stack(parts) for parts in zip(*rows, strict=True)]


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
    **dict.fromkeys(NORMS, _norm),
    **dict.fromkeys(CHOICES, _chosen),
    **dict.fromkeys(INTERPOLATIONS, _interpolated),
    aten.softmax.int: _softmax,
    aten._softmax.default: _softmax,
    aten.log_softmax.int: _softmax,
}
