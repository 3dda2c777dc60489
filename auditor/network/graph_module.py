"""Some nodes of a network's graph as one module that can be exported, with the model's weights or others."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from auditor.network.aten_graph import AtenGraph, Node, Values, call


class GraphModule(nn.Module):
    """Normalised images in; the values of some nodes out, in order. Nothing else of the graph runs.

    ``weights`` replace the tensors of the same names in the model.
    """

    def __init__(self, graph: AtenGraph, outputs: Sequence[Node], weights: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self.input, self.outputs = graph.input, list(outputs)
        needed: set[Node] = set().union(*(graph.before(node) for node in self.outputs))
        self.steps = [node for node in graph.steps if node in needed]
        self.names = {node: f"constant_{i}" for i, node in enumerate(graph.constants) if node in needed}
        replaced = dict(weights or {})
        for node, name in self.names.items():
            value = replaced.get(graph.names.get(node, ""), graph.constants[node])
            self.register_buffer(name, value.detach().to(graph.constants[node]))

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the values of the output nodes."""
        values: Values = {self.input: x}
        values.update({node: getattr(self, name) for node, name in self.names.items()})
        for node in self.steps:
            values[node] = call(node, values.__getitem__)
        return [values[node] for node in self.outputs]


def weights_digest(layer: str, weights: Mapping[str, Tensor]) -> str:
    """Return what distinguishes one `LayerModule` from another: a sha256 of the layer's name and the weights."""
    digest = hashlib.sha256(layer.encode())
    for name, value in sorted(weights.items()):
        digest.update(f"|{name}|{tuple(value.shape)}|".encode())
        digest.update(value.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


class LayerModule(nn.Module):
    """Normalised images to the activation of one layer, native shape, with weights of one's own below it."""

    def __init__(self, graph: AtenGraph, layer: str, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.part = GraphModule(graph, [graph.layer(layer)], weights)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's activation."""
        (z,) = self.part(x)
        out: Tensor = z
        return out
