"""Weight layers: every linear map with weights of its own in a network, as a matrix with one row per neuron.

They are found in the graph, not by the class of a module, so that attention projections, functional calls and models
that came back from a pt2 file are there too. Weights used twice are one layer with two places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from auditor.network.aten_graph import CONVOLUTIONS, AtenGraph, Node
from auditor.network.linear_maps import PADDED_BY_NAME, TRANSPOSED

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.matmul.default, aten.bmm.default)


@dataclass(frozen=True, slots=True)
class WeightLayer:
    """One layer: ``rows`` (neurons, inputs) and ``bias`` (neurons,) or None; ``nodes`` are the places it is used at."""

    name: str
    kind: str  # linear, conv, conv_transpose
    rows: Tensor
    bias: Tensor | None
    nodes: tuple[Node, ...]

    @property
    def channel_dim(self) -> int:
        """Which dimension of the output holds the neurons."""
        return -1 if self.kind == "linear" else 1


def weight_layers(graph: AtenGraph) -> list[WeightLayer]:
    """Return the weight layers in order of execution.

    >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 3))
    >>> [(x.name, x.kind, tuple(x.rows.shape)) for x in weight_layers(AtenGraph.trace(net, torch.zeros(2, 1, 4, 4)))]
    [('0', 'conv', (4, 9)), ('2', 'linear', (3, 16))]
    """
    layers: dict[Node, WeightLayer] = {}
    used: dict[str, int] = {}
    for node in graph.steps:
        read = _read(graph, node)
        if read is None:
            continue
        key, kind, rows, bias = read
        if key in layers:
            old = layers[key]
            layers[key] = WeightLayer(old.name, old.kind, old.rows, old.bias, (*old.nodes, node))
            continue
        name = next((n for n in reversed(node.meta["layers"]) if n), node.name)
        used[name] = used.get(name, 0) + 1
        if used[name] > 1:  # attention keeps two projections under one name
            name = f"{name}:{used[name]}"
        layers[key] = WeightLayer(name, kind, rows, bias, (node,))
    return list(layers.values())


def _read(graph: AtenGraph, node: Node) -> tuple[Node, str, Tensor, Tensor | None] | None:
    """Return the weight's node, kind, rows and bias of a linear map with constant weights."""
    target, args = node.target, list(node.args)
    if node not in graph.live:
        return None
    if target is aten.addmm.default and not node.kwargs:
        target, args = aten.mm.default, [args[1], args[2], args[0]]
    if target in (aten.linear.default, *PRODUCTS, *CONVOLUTIONS, *PADDED_BY_NAME, *TRANSPOSED):
        if args[0] not in graph.live:
            return None
        w = graph.constant(args[1])
        bias = graph.constant(args[2]) if len(args) > 2 and args[2] is not None else None
        if w is None or (target in PRODUCTS and w.dim() != 2):
            return None
        key = _origin(args[1])
        if target is aten.linear.default:
            return key, "linear", w, bias
        if target in PRODUCTS:
            return key, "linear", w.T, bias
        if target in TRANSPOSED:
            groups = int(args[6]) if len(args) > 6 else 1
            grouped = w.reshape(groups, w.shape[0] // groups, *w.shape[1:]).transpose(1, 2)
            return key, "conv_transpose", grouped.flatten(0, 1).flatten(1), bias
        return key, "conv", w.flatten(1), bias
    return None


def _origin(node: Node) -> Node:
    """Follow transposes and views of a weight back to its parameter, so that tied weights are known as such."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node
