"""Logits and one layer of pixels by the network's graph, differentiable: what a gradient costs least by.

Batch norm is folded into the convolutions before it, maps are laid out channels last, and nothing runs between the
operations. EfficientNet-Lite0 gives a gradient by its pixels in half the CPU time that its modules take, on one
thread. The graph is compared with the model when the pass is made.
"""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from auditor.errors import AuditError
from auditor.network.aten_graph import AtenGraph, graph_of, is_traced
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

CLOSE = 1e-4  # relative: what folding and other orders of float32 sums may change


class GraphPass:
    """One pass over pixels."""

    def __init__(self, subject: Subject, graph: AtenGraph, layer: str) -> None:
        self.mean_and_std = subject.normalise
        self.graph, self.node = graph, graph.layer(layer)
        self.pinned = frozenset({self.node})

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (batch, classes) and the layer's output (native shape) of pixels ``x``."""
        if x.dim() == 4 and self.graph.any_strides:
            x = x.contiguous(memory_format=torch.channels_last)
        values = self.graph.evaluate(self.mean_and_std(x), pinned=self.pinned)
        logits: Tensor = values[self.graph.output]
        return (logits[:, None] if logits.ndim == 1 else logits), values[self.node]


_MADE: WeakKeyDictionary[Subject, dict[tuple[str, object], GraphPass | None]] = WeakKeyDictionary()


def graph_pass_of(subject: Subject, layer: str) -> GraphPass | None:
    """Return the pass of a subject whose graph is traced already; None where it is not, or would give other numbers."""
    if not is_traced(subject) or subject.max_batch is not None:
        return None
    made, key = _MADE.setdefault(subject, {}), (layer, (subject.device, subject.dtype))
    if key not in made:
        try:
            made[key] = _checked(subject, layer)
        except Exception as error:  # whatever a foreign operation raises costs only speed
            log.info("gradients go by the modules: %s", " ".join(str(error).split())[:160])
            made[key] = None
    return made[key]


def _checked(subject: Subject, layer: str) -> GraphPass:
    graph = graph_of(subject)
    if graph.batch is not None:
        raise AuditError(f"the graph takes {graph.batch} images at a time")
    made = GraphPass(subject, graph, layer)
    x = torch.rand(2, *subject.input_shape, generator=torch.Generator().manual_seed(0))
    x = x.to(subject.device, subject.dtype)
    with torch.no_grad():
        logits, taken = subject.run(x, [layer])
    with torch.enable_grad():
        pixels = x.clone().requires_grad_(True)
        computed, z = made(pixels)
        torch.autograd.grad(computed.sum(), pixels)
    for ours, theirs in ((computed.detach(), logits), (z.detach(), taken[layer])):
        scale = float(theirs.abs().max().clamp_min(1e-6))
        if ours.shape != theirs.shape or not float((ours - theirs).abs().max()) <= CLOSE * max(scale, 1.0):
            raise AuditError(f"the graph does not give the model's logits and layer {layer!r}")
    return made
