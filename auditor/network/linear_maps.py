"""Linear maps in a graph, each with the two operations excitation backprop asks of it.

``spread(a)`` is  f(a; W^+)  and ``gather(q)`` is  f^T(q; W^+),  without bias; ``sign=-1`` uses  (-W)^+  instead, the
dual neuron of contrastive excitation backprop. Masses carry the neurons in front of the node's own shape.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from auditor.network.aten_graph import BATCH_NORM, CONVOLUTIONS, AtenGraph, Node, source
from auditor.network.pointwise_convolution import conv2d

aten = torch.ops.aten
TRANSPOSED = (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
PADDED_BY_NAME = (aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding)
LARGE = 1 << 16  # numbers of a mass from which it pays to look where they are zero
SOFTMAXES = (aten.softmax.int, aten._softmax.default)


class LinearMap(ABC):
    """A linear map from one node's value to another's."""

    child: Node

    @abstractmethod
    def spread(self, a: Tensor, sign: int = 1) -> Tensor:
        """Return  f(a; (sign W)^+)  for  ``a``  of the child's shape."""

    @abstractmethod
    def gather(self, q: Tensor, sign: int = 1) -> Tensor:
        """Return  f^T(q; (sign W)^+)  for  ``q``  of shape (neurons, *shape of the node)."""


@dataclass(frozen=True)
class Convolution(LinearMap):
    """Convolution of any rank, with stride, dilation, groups and (possibly uneven) zero padding."""

    child: Node
    clipped: Clipped
    shape: tuple[int, ...]  # of the child's value
    stride: list[int]
    pad: list[tuple[int, int]]  # before and after, per spatial dimension
    dilation: list[int]
    groups: int

    def spread(self, a: Tensor, sign: int = 1) -> Tensor:
        """Apply the clipped map."""
        w = self.clipped(sign)
        conv = (F.conv1d, conv2d, F.conv3d)[len(self.stride) - 1]
        even, a = self._even(a)
        return conv(a, w, None, self.stride, even, self.dilation, self.groups)

    def gather(self, q: Tensor, sign: int = 1) -> Tensor:
        """Apply its transpose."""
        w = self.clipped(sign)
        if self._is_plain() and sign > 0:  # a convolution with mirrored weights is faster than the transposed one
            w, pad = self.clipped.mirrored(self.groups), [k - 1 - p for k, (p, _) in self._sides()]
            x = conv2d(q.flatten(0, 1), w, None, (1, 1), pad, (1, 1), self.groups)
            return x.reshape(*q.shape[:2], *x.shape[1:])
        even, _ = self._even(None)
        uneven = even == [0] * len(even) and any(b != a for b, a in self.pad)
        size = [s + (sum(p) if uneven else 0) for s, p in zip(self.shape[2:], self.pad, strict=True)]
        missing = [
            s - ((o - 1) * st - 2 * e + d * (k - 1) + 1)
            for s, o, st, e, d, k in zip(size, q.shape[3:], self.stride, even, self.dilation, w.shape[2:], strict=True)
        ]
        conv = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(self.stride) - 1]
        x = conv(q.flatten(0, 1), w, None, self.stride, even, missing, self.groups, self.dilation)
        if uneven:
            for dim, (before, _) in enumerate(self.pad):
                x = x.narrow(dim + 2, before, self.shape[dim + 2])
        return x.reshape(*q.shape[:2], *x.shape[1:])

    def _sides(self) -> list[tuple[int, tuple[int, int]]]:
        return list(zip(self.clipped.weight.shape[2:], self.pad, strict=True))

    def _is_plain(self) -> bool:
        """Whether it is two-dimensional with stride and dilation 1 and less padding than kernel."""
        fits = all(before == after < k for k, (before, after) in self._sides())
        return self.stride == [1, 1] and self.dilation == [1, 1] and fits

    def _even(self, a: Any) -> tuple[list[int], Any]:
        """Return the padding that the convolution itself can do, and ``a`` padded here when it cannot."""
        if all(before == after for before, after in self.pad):
            return [before for before, _ in self.pad], a
        flat = [side for pair in reversed(self.pad) for side in pair]
        return [0] * len(self.pad), None if a is None else F.pad(a, flat)


@dataclass(frozen=True)
class TransposedConvolution(LinearMap):
    """Transposed convolution; its own transpose is an ordinary convolution."""

    child: Node
    clipped: Clipped
    options: tuple[Any, ...]  # stride, padding, output padding, groups, dilation
    rank: int

    def spread(self, a: Tensor, sign: int = 1) -> Tensor:
        """Apply the clipped map."""
        conv = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[self.rank - 1]
        return conv(a, self.clipped(sign), None, *self.options)

    def gather(self, q: Tensor, sign: int = 1) -> Tensor:
        """Apply its transpose."""
        stride, padding, _, groups, dilation = self.options
        conv = (F.conv1d, F.conv2d, F.conv3d)[self.rank - 1]
        x = conv(q.flatten(0, 1), self.clipped(sign), None, stride, padding, dilation, groups)
        return x.reshape(*q.shape[:2], *x.shape[1:])


@dataclass(frozen=True)
class Dense(LinearMap):
    """``x @ W^T`` over the last dimension."""

    child: Node
    clipped: Clipped

    def spread(self, a: Tensor, sign: int = 1) -> Tensor:
        """Apply the clipped map."""
        return a @ self.clipped.turned() if sign > 0 else F.linear(a, self.clipped(sign))

    def gather(self, q: Tensor, sign: int = 1) -> Tensor:
        """Apply its transpose: above the last attention only the class token has mass, below it only the values."""
        if sign < 0 or q.numel() < LARGE or self.clipped.weight.dim() != 2:
            return q @ (self.clipped.turned().transpose(-1, -2) if sign > 0 else self.clipped(sign))
        turned, flat = self.clipped.turned(), q.reshape(-1, q.shape[-1])
        used = flat != 0
        outputs, rows = used.any(0), used.any(1)
        if int(outputs.sum()) * 2 < len(outputs):
            flat, turned = flat[:, outputs], turned[:, outputs]
        if int(rows.sum()) * 2 < len(rows):
            back = flat.new_zeros(len(rows), len(turned))
            back[rows] = rows_times(flat[rows], turned)
        else:
            back = rows_times(flat, turned)
        return back.view(*q.shape[:-1], -1)


@dataclass(frozen=True)
class AveragePool(LinearMap):
    """Average and adaptive average pooling in two dimensions: uniform positive weights in each window."""

    child: Node
    node: Node
    args: list[Any]
    shape: tuple[int, ...]

    def spread(self, a: Tensor, sign: int = 1) -> Tensor:
        """Apply the clipped map."""
        pooled: Tensor = self.node.target(a, *self.args)
        return pooled if sign > 0 else torch.zeros_like(pooled)

    def gather(self, q: Tensor, sign: int = 1) -> Tensor:
        """Apply its transpose."""
        flat = q.flatten(0, 1).contiguous()
        like = flat.new_empty((len(flat), *self.shape[1:]))
        if sign < 0:
            return torch.zeros_like(like).reshape(*q.shape[:2], *like.shape[1:])
        if self.node.target is aten.avg_pool2d.default:
            kernel, *rest = self.args
            defaults: list[Any] = [[], [0, 0], False, True, None]
            x: Tensor = aten.avg_pool2d_backward.default(flat, like, kernel, *rest, *defaults[len(rest) :])
        else:
            x = aten._adaptive_avg_pool2d_backward.default(flat, like)
        return x.reshape(*q.shape[:2], *x.shape[1:])


@dataclass(frozen=True)
class Mean(LinearMap):
    """Mean or sum over some dimensions; the common factor cancels in the walk, so both are a sum here."""

    child: Node
    dims: list[int]
    keepdim: bool
    shape: tuple[int, ...]

    def spread(self, a: Tensor, sign: int = 1) -> Tensor:
        """Apply the clipped map."""
        total = a.sum(self.dims, self.keepdim)
        return total if sign > 0 else torch.zeros_like(total)

    def gather(self, q: Tensor, sign: int = 1) -> Tensor:
        """Apply its transpose."""
        if not self.keepdim:
            for dim in sorted(self.dims):
                q = q.unsqueeze(dim + 1)
        whole = q.expand(len(q), *self.shape)
        return whole.clone() if sign > 0 else torch.zeros_like(whole)


@dataclass(frozen=True)
class Attention(LinearMap):
    """A matrix of attention weights, all non-negative, applied to the values (of ``shape``)."""

    child: Node
    weights: Tensor
    shape: tuple[int, ...] = ()

    def spread(self, a: Tensor, sign: int = 1) -> Tensor:
        """Apply the clipped map."""
        return self.weights @ a if sign > 0 else torch.zeros_like(self.weights @ a)

    def gather(self, q: Tensor, sign: int = 1) -> Tensor:
        """Apply its transpose."""
        back = self.weights.transpose(-1, -2) @ q
        if back.shape[1:] != self.shape and self.shape:  # values shared by several heads: what they get adds up
            back = back.sum_to_size(len(back), *self.shape)
        return back if sign > 0 else torch.zeros_like(back)


@dataclass(frozen=True)
class AttentionFromRight(LinearMap):
    """Values times a matrix of attention weights, all non-negative, that stands on their right."""

    child: Node
    weights: Tensor

    def spread(self, a: Tensor, sign: int = 1) -> Tensor:
        """Apply the clipped map."""
        return a @ self.weights if sign > 0 else torch.zeros_like(a @ self.weights)

    def gather(self, q: Tensor, sign: int = 1) -> Tensor:
        """Apply its transpose."""
        back = q @ self.weights.transpose(-1, -2)
        return back if sign > 0 else torch.zeros_like(back)


@dataclass(frozen=True)
class Clipped:
    """Weights with their negative part cut off, kept for the next call while the weights stay as they are."""

    weight: Tensor
    cache: dict[Any, tuple[Any, Tensor]]
    key: Node

    def __call__(self, sign: int) -> Tensor:
        """Return  (sign W)^+."""
        if sign < 0:
            return self.weight.neg().clamp_(min=0)
        return self._cached("clipped", lambda: _channels_last(self.weight.clamp(min=0)))

    def turned(self) -> Tensor:
        """Return the clipped weights of a dense map as (inputs, outputs)."""
        return self._cached("turned", lambda: self.weight.clamp(min=0).transpose(-1, -2).contiguous())

    def mirrored(self, groups: int = 1) -> Tensor:
        """Return the clipped weights of a convolution with input and output channels and both axes turned round."""

        def make() -> Tensor:
            turned = self(1).flip(2, 3)
            by_group = turned.reshape(groups, -1, *turned.shape[1:])  # (groups, outputs, inputs, height, width)
            return _channels_last(by_group.transpose(1, 2).flatten(0, 1))

        return self._cached("mirrored", make)

    def _cached(self, form: str, make: Callable[[], Tensor]) -> Tensor:
        stamp = (self.weight.data_ptr(), self.weight._version)
        held = self.cache.get((self.key, form))
        if held is None or held[0] != stamp:
            held = self.cache[self.key, form] = (stamp, make())
        return held[1]


def rows_times(rows: Tensor, w: Tensor) -> Tensor:
    """Return ``rows @ w^T`` for many rows, w (outputs, inputs).

    On a CPU as a convolution with kernel 1, which takes the library that is faster for float32 on most processors.
    """
    has_library: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if rows.device.type != "cpu" or rows.dtype != torch.float32 or not has_library or rows.numel() == 0:
        return rows @ w.T
    kernel = w[:, :, None, None].contiguous(memory_format=torch.channels_last)
    out = conv2d(rows.reshape(1, -1, 1, rows.shape[1]).permute(0, 3, 1, 2), kernel, None)
    return out.permute(0, 2, 3, 1).reshape(len(rows), len(w))


def _channels_last(w: Tensor) -> Tensor:
    """Lay the weights of a two-dimensional convolution out as the walk lays out its maps."""
    return w.contiguous(memory_format=torch.channels_last if w.dim() == 4 else torch.contiguous_format)


def linear_map(
    graph: AtenGraph, values: dict[Node, Any], node: Node, pinned: frozenset[Node], cache: dict[Any, Any]
) -> LinearMap | None:
    """Return the linear map that ``node`` is (with batch norm folded in), or None when it is none."""
    at = node.args[0] if graph.folds(node, pinned) else node
    assert isinstance(at, Node)
    target, args = at.target, [values[a] if _is_size(values, a) else a for a in at.args]
    child = args[0]
    if target in CONVOLUTIONS or target in PADDED_BY_NAME:
        return _convolution(graph, values, node, at, args, pinned, cache)
    if target is aten.linear.default and graph.constant(args[1]) is not None:
        return Dense(child, Clipped(_weight(graph, node, pinned), cache, node))
    if target in TRANSPOSED and graph.constant(args[1]) is not None:
        defaults = [1, 0, 0, 1, 1]
        options = tuple(args[3:]) + tuple(defaults[len(args[3:]) :])
        return TransposedConvolution(child, Clipped(graph.constant(args[1]), cache, node), options, _rank(values, at))
    if target in (aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d.default):
        return AveragePool(child, at, args[1:], tuple(values[child].shape))
    if target in (aten.mean.dim, aten.sum.dim_IntList):
        dims = [d % values[child].dim() for d in args[1]]
        return Mean(child, dims, len(args) > 2 and bool(args[2]), tuple(values[child].shape))
    if target is aten.scaled_dot_product_attention.default and not at.kwargs.get("enable_gqa"):
        return Attention(args[2], *_attention(values, at))
    if target in (aten.matmul.default, aten.mm.default, aten.bmm.default):
        return _product(graph, values, args, node, cache)
    if target is aten.addmm.default:
        return _product(graph, values, args[1:], node, cache)
    return None


def _weight(graph: AtenGraph, node: Node, pinned: frozenset[Node]) -> Tensor:
    """Return the weights of a linear map with what folds into them: batch norm, and the signs of a layer scale."""
    weight = graph.weights(node, pinned)[0]
    turned = graph.turned_channels(node, pinned) if node.target is not BATCH_NORM else None
    return weight if turned is None else weight * turned.view(-1, *[1] * (weight.dim() - 1))


def _convolution(
    graph: AtenGraph,
    values: dict[Node, Any],
    node: Node,
    at: Node,
    args: list[Any],
    pinned: frozenset[Node],
    cache: Any,
) -> LinearMap | None:
    if graph.constant(args[1]) is None:
        return None
    w = _weight(graph, node, pinned)
    rank = w.dim() - 2
    bias_less = args[3:] if len(args) > 3 else []
    options: list[Any] = [*bias_less, *[1, 0, 1, 1][len(bias_less) :]]
    stride, padding, dilation, groups = options
    stride, dilation = _per_dim(stride, rank), _per_dim(dilation, rank)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, w.shape[2:], strict=True)]
        pad = [(t // 2, t - t // 2) for t in totals]
    else:
        pad = [(p, p) for p in _per_dim(0 if padding == "valid" else padding, rank)]
    shape = tuple(values[args[0]].shape)
    return Convolution(args[0], Clipped(w, cache, node), shape, stride, pad, dilation, int(groups))


def _product(graph: AtenGraph, values: dict[Node, Any], args: list[Any], node: Node, cache: Any) -> LinearMap | None:
    """``x @ W`` with constant ``W``, or a product of two signals of which one is a matrix of weights.

    Weights are what comes of a softmax, with whatever is done to it on the way (heads mixed, two patterns blended).
    Without any softmax (linear attention: a feature map of the queries times what keys and values add up to) the
    factor on the left is the weights. Negative weights are clipped.
    """
    left, right = args[:2]
    if right not in graph.live:
        return Dense(left, Clipped(values[right].transpose(-1, -2), cache, node))
    if left not in graph.live:
        return Attention(right, values[left].clamp(min=0), tuple(values[right].shape))
    if _of_softmax(right, graph) and not _of_softmax(left, graph):
        return AttentionFromRight(left, values[right].clamp(min=0))
    weights: Tensor = values[left]
    weights = weights if _is_softmax(left) else weights.clamp(min=0)
    return Attention(right, weights, tuple(values[right].shape))


def _is_softmax(node: Node) -> bool:
    """Whether the node is a softmax, moved at most."""
    return source(node, lambda n: n.target not in SOFTMAXES and n.target in _MOVES).target in SOFTMAXES


def _of_softmax(node: Node, graph: AtenGraph) -> bool:
    """Whether the node is made of a softmax by what is done to attention weights, before any other product."""
    todo, visited = [node], {node}
    while todo:
        n = todo.pop()
        if n.target in SOFTMAXES:
            return True
        if n.target in _MOVES or n.target in _MIXES:
            new = [m for m in n.all_input_nodes if m in graph.live and m not in visited]
            visited.update(new)
            todo.extend(new)
    return False


_MOVES = (aten.view.default, aten.reshape.default, aten.expand.default, aten.clone.default, aten._unsafe_view.default,
          aten.dropout.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default,
          aten.squeeze.dim)  # fmt: skip
_MIXES = (aten.linear.default, aten.conv2d.default, aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, BATCH_NORM,
          operator.getitem)  # fmt: skip


def _attention(values: dict[Node, Any], node: Node) -> tuple[Tensor, tuple[int, ...]]:
    """Return the weights of scaled dot product attention and the shape of its values."""
    q, k, v = (values[n] for n in node.args[:3])
    scale = node.kwargs.get("scale") or q.shape[-1] ** -0.5
    logits = q @ k.transpose(-1, -2) * scale
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    if (len(node.args) > 5 and node.args[5]) or node.kwargs.get("is_causal"):
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
    if mask is not None:
        m = values[mask]
        logits = logits.masked_fill(~m, -torch.inf) if m.dtype == torch.bool else logits + m
    return logits.softmax(-1), tuple(v.shape)


def _is_size(values: dict[Node, Any], arg: Any) -> bool:
    return isinstance(arg, Node) and arg in values and not isinstance(values[arg], (Tensor, tuple, list))


def _per_dim(value: Any, rank: int) -> list[int]:
    seq = list(value) if isinstance(value, (list, tuple)) else [value]
    return [int(v) for v in (seq * rank if len(seq) == 1 else seq)]


def _rank(values: dict[Node, Any], node: Node) -> int:
    return int(values[node.args[0]].dim()) - 2
