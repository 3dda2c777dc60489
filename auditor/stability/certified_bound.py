"""Certified bound: how much a layer can move at most when the pixels move, anywhere, proved from the weights.

The graph is walked from the pixels (in [0, 1]; the division by std is part of the map) to the layer, every operation
with its own constant (`bound_rules`); batch norm is folded, branches are added. The bound holds for the network as
a function of real numbers: a run in float32 may exceed it by its own rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from auditor.errors import AuditError
from auditor.network.aten_graph import AtenGraph, Node, graph_of
from auditor.stability.bound_rules import BoundWalk, NoBound
from auditor.stability.bound_signal import Signal
from auditor.subject.subject import Subject

ROUNDING = 1e-9  # relative, on top of what each norm allows for: sums and products of the constants themselves
_BOUNDS: WeakKeyDictionary[Subject, dict[str, tuple[Bound, Bound]]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Bound:
    """A global upper bound of  |a(x'') - a(x')| / |x'' - x'|;  None where there is none, with the ``reason``."""

    value: float | None
    reason: str = ""


def certified_bound(subject: Subject, layer: str) -> Bound:
    """Return the bound for the output of ``layer`` (``""`` for the logits); computed once while the subject lives.

    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2, bias=False))
    >>> with torch.no_grad():
    ...     _ = net[1].weight.copy_(torch.tensor([[3.0, 0, 0, 0], [0, 1, 0, 0]]))
    >>> round(certified_bound(Subject(net, input_shape=(1, 2, 2), std=0.5), "1").value, 6)
    6.0
    """
    return bounds_of(subject, layer)[0]


def bounds_of(subject: Subject, layer: str) -> tuple[Bound, Bound]:
    """Return the bounds of the layer's change and of its Jacobian's change (zeroth and first order)."""
    bounds = _BOUNDS.setdefault(subject, {})
    if layer not in bounds:
        try:
            graph = graph_of(subject)
            node = graph.layer(layer)
        except AuditError as error:
            nothing = Bound(None, f"the network's graph could not be read: {error}")
            return nothing, nothing
        bounds[layer] = bounds_at(graph, node, subject.preprocessing.std)
    return bounds[layer]


def bounds_at(graph: AtenGraph, node: Node, std: tuple[float, ...]) -> tuple[Bound, Bound]:
    """Return both bounds at a node of the graph."""
    graph = graph.on_cpu()  # float64 products, of which a GPU has few or none
    scale = 1 / torch.tensor(std, dtype=torch.float64).view(-1, *[1] * (len(graph.shape) - 1))
    signals = {graph.input: Signal(graph.shape, 1.0, 0.0, scale=scale)}
    pinned = frozenset({node})
    walk = BoundWalk(graph, pinned, signals)
    needed = graph.before(node) & graph.live
    folded = {n.args[0] for n in needed if graph.folds(n, pinned)}
    try:
        with torch.no_grad():
            for step in graph.steps:
                if step in needed and step not in folded and step not in signals:
                    signals[step] = walk.step(step)
    except NoBound as error:
        return Bound(None, str(error)), Bound(None, str(error))
    if node not in signals:  # nothing of the image arrives here
        return Bound(0.0), Bound(0.0)
    end = signals[node]
    first, second = end.first * (1 + ROUNDING), end.second * (1 + ROUNDING)
    if not math.isfinite(first):
        return Bound(None, "the bound is not finite"), Bound(None, "the bound is not finite")
    if not math.isfinite(second):
        return Bound(first), Bound(None, f"the gradient of {end.kink} jumps or has no constant that is known")
    return Bound(first), Bound(second)
