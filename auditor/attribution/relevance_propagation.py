"""Layer-wise relevance propagation on the graph of any model: LRP-alpha-beta [LRP] and deep Taylor [DeepTaylor].

A logit is handed down layer by layer until it lies on the pixels. Through a linear map  z_j = sum_i x_i w_ij,  with
z_ij = x_i w_ij  split into its positive and negative parts:

    LRP-alpha-beta   R_i = sum_j (alpha z_ij^+ / sum_i z_ij^+  -  beta z_ij^- / sum_i z_ij^-) R_j,     alpha - beta = 1
    deep Taylor      R_i = sum_j z_ij^+ / sum_i z_ij^+ R_j                       (the z+ rule: alpha 1, beta 0), and at
                     the pixels, which lie in a box [l, h],  z_ij = x_i w_ij - l_i w_ij^+ - h_i w_ij^-    (the z^B rule)

Max pools, sums, norms and gates are as in excitation backprop (`auditor.attribution.excitation_rules`). Departures, on
purpose: biases get nothing, and a unit all of whose parts have one sign hands all of its relevance to them. So what
arrives is what was handed down: a map adds up to the logit. Only the relevance of a unit without any input that counts
is lost: in deep Taylor that of a unit that fires by its bias alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from auditor.attribution.excitation_rules import ACTIVATIONS, NORMS, safe_reciprocal
from auditor.attribution.excitation_walk import SMALLEST, Mass, Walk
from auditor.errors import LayerError
from auditor.network.aten_graph import BATCH_NORM, AtenGraph, Node, call, graph_of
from auditor.network.linear_maps import LinearMap
from auditor.subject.subject import Subject

aten = torch.ops.aten
AT_ONCE = 4  # images in one walk: it holds the relevance of every layer beside its value
RECTIFIERS = {aten.relu.default, aten.relu6.default, aten.dropout.default}


@dataclass
class AlphaBetaWalk(Walk):
    """A walk of relevance with both signs; ``Walk`` itself is the case of alpha 1, beta 0 on excitations."""

    alpha: float = 2.0

    def _step(self, node: Node, here: Mass, dual: Tensor | None) -> Iterator[tuple[Node, Mass, Tensor | None]]:
        linear = self.linear(node)
        if linear is None:
            yield from super()._step(node, here, dual)
        else:
            yield linear.child, Mass(self._shared(linear, here.full()), owned=True), None

    def _shared(self, linear: LinearMap, r: Tensor) -> Tensor:
        x: Tensor = self.values[linear.child]
        up, low = x.clamp(min=0), x.clamp(max=0).neg()
        has_low = bool(low.any())
        z = linear.spread(up) + (linear.spread(low, -1) if has_low else 0.0)
        n = linear.spread(up, -1) + (linear.spread(low) if has_low else 0.0)
        alpha = torch.where(n > SMALLEST, self.alpha, 1.0)
        beta = torch.where(z > SMALLEST, self.alpha - 1, -1.0)
        q, qn = r * (alpha * safe_reciprocal(z)), r * (beta * safe_reciprocal(n))
        shared = up * (linear.gather(q) - linear.gather(qn, -1))
        return shared + low * (linear.gather(q, -1) - linear.gather(qn)) if has_low else shared


@dataclass
class DeepTaylorWalk(Walk):
    """The walk of excitation backprop, but for the pixels: these lie between ``floor`` and ``ceiling``."""

    ceiling: Tensor = field(default_factory=lambda: torch.ones(()))

    def _step(self, node: Node, here: Mass, dual: Tensor | None) -> Iterator[tuple[Node, Mass, Tensor | None]]:
        linear = self.linear(node)
        if linear is None or not self._is_preprocessing(linear.child):
            yield from super()._step(node, here, dual)
            return
        x = self.values[linear.child]
        up, low = x - self._when_all(linear.child, self.floor), self._when_all(linear.child, self.ceiling.to(x)) - x
        z = linear.spread(up.expand_as(x)) + linear.spread(low.expand_as(x), -1)
        q = here.full() * safe_reciprocal(z)
        yield linear.child, Mass(up * linear.gather(q) + low * linear.gather(q, -1), owned=True), None

    def _when_all(self, node: Node, pixel: Tensor) -> Tensor:
        """Return a preprocessing node's value where every pixel has the same value."""
        if node is self.graph.input:
            return pixel
        value: Tensor = call(node, lambda n: self._when_all(n, pixel) if n in self.graph.live else self.values[n])
        return value


def lrp(subject: Subject, x: Tensor, targets: Tensor, alpha: float = 2.0) -> Tensor:
    """Return LRP-alpha-beta of pixels (batch, C, H, W), signed; it adds up to the target's logit."""
    return _propagated(subject, x, targets, partial(AlphaBetaWalk, alpha=alpha), signed=True)


def deep_taylor(subject: Subject, x: Tensor, targets: Tensor) -> Tensor:
    """Return the deep Taylor decomposition (batch, C, H, W), none below 0; it adds up to the target's logit.

    It is defined for networks of ReLU. Where the logit is not positive there is nothing to decompose: the map is 0.
    """
    check_rectified(graph_of(subject))
    pre = subject.preprocessing
    highest = [(1 - m) / s for m, s in zip(pre.mean, pre.std, strict=True)]
    ceiling = torch.tensor(highest, dtype=torch.float64).view(1, -1, 1, 1)
    return _propagated(subject, x, targets, partial(DeepTaylorWalk, ceiling=ceiling), signed=False)


def check_rectified(graph: AtenGraph) -> None:
    """Raise one sentence where the graph has an activation other than ReLU, or norms that fold into nothing."""
    for node in graph.steps:
        if node not in graph.live:
            continue
        smooth = node.target in ACTIVATIONS and node.target not in RECTIFIERS
        if smooth or node.target in NORMS or (node.target is BATCH_NORM and not graph.folds(node)):
            layer = max(node.meta.get("layers", ()), key=len, default="") or node.name
            raise LayerError(
                f"deep Taylor: it is defined for networks of ReLU, and layer {layer!r} has {node.target}; take LRP or "
                "another map."
            )


def _propagated(subject: Subject, x: Tensor, targets: Tensor, make: Callable[..., Walk], *, signed: bool) -> Tensor:
    graph, pre = graph_of(subject), subject.preprocessing
    lowest = [-m / s for m, s in zip(pre.mean, pre.std, strict=True)]
    floor = torch.tensor(lowest, dtype=torch.float64).view(1, -1, 1, 1)
    step, parts = graph.batch or AT_ONCE, []
    with torch.no_grad(), subject.at_rest():
        for i in range(0, len(x), step):
            some = x[i : i + step]
            n = len(some)
            z = subject.normalise(some)
            if graph.batch and n < graph.batch:  # a graph with a fixed batch takes no fewer
                z = torch.cat([z, z[-1:].expand(graph.batch - n, *z.shape[1:])])
            pinned = frozenset({graph.output, graph.input})
            values = graph.run(z, graph.output, pinned)
            walk = make(graph, values, pinned, floor.to(z), graph.clipped)
            logits: Tensor = values[graph.output]
            rows = torch.arange(len(z), device=z.device)
            chosen = targets[i : i + step].to(z.device)
            chosen = torch.cat([chosen, chosen[-1:].expand(len(z) - n)])
            start = torch.zeros_like(logits)
            value = logits[rows, chosen]
            start[rows, chosen] = value if signed else value.clamp(min=0)
            parts.append(walk.down(graph.output, start[None], graph.input)[0, :n].cpu())
    return torch.cat(parts)
