"""Heads that pool: logits as the mean over positions of a linear map of every position, with or without a ReLU.

    logit_c(z) = mean_p phi(<w_c, z_p> + b_c),      phi = identity or ReLU.

Most classifiers end like this behind their last map: global average pooling and a linear layer, or a 1 x 1 convolution
(and a ReLU) that is averaged. Then what concepts add to a logit along the ray  t W S,  t from 0 to 1, is known in
closed form: a position counts from where  t a_p + b_c  is positive, so it counts for a known share of the ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auditor.network.aten_graph import Node, Values, aten

_NOTHING = (aten.clone.default, aten.alias.default, aten.contiguous.default, aten.detach.default)
_RESHAPE = (aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.squeeze.dims, aten.squeeze.dim)
_RELU = (aten.relu.default,)


@dataclass(frozen=True, slots=True)
class PooledHead:
    """Weights (classes, channels), bias (classes,) and whether a ReLU comes before the mean."""

    weight: Tensor
    bias: Tensor
    has_relu: bool

    def logits(self, positions: Tensor) -> Tensor:
        """Return the logits (batch, classes) of a map given as (batch, channels, positions)."""
        if not self.has_relu:
            return positions.mean(-1) @ self.weight.T.to(positions) + self.bias.to(positions)
        return (self.weight.to(positions) @ positions + self.bias.to(positions)[:, None]).clamp_min(0).mean(-1)

    def along_the_ray(self, W: Tensor, S: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return bias (batch,), contributions (batch, concepts) and the target's logit of W S, in double precision.

        ``W`` is (channels, concepts) or one per image, (batch, channels, concepts); ``S`` (batch, concepts, positions).
        """
        w, b = self.weight.to(W)[targets].double(), self.bias.to(W)[targets].double()
        of_concept = torch.einsum("nc,nck->nk" if W.ndim == 3 else "nc,ck->nk", w, W.double())
        S = S.double()
        if not self.has_relu:
            parts = S.mean(-1) * of_concept
            return b, parts, b + parts.sum(1)
        rise = (of_concept[:, :, None] * S).sum(1)  # (batch, positions): <w_c, z_p> without the bias
        counts = _share_above_zero(rise, b[:, None])
        parts = (counts[:, None] * S).mean(-1) * of_concept
        return b.clamp_min(0), parts, (rise + b[:, None]).clamp_min(0).mean(-1)


def _share_above_zero(rise: Tensor, start: Tensor) -> Tensor:
    """Return for which share of t in [0, 1]  start + t rise  is positive."""
    start = start.expand_as(rise)
    crossing = (-start / torch.where(rise == 0, 1.0, rise)).clamp(0, 1)
    flat = (start > 0).to(rise)
    return torch.where(rise > 0, 1 - crossing, torch.where(rise < 0, crossing, flat))


def pooled_head(start: Node, steps: list[Node], values: Values, map_size: tuple[int, ...]) -> PooledHead | None:
    """Return the head that the operations after a map (channels, height, width) are; None where they are not one.

    ``steps`` are the operations above ``start`` in order, ``values`` the constants (weights) among their inputs. It is
    read off the graph only; callers compare it with the network.
    """
    chain = [n for n in steps if isinstance(n.meta.get("val"), Tensor) and n.target not in _NOTHING]
    if not _follow_each_other(start, chain) or len(map_size) != 3:
        return None
    kinds = [_kind_of(node, map_size) for node in chain]
    words = [k for k in kinds if k != "reshape"]
    if words not in (["pool", "linear"], ["linear", "pool"], ["linear", "relu", "pool"]):
        return None
    node = chain[kinds.index("linear")]
    weight, bias = values.get(node.args[1]), values.get(node.args[2]) if len(node.args) > 2 else None
    if not isinstance(weight, Tensor) or weight.flatten(1).shape[1] != map_size[0]:
        return None
    weight = weight.detach().flatten(1)
    bias = torch.zeros_like(weight[:, 0]) if not isinstance(bias, Tensor) else bias.detach()
    return PooledHead(weight, bias, "relu" in words)


def _follow_each_other(start: Node, chain: list[Node]) -> bool:
    """Whether each operation reads the one before it and no other value of the network."""
    before, passed = start, {start}
    for node in chain:
        read = [a for a in node.args if isinstance(a, type(start)) and a in passed]
        if read != [before] and not (read and _leads_to(read[0], before)):
            return False
        before = node
        passed.add(node)
    return bool(chain)


def _leads_to(node: Node, before: Node) -> bool:
    """Whether a value is the one before it, handed on by operations that do nothing."""
    while node is not before and node.target in _NOTHING:
        node = node.args[0]
    return node is before


def _kind_of(node: Node, map_size: tuple[int, ...]) -> str:
    args: tuple[Any, ...] = node.args
    if node.target in _RESHAPE:
        return "reshape"
    if node.target in _RELU:
        return "relu"
    if node.target is aten.adaptive_avg_pool2d.default and list(args[1]) == [1, 1]:
        return "pool"
    if node.target is aten.mean.dim and sorted(d % 4 for d in args[1]) == [2, 3]:
        return "pool"
    if node.target is aten.avg_pool2d.default and list(args[1]) == list(map_size[1:]):
        return "pool"
    if node.target is aten.linear.default:
        return "linear"
    if node.target is aten.conv2d.default and _is_pointwise(node):
        return "linear"
    return "other"


def _is_pointwise(node: Node) -> bool:
    """Whether a convolution looks at one position at a time, without stride, padding or groups."""
    weight = node.args[1].meta.get("val")
    given = dict(enumerate(node.args))
    stride, padding, groups = given.get(3, [1, 1]), given.get(4, [0, 0]), given.get(6, 1)
    plain = list(stride) == [1, 1] and list(padding) == [0, 0] and groups == 1
    return plain and weight is not None and tuple(weight.shape[2:]) == (1, 1)
