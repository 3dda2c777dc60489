"""The layer where heatmaps of x-features stop by default.

Excitation backprop can walk on to the pixels. On photos most of the work lies there and little of the sense: mass on
single pixels follows edges and has to be smoothed before anybody sees something. [ExcitationBP]'s own code stops at a
middle layer (GoogLeNet ``pool3``, ResNet ``res4a``), where a cell is 16 pixels wide; so do we on photos. Images
of at most `SMALL` pixels a side are walked through to the pixels, as [XNN] does.
"""

from __future__ import annotations

import torch

from auditor.attribution.excitation_walk import knows_its_excitation
from auditor.errors import AuditError
from auditor.network.aten_graph import graph_of
from auditor.subject.layers import Layer
from auditor.subject.subject import Subject

PIXELS = "input"
SMALL = 64  # pixels a side up to which a walk goes to the pixels
STRIDE = 16  # pixels that a cell of the map may be wide, as where the authors stop on photos
CLOSE = 1e-4  # relative: what folding batch norm changes


def heat_layer(subject: Subject, below: str) -> str:
    """Return the deepest layer up to ``below`` with cells of at most 16 pixels; the pixels where there is none.

    All mass must pass through it, and its value in the traced graph must be the one that a pass of the model gives.
    """
    if max(subject.input_shape[1:]) <= SMALL:
        return PIXELS
    names = [layer.name for layer in subject.layers()]
    reached = subject.layers()[: names.index(below) + 1] if below in names else subject.layers()
    for layer in reversed(reached):
        if _is_fine_map(layer, subject.input_shape[1:]) and _is_in_graph(subject, layer.name):
            return layer.name
    return PIXELS


def _is_fine_map(layer: Layer, size: tuple[int, int]) -> bool:
    if not layer.explainable or layer.is_passive or layer.layout is None or layer.layout.name != "map":
        return False
    return all(cells * STRIDE >= pixels for cells, pixels in zip(layer.layout.grid, size, strict=True))


def _is_in_graph(subject: Subject, name: str) -> bool:
    """Whether the graph has the layer, with the same value and an excitation that follows from it."""
    try:
        graph = graph_of(subject)
        node = graph.layer(name)
        if not knows_its_excitation(node):
            return False
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(graph.batch or 2, *subject.input_shape, generator=generator).to(subject.device)
        with torch.no_grad():
            value = graph.run(subject.normalise(x), node, frozenset({node}))[node]
            z = subject.activations(x, [name])[name]
    except AuditError:
        return False
    scale = float(z.abs().max())
    return value.shape == z.shape and float((value.to(z) - z).abs().max()) <= CLOSE * max(scale, 1e-12)
