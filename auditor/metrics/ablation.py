"""Ablation: how much worse the model gets when one neuron's weights are set to zero, and whether the norm predicts it.

    u_i = R(row i of W = 0) - R,       faithfulness = Pearson correlation of u_i and |W_i| over the neurons of a layer

As in [Framework]. R is the mean cross-entropy; the bias stays, so an ablated neuron puts out f(b_i) everywhere. Nothing
below the layer is run again, images on which the neuron was silent anyway are left out, and in a perceptron the layers
above answer all neurons at once (`auditor.kernels.networks.ablation`). The result equals that of the plain loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from auditor.errors import DataError
from auditor.kernels.networks.ablation import losses_below_logits, losses_below_relu
from auditor.metrics.measure import N_BOOTSTRAP, Measure
from auditor.network.aten_graph import AtenGraph, Node, Values
from auditor.network.weight_layers import WeightLayer

aten = torch.ops.aten
MOST_NUMBERS = 60_000_000  # activations held at once
PASSES_ON = (aten.clone.default, aten.alias.default, aten.dropout.default, aten.detach.default)


@dataclass(frozen=True, slots=True)
class Ablation:
    """Loss increase and weight norm of the neurons that were ablated, on ``n_images`` images."""

    neurons: Tensor
    increase: Tensor
    norms: Tensor
    n_images: int

    def faithfulness(self, seed: int = 0, note: str = "") -> Measure:
        """Return the correlation with its interval over neurons; ``null`` is what chance exceeds once in 20 times."""
        n = len(self.neurons)
        chance = 1.96 / math.sqrt(n) if n else None
        u, w = self.increase.numpy(), self.norms.double().numpy()
        reason = _undefined(u, w)
        if reason:
            return Measure(math.nan, n=n, null=chance, direction="up", status="failed", reason=reason)
        rows = np.random.default_rng(seed).integers(0, n, (N_BOOTSTRAP, n))
        with np.errstate(invalid="ignore", divide="ignore"):
            drawn = _pearson(u[rows], w[rows])
        low, high = np.nanquantile(drawn, [0.025, 0.975])
        return Measure(float(_pearson(u, w)), float(low), float(high), n, chance, "up", reason=note)


def _undefined(u: np.ndarray[Any, Any], w: np.ndarray[Any, Any]) -> str:
    if len(u) < 3:
        return f"a correlation needs at least 3 neurons, got {len(u)}"
    if not (np.isfinite(u).all() and np.isfinite(w).all()):
        return "losses or weights are not finite"
    if np.ptp(w) <= 1e-6 * np.abs(w).max():
        return "all neurons have weights of the same norm, so that nothing correlates with it"
    if np.ptp(u) <= 1e-12 * max(1.0, float(np.abs(u).max())):
        return "ablating any neuron changes the loss alike, so that nothing correlates with it"
    return ""


def _pearson(u: np.ndarray[Any, Any], w: np.ndarray[Any, Any]) -> Any:
    u = u - u.mean(-1, keepdims=True)
    w = w - w.mean(-1, keepdims=True)
    return (u * w).sum(-1) / np.sqrt((u * u).sum(-1) * (w * w).sum(-1))


def ablate(graph: AtenGraph, layer: WeightLayer, x: Tensor, labels: Tensor, neurons: Tensor | None = None) -> Ablation:
    """Return what ablating each of ``neurons`` (default: all) does; ``x`` is the network's input, normalised.

    A graph whose batch is frozen takes whole batches only: images beyond the last whole one are left out.
    """
    batch = graph.batch or 1
    if len(x) < batch:
        raise DataError(f"ablation of {layer.name}: the network takes {batch} or more images, got {len(x)}; give more.")
    neurons = torch.arange(len(layer.rows)) if neurons is None else neurons
    norms = torch.linalg.vector_norm(layer.rows[neurons.to(layer.rows.device)], dim=1, dtype=torch.float64).cpu()
    pinned = frozenset(layer.nodes)
    at_once = max(1, MOST_NUMBERS // _numbers_per_image(graph)) if graph.batch is None else graph.batch
    tail = perceptron_above(graph, layer) if x.device.type == "cpu" and graph.batch is None else None
    base, total, n = 0.0, torch.zeros(len(neurons), dtype=torch.float64), 0
    for rows in torch.split(torch.arange(len(x)), at_once):
        if graph.batch is not None and len(rows) < graph.batch:
            break  # a graph with its batch frozen takes no rest
        y = labels[rows.to(labels.device)]
        with torch.no_grad():
            values = graph.run(x[rows.to(x.device)], pinned=pinned)
            base += float(_loss(values[graph.output], y))
            if tail is not None:
                total += tail.losses(values, layer, y)[neurons]
            else:
                total += _Above(graph, layer, values, pinned, y).losses(neurons)
        n += len(rows)
    return Ablation(neurons, (total - base) / n, norms, n)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(1).double(), labels.to(logits.device), reduction="sum")


def _numbers_per_image(graph: AtenGraph) -> int:
    total = 1
    for node in graph.live:
        value = node.meta.get("val")
        value = value[0] if isinstance(value, (tuple, list)) else value
        if isinstance(value, Tensor):
            total += math.prod(int(s) for s in value.shape[1:])
    return total


class _Above:
    """The part of a network above one layer, run again for each ablated neuron."""

    def __init__(
        self, graph: AtenGraph, layer: WeightLayer, values: Values, pinned: frozenset[Node], labels: Tensor
    ) -> None:
        self.graph, self.layer, self.values, self.pinned, self.labels = graph, layer, values, pinned, labels
        needed = graph.before(graph.output)
        self.folded = {n.args[0] for n in needed if graph.folds(n, pinned)}
        changed: set[Node] = set(layer.nodes)
        for node in graph.steps:
            if any(n in changed for n in node.all_input_nodes):
                changed.add(node)
        self.steps = [n for n in graph.steps if n in changed and n in needed and n not in self.folded]
        beside = {i for n in self.steps for i in self._inputs(n)} - changed
        self.beside = [n for n in beside if n in graph.live]
        self.sizes = [n for n in graph.steps if n not in graph.live and n in needed]
        self.base = F.cross_entropy(
            values[graph.output].flatten(1).double(), labels.to(values[graph.output].device), reduction="none"
        )
        self.can_select = graph.batch is None and all(
            len(t) == len(labels) for n in [*self.beside, *layer.nodes] for t in _tensors(values[n])
        )

    def _inputs(self, node: Node) -> list[Node]:
        return node.args[0].all_input_nodes if self.graph.folds(node, self.pinned) else node.all_input_nodes

    def losses(self, neurons: Tensor) -> Tensor:
        """Return the summed loss with each neuron ablated."""
        return torch.tensor([self._loss_without(int(i)) for i in neurons], dtype=torch.float64)

    def _loss_without(self, i: int) -> float:
        rows = self._touched(i)
        if rows is not None and not len(rows):
            return float(self.base.sum())
        values, labels = self._selected(rows), self.labels if rows is None else self.labels[rows.to(self.labels.device)]
        new: dict[Node, Any] = {}

        def value_of(node: Node) -> Any:
            return new[node] if node in new else values[node]

        view = _View(new, values)
        for node in self.steps:
            if node in self.layer.nodes:
                again = any(n in new for n in node.all_input_nodes)  # used twice, the second time above the first
                z = self.graph.compute(node, view, self.pinned) if again else value_of(node)
                new[node] = self._ablated(z, i)
            else:
                new[node] = self.graph.compute(node, view, self.pinned)
        loss = float(_loss(value_of(self.graph.output), labels))
        return loss if rows is None else loss + float(self.base.sum() - self.base[rows].sum())

    def _ablated(self, z: Tensor, i: int) -> Tensor:
        z = z.clone()
        dim = self.layer.channel_dim
        z.select(dim, i).fill_(float(self.layer.bias[i]) if self.layer.bias is not None else 0.0)
        return z

    def _touched(self, i: int) -> Tensor | None:
        """Return the images on which the ablation changes anything, or None when all are to be run."""
        if not self.can_select or len(self.layer.nodes) > 1:
            return None
        (node,) = self.layer.nodes
        z = self.values[node].select(self.layer.channel_dim, i)
        b = self.layer.bias[i] if self.layer.bias is not None else z.new_zeros(())
        if len(node.users) == 1 and next(iter(node.users)).target is aten.relu.default:
            z, b = z.relu(), b.relu()
        rows = (z.flatten(1) if z.dim() > 1 else z[:, None]).ne(b).any(1).nonzero()[:, 0]
        return None if len(rows) == len(z) else rows

    def _selected(self, rows: Tensor | None) -> Values:
        """Return the values with only these images; sizes are taken again."""
        if rows is None:
            return self.values
        chosen: Values = dict(self.graph.constants)
        for node in [self.graph.input, *self.beside, *self.layer.nodes]:
            if node in self.values:
                v = self.values[node]
                chosen[node] = type(v)(t[rows] for t in v) if isinstance(v, (tuple, list)) else v[rows]
        for node in self.sizes:
            inputs = [n for n in node.all_input_nodes if n not in chosen]
            for n in inputs:
                chosen[n] = self.values[n][rows] if isinstance(self.values.get(n), Tensor) else self.values.get(n)
            chosen[node] = self.graph.compute(node, chosen, self.pinned)
        return chosen


class _View(dict[Node, Any]):
    """New values where there are some, else the old ones."""

    def __init__(self, new: dict[Node, Any], old: Values) -> None:
        super().__init__()
        self.new, self.old = new, old

    def __getitem__(self, node: Node) -> Any:
        return self.new[node] if node in self.new else self.old[node]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for t in value if isinstance(t, Tensor) and t.numel()] if isinstance(value, (tuple, list)) else []


@dataclass(frozen=True, slots=True)
class PerceptronAbove:
    """One or two linear layers above a ReLU layer, up to the logits."""

    activation: Node
    maps: list[tuple[Node, Tensor]]  # each with its weights

    def losses(self, values: Values, layer: WeightLayer, labels: Tensor) -> Tensor:
        """Return the summed loss with each neuron of the layer ablated."""
        a = values[self.activation]
        silent = layer.bias.relu() if layer.bias is not None else a.new_zeros(a.shape[1])
        d = silent - a
        top, v = self.maps[-1]
        if len(self.maps) == 1:
            return losses_below_logits(d, v, values[top], labels)
        hidden, w = self.maps[0]
        return losses_below_relu(d, w, values[hidden], v, values[top], labels)


def perceptron_above(graph: AtenGraph, layer: WeightLayer) -> PerceptronAbove | None:
    """Return the perceptron above a layer when that is all there is: ReLU, linear, and perhaps both once more."""
    if len(layer.nodes) != 1 or layer.kind != "linear" or len(layer.nodes[0].meta["val"].shape) != 2:
        return None
    node, activation = layer.nodes[0], None
    maps: list[tuple[Node, Tensor]] = []
    while node is not graph.output:
        if len(node.users) != 1 or len(maps) > 2:
            return None
        node = next(iter(node.users))
        while node.target in PASSES_ON and len(node.users) == 1 and node is not graph.output:
            node = next(iter(node.users))
        if node.target is not aten.relu.default or node is graph.output or len(node.users) != 1:
            return None
        activation = activation or node
        node = next(iter(node.users))
        while node.target in PASSES_ON and len(node.users) == 1 and node is not graph.output:
            node = next(iter(node.users))
        w = graph.constant(node.args[1]) if node.target is aten.linear.default else None
        if not isinstance(w, Tensor) or w.dtype not in (torch.float32, torch.float64):
            return None
        maps.append((node, w))
    return PerceptronAbove(activation, maps) if activation is not None and len(maps) in (1, 2) else None


def multiplications_above(graph: AtenGraph, layers: list[WeightLayer], layer: WeightLayer) -> int:
    """Return the multiplications of one image in the weight layers above ``layer``."""
    above: set[Node] = set(layer.nodes)
    for node in graph.steps:
        if any(n in above for n in node.all_input_nodes):
            above.add(node)
    own_nodes = set(layer.nodes)
    total = 0
    for other in layers:
        for node in other.nodes:
            if node in above and node not in own_nodes:
                total += math.prod(int(s) for s in node.meta["val"].shape[1:]) * other.rows.shape[1]
    return total
