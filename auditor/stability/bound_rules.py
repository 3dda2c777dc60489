"""Rules of the certified bound: for every operation, how the signal behind it follows from those before it.

An operation without a rule raises `NoBound` with its name and layer: there is no silent approximation.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from auditor.kernels.networks.operator_norm import convolution_norm, matrix_norm
from auditor.network.aten_graph import BATCH_NORM, CONVOLUTIONS, AtenGraph, Node
from auditor.network.linear_maps import PADDED_BY_NAME, TRANSPOSED
from auditor.network.weight_layers import PRODUCTS
from auditor.stability.bound_signal import Op, Shape, Signal, added, joined, repeats

aten = torch.ops.aten
INF = math.inf


class NoBound(Exception):
    """An operation that has no Lipschitz constant, or none we know; the text says which and where."""


# |f'| and |f''| at most, rounded up in the last digit; infinite where f' jumps
ACTIVATIONS: dict[Any, tuple[float, float]] = {
    aten.relu.default: (1, INF),
    aten.relu6.default: (1, INF),
    aten.hardtanh.default: (1, INF),
    aten.clamp.default: (1, INF),
    aten.clamp_min.default: (1, INF),
    aten.clamp_max.default: (1, INF),
    aten.abs.default: (1, INF),
    aten.hardswish.default: (1.5, INF),
    aten.hardsigmoid.default: (0.1666667, INF),
    aten.sigmoid.default: (0.25, 0.0962251),
    aten.tanh.default: (1, 0.7698004),
    aten.silu.default: (1.0998394, 0.5),
    aten.mish.default: (1.0885, 0.644205),
    aten.log_sigmoid.default: (1, 0.25),
    aten.sin.default: (1, 1),
    aten.cos.default: (1, 1),
    aten.neg.default: (1, 0),
}
GELU = {"none": (1.1289044, 0.7978846), "tanh": (1.1291, 0.7990)}
MOVES = (aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default, aten.dropout.default,
         aten._to_copy.default, aten.permute.default, aten.transpose.int, aten.squeeze.dim, aten.squeeze.dims,
         aten.squeeze.default, aten.unsqueeze.default, aten.pixel_shuffle.default, aten.pixel_unshuffle.default,
         aten.roll.default, aten.flip.default, aten.feature_dropout.default, aten.channel_shuffle.default)  # fmt: skip
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
         aten.unflatten.int)  # fmt: skip
DROPS = (aten.slice.Tensor, aten.select.int, aten.narrow.default)
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
ATTENTION = (aten.scaled_dot_product_attention.default, aten.softmax.int, aten._softmax.default)
LAYER_NORMS = (aten.layer_norm.default, aten.native_layer_norm.default)
GROUP_NORMS = (aten.group_norm.default, aten.native_group_norm.default)
MAX_POOLS = (aten.max_pool2d.default, aten.max_pool2d_with_indices.default, aten.max_pool1d.default)
AVERAGES = (aten.avg_pool1d.default, aten.avg_pool2d.default, aten.adaptive_avg_pool1d.default,
            aten.adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d.default)  # fmt: skip


@dataclass(slots=True)
class BoundWalk:
    """Signals of the nodes of a graph, from the input upwards."""

    graph: AtenGraph
    pinned: frozenset[Node]
    signals: dict[Node, Signal]

    def step(self, node: Node) -> Signal:
        """Return the signal of ``node`` from those of its inputs."""
        target = node.target
        if target in (aten.add.Tensor, aten.sub.Tensor):
            return self._sum(node)
        if target in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
            return self._product(node)
        if target in (aten.cat.default, aten.stack.default):
            return self._joined(node)
        if target in ATTENTION:
            raise NoBound(f"{name_of(node)} has no global Lipschitz constant that is known")
        if self.graph.folds(node, self.pinned):
            linear = node.args[0]
            return self._linear(linear, self.signals[linear.args[0]], self._slope(node))
        child = next((a for a in node.args if isinstance(a, Node) and a in self.signals), None)
        if child is None or any(n in self.graph.live and n is not child for n in node.all_input_nodes):
            raise NoBound(f"{name_of(node)} combines signals in a way without a rule")
        a = self.signals[child]
        if target is operator.getitem:
            if child.target in SPLITS:
                return a.scaled(1.0, _shape(node))
            if node.args[1] != 0:
                raise NoBound(f"{name_of(child)} is used for more than its first result")
            return a
        return self._single(node, child, a)

    def _single(self, node: Node, child: Node, a: Signal) -> Signal:
        target = node.target
        if target in ACTIVATIONS:
            return a.bent(*ACTIVATIONS[target], name_of(node))
        if target in VIEWS or target in MOVES or target in DROPS:
            return a.mapped(_for_any_batch(node, child), lambda: 1.0, _shape(node))
        if target in SPLITS:
            return a
        if target in (aten.linear.default, aten.addmm.default, *PRODUCTS, *CONVOLUTIONS, *PADDED_BY_NAME, *TRANSPOSED):
            return self._linear(node, a)
        if target is BATCH_NORM:
            slope = self._slope(node).view(-1, *[1] * (len(a.shape) - 1))
            return a.mapped(lambda t: t * slope, lambda: float(slope.abs().max()), a.shape)
        if target in LAYER_NORMS or target in GROUP_NORMS:
            return self._normed(node, a)
        if target in AVERAGES:
            return self._averaged(node, a)
        if target in MAX_POOLS or target is aten.adaptive_max_pool2d.default:
            return self._max_pooled(node, child, a)
        if target in (aten.mean.dim, aten.sum.dim_IntList, aten.amax.default):
            return self._reduced(node, child, a)
        if target in (aten.constant_pad_nd.default, aten.pad.default):
            if target is aten.pad.default and len(node.args) > 2 and node.args[2] != "constant":
                raise NoBound(f"{name_of(node)} with mode {node.args[2]!r} has no rule")
            sides = list(node.args[1])
            return a.mapped(lambda t: F.pad(t, sides), lambda: 1.0, _shape(node))
        if target is aten.expand.default:
            shape = _shape(node)
            return a.scaled(repeats(a.shape, shape), shape)
        return self._bent(node, a)

    def _bent(self, node: Node, a: Signal) -> Signal:
        """Activations with parameters."""
        target, rest, where = node.target, list(node.args[1:]), name_of(node)
        if target is aten.gelu.default:
            return a.bent(*GELU[str(node.kwargs.get("approximate", "none"))], where)
        if target is aten.leaky_relu.default:
            return a.bent(max(1.0, abs(float(rest[0]) if rest else 0.01)), INF, where)
        if target is aten.elu.default:
            alpha, scale, inner = [float(v) for v in _filled(rest, [1.0, 1.0, 1.0])]
            slope = abs(scale) * max(1.0, abs(alpha * inner))
            smooth = alpha * inner == 1.0
            return a.bent(slope, abs(scale * alpha) * inner * inner if smooth else INF, where)
        if target is aten.softplus.default:
            beta = float(rest[0]) if rest else 1.0
            # above its threshold it turns linear, with a step of the slope too small to matter but there
            return a.bent(1.0, INF if float(rest[1] if len(rest) > 1 else 20.0) < 20 else beta / 4, where)
        if target is aten.prelu.default:
            weight = self.graph.constant(rest[0])
            if weight is not None:
                return a.bent(max(1.0, float(weight.abs().max())), INF, where)
        raise NoBound(f"{where} has no rule for a Lipschitz constant")

    def _linear(self, node: Node, a: Signal, slope: Tensor | None = None) -> Signal:
        """Linear maps with constant weights; ``slope`` per output channel is the batch norm behind it."""
        target, args = node.target, list(node.args)
        if target is aten.addmm.default:
            target, args = aten.mm.default, [args[1], args[2]]
            if node.kwargs:
                raise NoBound(f"{name_of(node)} with factors has no rule")
        w = self.graph.constant(args[1])
        if w is None or (target in PRODUCTS and w.dim() != 2):
            raise NoBound(f"{name_of(node)} multiplies two signals")
        w = w.double()
        shape = _shape(node)
        if target is aten.linear.default or target in PRODUCTS:
            w = w if target is aten.linear.default else w.T
            w = w if slope is None else w * slope[:, None]
            return a.mapped(lambda t: t @ w.T, lambda: matrix_norm(w), shape)
        rank = w.dim() - 2
        if target in TRANSPOSED:
            stride, padding, extra, groups, dilation = _filled(args[3:], [1, 0, 0, 1, 1])
            conv_t = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
            pads = [(p, p) for p in _each(padding, rank)]
            options: dict[str, Any] = {"stride": _each(stride, rank), "pad": pads, "dilation": _each(dilation, rank)}
            return a.mapped(
                lambda t: conv_t(t, w, None, stride, padding, extra, groups, dilation),
                lambda: convolution_norm(w, shape[1:], groups=int(groups), **options),
                shape,
            )
        stride, padding, dilation, groups = _filled(args[3:], [1, 0, 1, 1])
        strides, dilations = _each(stride, rank), _each(dilation, rank)
        if padding == "same":
            totals = [d * (k - 1) for d, k in zip(dilations, w.shape[2:], strict=True)]
            pads = [(t // 2, t - t // 2) for t in totals]
        else:
            pads = [(p, p) for p in _each(0 if padding == "valid" else padding, rank)]
        w = w if slope is None else w * slope.view(-1, *[1] * (w.dim() - 1))
        conv = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
        flat = [side for pair in reversed(pads) for side in pair]

        def size() -> float:
            scaled = w
            if a.scale is not None:  # the input: 1 / std goes into the weights
                per_group = a.scale.reshape(groups, -1).repeat_interleave(w.shape[0] // groups, 0)
                scaled = w * per_group.view(*per_group.shape, *[1] * rank)
            norm = convolution_norm(
                scaled, a.shape[1:], stride=strides, pad=pads, dilation=dilations, groups=int(groups)
            )
            return norm / a.norm() if a.scale is not None else norm

        return a.mapped(lambda t: conv(F.pad(t, flat), w, None, strides, 0, dilations, groups), size, shape)

    def _slope(self, node: Node) -> Tensor:
        """Slope per channel of a batch norm in eval mode, in float64."""
        _, gamma, _, _, var, _, eps = node.args
        slope: Tensor = (self.graph.constants[var].double() + eps).rsqrt()
        return slope if gamma is None else slope * self.graph.constants[gamma].double()

    def _normed(self, node: Node, a: Signal) -> Signal:
        """Layer and group norm: the Jacobian is a projection over sqrt(var + eps), so 1 / sqrt(eps) bounds it."""
        values = list(node.args)
        native = node.target in (aten.native_layer_norm.default, aten.native_group_norm.default)
        if node.target in LAYER_NORMS:
            gamma, eps = (values[2] if len(values) > 2 else None), (values[4] if len(values) > 4 else 1e-5)
        else:
            gamma = values[1 if native else 2] if len(values) > 2 else None
            eps = values[-1] if native else (values[4] if len(values) > 4 else 1e-5)
        largest = 1.0 if gamma is None else float(self.graph.constant(gamma).abs().max())
        if not float(eps) > 0:
            raise NoBound(f"{name_of(node)} without eps has no Lipschitz constant")
        return a.bent(largest / math.sqrt(float(eps)), INF, name_of(node))

    def _averaged(self, node: Node, a: Signal) -> Signal:
        """Average pooling is a product of one-dimensional maps, whose matrices are small."""
        rest, shape = list(node.args[1:]), _shape(node)
        rank = 1 if node.target in (aten.avg_pool1d.default, aten.adaptive_avg_pool1d.default) else 2
        pools: list[Op] = []
        if "adaptive" in str(node.target):
            pools = [partial(F.adaptive_avg_pool1d, output_size=n) for n in shape[-rank:]]
        else:
            kernel, stride, pad, ceil, count, override = _filled(rest, [[], [], 0, False, True, None])[:6]
            if override is not None:
                raise NoBound(f"{name_of(node)} with a divisor of its own has no rule")
            sides = zip(_each(kernel, rank), _each(stride or kernel, rank), _each(pad, rank), strict=True)
            for k, s, p in sides:
                options = {"kernel_size": k, "stride": s, "padding": p, "ceil_mode": ceil, "count_include_pad": count}
                pools.append(partial(F.avg_pool1d, **options))
        norm = 1.0
        for pool, n in zip(pools, a.shape[-rank:], strict=True):
            norm *= matrix_norm(pool(torch.eye(n, dtype=torch.float64)[None])[0])
        fixed = [_constant_size(v) for v in rest]
        if "adaptive" in str(node.target):
            fixed = [list(shape[-rank:])]
        return a.mapped(lambda t: node.target(t, *fixed), lambda: norm, shape)

    def _max_pooled(self, node: Node, child: Node, a: Signal) -> Signal:
        """Count an entry once for every window that it lies in."""
        rest, shape = list(node.args[1:]), _shape(node)
        if node.target is aten.adaptive_max_pool2d.default:
            shares = []
            for n, m in zip(a.shape[-2:], shape[-2:], strict=True):
                windows = torch.zeros(n)
                for o in range(m):
                    windows[o * n // m : -(-(o + 1) * n // m)] += 1
                shares.append(int(windows.max()))
        else:
            rank = 1 if node.target is aten.max_pool1d.default else 2
            kernel, stride, _, dilation = _filled(rest, [[], [], 0, 1])[:4]
            sides = zip(_each(kernel, rank), _each(stride or kernel, rank), _each(dilation, rank), strict=True)
            shares = [-(-k * math.gcd(s, d) // s) for k, s, d in sides]
        return a.bent(math.sqrt(math.prod(shares)), INF, name_of(node), shape)

    def _reduced(self, node: Node, child: Node, a: Signal) -> Signal:
        rank, shape = len(child.meta["val"].shape), _shape(node)
        dims = [int(d) % rank for d in (node.args[1] or range(rank))]
        if 0 in dims:
            raise NoBound(f"{name_of(node)} mixes the images of a batch")
        count = math.prod(a.shape[d - 1] for d in dims)
        if node.target is aten.amax.default:
            return a.bent(1.0, INF, name_of(node), shape)
        size = count**-0.5 if node.target is aten.mean.dim else count**0.5
        keep = len(node.args) > 2 and bool(node.args[2])
        return a.mapped(lambda t: node.target(t, dims, keep), lambda: size, shape)

    def _sum(self, node: Node) -> Signal:
        alpha = float(node.kwargs.get("alpha", 1)) * (-1 if node.target is aten.sub.Tensor else 1)
        factors = (1.0, alpha)
        parts = [
            (self.signals[a], c) for a, c in zip(node.args[:2], factors, strict=True)
            if isinstance(a, Node) and a in self.signals
        ]  # fmt: skip
        if not parts:
            raise NoBound(f"{name_of(node)} combines signals in a way without a rule")
        return added(parts, _shape(node))

    def _product(self, node: Node) -> Signal:
        left, right = node.args[:2]
        live = [a for a in (left, right) if isinstance(a, Node) and a in self.graph.live]
        if len(live) != 1 or (node.target is aten.div.Tensor and live[0] is right):
            raise NoBound(f"{name_of(node)} multiplies two signals: no constant without bounds on their size")
        a, shape = self.signals[live[0]], _shape(node)
        other = torch.as_tensor(self.graph.constant(right if live[0] is left else left)).double()
        factor = 1 / other if node.target in (aten.div.Tensor, aten.div.Scalar) else other
        size = float(factor.abs().max()) * repeats(a.shape, shape)
        plain = factor.dim() <= len(shape) or factor.shape[0] == 1
        return a.mapped((lambda t: t * factor) if plain and a.shape == shape else None, lambda: size, shape)

    def _joined(self, node: Node) -> Signal:
        nodes, shape = list(node.args[0]), _shape(node)
        dim = int(node.args[1]) if len(node.args) > 1 else 0
        if dim % len(_value(node).shape) == 0:
            raise NoBound(f"{name_of(node)} mixes the images of a batch")
        parts = [self.signals[n] for n in nodes if n in self.signals]
        join = torch.cat if node.target is aten.cat.default else torch.stack
        if len(parts) < len(nodes):  # something constant, like a class token, stands between
            return joined(parts, shape, None)
        return joined(parts, shape, lambda t: join(t, dim))


def name_of(node: Node) -> str:
    """Return the operation and its layer for a reader."""
    layer = next((n for n in reversed(node.meta.get("layers", ())) if n), "")
    operation = getattr(node.target, "__name__", str(node.target)).split(".")[0].strip("_")
    return f"{operation} in {layer}" if layer else operation


def _for_any_batch(node: Node, child: Node) -> Op | None:
    """Return the operation for another batch size, or None when it touches the batch dimension."""
    before, after = _value(child).shape, _value(node).shape
    if len(after) == 0 or str(before[0]) != str(after[0]):
        return None
    args, kwargs, rank = node.args[1:], dict(node.kwargs), len(before)
    if node.target in VIEWS:
        shape = tuple(int(n) for n in after[1:])
        return lambda t: t.reshape(len(t), *shape)
    if node.target in (aten._to_copy.default, aten.dropout.default, aten.feature_dropout.default):
        return lambda t: t
    dims: Any = ()
    if node.target is aten.permute.default:
        dims = [] if args[0][0] % rank == 0 else [0]
    elif node.target in (aten.transpose.int, aten.squeeze.dim, aten.select.int, aten.slice.Tensor, aten.narrow.default):
        dims = args[:2] if node.target is aten.transpose.int else args[:1] or (0,)
    elif node.target in (aten.squeeze.default, aten.squeeze.dims, aten.roll.default, aten.flip.default):
        return None
    elif node.target is aten.unsqueeze.default:
        dims = [args[0] if args[0] >= 0 else args[0] + rank + 1]
    if any(int(d) % rank == 0 for d in dims) or len(node.all_input_nodes) > 1:
        return None
    run: Callable[..., Tensor] = node.target
    return lambda t: run(t, *args, **kwargs)


def _value(node: Node) -> Any:
    value = node.meta["val"]
    return value[0] if isinstance(value, (tuple, list)) else value


def _shape(node: Node) -> Shape:
    return tuple(int(n) for n in _value(node).shape[1:])


def _filled(values: list[Any], defaults: list[Any]) -> list[Any]:
    return [*values, *defaults[len(values) :]]


def _constant_size(value: Any) -> Any:
    return [int(v) for v in value] if isinstance(value, (list, tuple)) else value


def _each(value: Any, rank: int) -> list[int]:
    seq = list(value) if isinstance(value, (list, tuple)) else [value]
    return [int(v) for v in (seq * rank if len(seq) == 1 else seq)]
