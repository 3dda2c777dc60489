"""One walk of probability mass down a graph: excitations, linear maps, and the dual of the contrastive form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from auditor.attribution.excitation_rules import (
    ACTIVATIONS,
    MAX_POOLS,
    MOVES,
    NON_NEGATIVE,
    SPLITS,
    no_rule,
    pass_down,
    safe_reciprocal,
)
from auditor.errors import LayerError
from auditor.network.aten_graph import AtenGraph, Node, call, is_getitem, is_signal
from auditor.network.linear_maps import LinearMap, linear_map

aten = torch.ops.aten
OnStep = Callable[[Node, Tensor, list[tuple[Node, Tensor]]], None]

SMALLEST = 1e-30  # of a sum of excitations; below it a parent has no excited child
POOLS = {aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default, aten.mean.dim, *MAX_POOLS}
SELECTIONS = {*MAX_POOLS, aten.pad.default, aten.constant_pad_nd.default}  # every output is an input, or holds no mass
AFFINE = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}


def lower_bound(node: Node) -> float | None:
    """Return the smallest value an activation function can give, or None for operations without a useful bound."""
    if node.target in NON_NEGATIVE:
        return 0.0
    if node.target in (aten.hardtanh.default, aten.clamp.default, aten.clamp_min.default):
        least = node.args[1] if len(node.args) > 1 else -1.0
        return float(least) if isinstance(least, (int, float)) else None
    if node.target is aten.tanh.default:
        return -1.0
    if node.target in (aten.elu.default, aten.celu.default):
        alpha = node.args[1] if len(node.args) > 1 else 1.0
        scale = node.args[2] if len(node.args) > 2 and node.target is aten.elu.default else 1.0
        return -float(alpha) * float(scale)
    if node.target is aten.selu.default:
        return -1.0507009873554805 * 1.6732632423543772
    return None


def knows_its_excitation(node: Node) -> bool:
    """Whether the excitation of ``node`` follows from its own value, without those of the nodes below it."""
    if lower_bound(node) is not None:
        return True
    return not (node.target in MOVES or node.target in POOLS or _is_part(node))


@dataclass
class Mass:
    """Mass ``r * a`` on a node, with ``a`` shared by all neurons and multiplied in as late as possible."""

    r: Tensor
    a: Tensor | None = None
    owned: bool = False  # whether r may be written into

    def full(self) -> Tensor:
        """Return the mass itself, (neurons, *shape of the node)."""
        return self.r if self.a is None else self.r * self.a

    def times(self, factor: Tensor) -> Tensor:
        """Return the mass times a factor that all neurons share."""
        factor = factor if self.a is None else factor * self.a
        return self.r.mul_(factor) if self.owned else self.r * factor

    def plus(self, other: Mass) -> Mass:
        """Add what came down another branch."""
        if self.a is other.a:
            return Mass(self.r.add_(other.r) if self.owned else self.r + other.r, self.a, owned=True)
        return Mass(self.full() + other.full(), None, owned=True)


@dataclass
class Walk:
    """A graph with the values of one forward pass, ready to let mass walk down."""

    graph: AtenGraph
    values: dict[Node, Any]
    pinned: frozenset[Node]
    floor: Tensor  # lower bound of the input, broadcastable to it
    cache: dict[Any, Any]  # clipped weights of earlier walks
    notes: dict[str, None] = field(default_factory=dict)
    on_step: OnStep | None = None  # sees the mass on a node and what each child got
    _excited: dict[Node, Tensor] = field(default_factory=dict)

    def note(self, text: str) -> None:
        """Remember that a variant was used."""
        self.notes[text] = None

    def excitation(self, node: Node) -> Tensor:
        """Activation of ``node`` made non-negative: shifted by its lower bound if it has one, else clipped at 0."""
        if node not in self._excited:
            self._excited[node] = self._excite(node)
        return self._excited[node]

    def _excite(self, node: Node) -> Tensor:
        value: Tensor = self.values[node]
        bound = lower_bound(node)
        if bound is not None:
            return value if bound == 0 else value - bound
        if self._is_preprocessing(node):
            least = self._at_floor(node)
            if bool((value >= least).all()):
                return value if not bool(least.any()) else value - least
        if node.target in MOVES or node.target in POOLS or _is_part(node):
            inputs = [n for n in node.all_input_nodes if n in self.graph.live and is_signal(n)]
            if inputs and all(self.excitation(n) is self.values[n] for n in inputs):
                return value  # what is moved is non-negative as it is
            moved: Tensor = call(node, self._excited_or_value)
            return moved
        name = "batch norm" if is_getitem(node) else str(node.target)
        self.note(f"{name}: no lower bound of its own, so negative activations are clipped at 0")
        return value.clamp(min=0)

    def _excited_or_value(self, node: Node) -> Any:
        if node.target in SPLITS:
            return call(node, self._excited_or_value)
        return self.excitation(node) if node in self.graph.live and is_signal(node) else self.values[node]

    def _is_preprocessing(self, node: Node) -> bool:
        """Whether ``node`` is the image, or (x - mean) / std of it with constants."""
        while node.target in AFFINE:
            live = [n for n in node.all_input_nodes if n in self.graph.live]
            if len(live) != 1:
                return False
            node = live[0]
        return node is self.graph.input

    def _at_floor(self, node: Node) -> Tensor:
        """Value of a preprocessing node when every pixel is at its lower bound."""
        if node is self.graph.input:
            return self.floor
        least: Tensor = call(node, lambda n: self._at_floor(n) if n in self.graph.live else self.values[n])
        return least

    def _is_residual(self, node: Node) -> bool:
        """Whether the node adds two different signals of the same shape."""
        shapes = [self.values[n].shape for n in node.all_input_nodes if n in self.graph.live]
        return len(shapes) == 2 and shapes[0] == shapes[1] and not node.kwargs.get("alpha")

    def linear(self, node: Node) -> LinearMap | None:
        """Return the linear map that ``node`` is, if it is one."""
        return linear_map(self.graph, self.values, node, self.pinned, self.cache)

    def _unexcited(self, linear: LinearMap, den: Tensor, here: Mass) -> Tensor | None:
        """Return what parents without an excited child hand to children below 0 with negative weights, None if nothing.

        Clipping at 0 leaves a parent with few children (a depthwise convolution after GELU or SiLU) alone; a negative
        weight on a negative activation excites it all the same.
        """
        child = linear.child
        if lower_bound(child) is not None or self.excitation(child) is self.values[child]:
            return None
        if not bool((den <= SMALLEST).any()):
            return None
        low = self.values[child].clamp(max=0).neg_()
        if not bool(low.any()):
            return None
        p = here.full() * (den <= SMALLEST)
        handed: Tensor = linear.gather(p * safe_reciprocal(linear.spread(low, -1)), -1) * low
        return handed

    def down(self, start: Node, p: Tensor, stop: Node, dual: Tensor | None = None) -> Tensor:
        """Walk ``p`` (neurons, *shape) from ``start`` to ``stop``; ``dual`` is subtracted with negated top weights."""
        path = between(self.graph, start, stop)
        if start not in path:
            if (barrier := _barrier(self.graph, start)) is not None:
                raise no_rule(barrier)
            raise LayerError(
                f"excitation backprop: '{start.name}' is not computed from '{stop.name}', so no mass gets there. "
                f"Stop at a layer below the start."
            )
        masses = {start: Mass(p)}
        duals = {} if dual is None else {start: dual}
        for node in reversed(self.graph.steps):
            if node is stop or node not in masses:
                continue
            for child, mass, pending in self._step(node, masses.pop(node), duals.pop(node, None)):
                if child in path:
                    masses[child] = masses[child].plus(mass) if child in masses else mass
                    if pending is not None:
                        duals[child] = duals[child] + pending if child in duals else pending
                elif child not in self.graph.live:
                    self.note("mass that ends in a constant, such as the start of a class token, comes from no pixel")
        return masses[stop].full()

    def _step(self, node: Node, here: Mass, dual: Tensor | None) -> Iterator[tuple[Node, Mass, Tensor | None]]:
        if self.on_step is not None:
            here = Mass(here.full())
        linear = self.linear(node)
        before = here.full() if self.on_step is not None else here.r
        if linear is not None:
            a = self.excitation(linear.child)
            den = linear.spread(a)
            unexcited = None if dual is not None else self._unexcited(linear, den, here)
            r = linear.gather(here.times(safe_reciprocal(den)))
            if dual is not None:  # the flip happens in the first linear map, and only there
                r = r - linear.gather(dual * safe_reciprocal(linear.spread(a, -1)), -1)
            mass = Mass(r, a, owned=True) if unexcited is None else Mass(r * a + unexcited, owned=True)
            if self.on_step is not None:
                self.on_step(node, before, [(linear.child, mass.full())])
            yield linear.child, mass, None
        elif (node.target in ACTIVATIONS or _is_first(node)) and dual is None and self.on_step is None:
            yield node.args[0], here, None
        elif node.target in SELECTIONS and dual is None and here.a is not None and here.a is self._excited.get(node):
            for child, r in pass_down(self, node, here.r):  # r reaches units that have the same excitation
                yield child, Mass(r, self.excitation(child), owned=True), None
        elif node.target is aten.add.Tensor and dual is None and self.on_step is None and self._is_residual(node):
            one, two = (self.excitation(n) for n in node.all_input_nodes)
            r = here.times(safe_reciprocal(one + two))  # p x_i / (x_1 + x_2), the x_i multiplied in later
            for child, a in zip(node.all_input_nodes, (one, two), strict=True):
                yield child, Mass(r, a), None
        else:
            children = list(pass_down(self, node, here.full()))
            duals = [None] * len(children) if dual is None else [d for _, d in pass_down(self, node, dual)]
            if self.on_step is not None:
                self.on_step(node, here.full(), children)
            for (child, share), d in zip(children, duals, strict=True):
                yield child, Mass(share), d


def between(graph: AtenGraph, start: Node, stop: Node) -> set[Node]:
    """Return the nodes on a way from ``stop`` up to ``start``."""
    above = {stop}
    for node in graph.steps:
        if node in graph.live and any(n in above for n in node.all_input_nodes):
            above.add(node)
    return above & graph.before(start)


def _barrier(graph: AtenGraph, start: Node) -> Node | None:
    """Return the first operation below ``start`` that makes of a signal what is none, such as complex numbers."""
    needed = graph.before(start)
    for node in graph.steps:
        makes_tensor = isinstance(node.meta.get("val"), Tensor) and node not in graph.live
        if makes_tensor and node in needed and any(n in graph.live for n in node.all_input_nodes):
            return node
    return None


def _is_first(node: Node) -> bool:
    """Whether the node picks the signal out of an operation that gives statistics or indices beside it."""
    return is_getitem(node) and not _is_part(node)


def _is_part(node: Node) -> bool:
    return is_getitem(node) and isinstance(node.args[0], Node) and node.args[0].target in SPLITS
