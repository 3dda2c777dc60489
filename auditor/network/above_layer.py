"""The part of a network above one layer, run alone.

``Subject.forward_from`` runs the whole network and swaps the layer's output on the way, which is right for any module
and costs a pass below the layer. Where the network's graph can be traced, the operations above the layer run by
themselves. The part is checked against ``forward_from`` when it is made; where it cannot be made only speed is lost.

Where it is affine in the layer's output (pooling and a linear head) its gradient is one map per class for all
images, and contributions need no integration at all.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from auditor.errors import AuditError
from auditor.network.aten_graph import AtenGraph, Node, Values, call, graph_of
from auditor.network.pooled_head import PooledHead, pooled_head
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

N_TRIALS = 3
CLOSE = 1e-4  # relative: what folding and other orders of float32 sums may change


class AboveLayer:
    """Logits as a function of one layer's output (native shape, any batch), differentiable."""

    def __init__(self, graph: AtenGraph, layer: str, n_classes: int) -> None:
        self.graph, self.layer, self.n_classes = graph, layer, n_classes
        self.start: Node = graph.layer(layer)
        needed = graph.before(graph.output)
        above: set[Node] = {self.start}
        steps = []
        for node in graph.steps:
            if node is self.start or node not in needed:
                continue
            depends = any(n in above for n in node.all_input_nodes)
            if depends:
                above.add(node)
            if depends or self._is_shape(node, graph):
                steps.append(node)
        self.steps = _only_needed(steps, graph.output)
        self.is_affine = False
        self.head: PooledHead | None = None  # where the whole part is pooling and a linear map
        self._zero: Tensor | None = None
        self._slopes: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    @staticmethod
    def _is_shape(node: Node, graph: AtenGraph) -> bool:
        """Whether a node off the path is a constant or reads only the batch size; its inputs can be had anywhere."""
        return not isinstance(node.meta.get("val"), Tensor) or node not in graph.live

    def __call__(self, z: Tensor) -> Tensor:
        """Return the logits (batch, classes) when the layer puts out ``z``."""
        image = torch.empty(len(z), *self.graph.shape, device="meta")  # only its shape is ever asked for
        values: Values = {self.graph.input: image, **self.graph.constants, self.start: z}
        for node in self.steps:
            values[node] = call(node, values.__getitem__)
        out: Tensor = values[self.graph.output]
        return out[:, None] if out.ndim == 1 else out

    def at_zero(self, like: Tensor) -> Tensor:
        """Return the logits (1, classes) of an empty layer, computed once."""
        if self._zero is None:
            with torch.no_grad():
                self._zero = self(torch.zeros_like(like[:1]))
        return self._zero

    def slopes(self, targets: list[int], like: Tensor) -> Tensor:
        """Return the gradients of logits by the layer, (targets, …): the same everywhere when the part is affine.

        Those not known yet come from one pass for all of them.
        """
        missing = [k for k in dict.fromkeys(targets) if k not in self._slopes]
        fresh: dict[int, Tensor] = {}
        if missing:
            with torch.enable_grad():
                z = torch.zeros_like(like[:1]).repeat(len(missing), *[1] * (like.ndim - 1)).requires_grad_(True)
                index = torch.tensor(missing, device=like.device)[:, None]
                (gradients,) = torch.autograd.grad(self(z).gather(1, index).sum(), z)
            fresh = dict(zip(missing, gradients, strict=True))
            with self._lock:
                if len(self._slopes) < 4096:
                    self._slopes.update(fresh)
        return torch.stack([fresh[k] if k in fresh else self._slopes[k] for k in targets])


_PREPARED: WeakKeyDictionary[Subject, dict[str, AboveLayer | None]] = WeakKeyDictionary()


def prepare_above_layer(subject: Subject, layer: str) -> AboveLayer | None:
    """Make the part above a layer once, for all contributions of this subject; None where it cannot be made."""
    prepared = _PREPARED.setdefault(subject, {})
    if layer not in prepared:
        try:
            prepared[layer] = _checked(subject, layer)
        except Exception as error:  # whatever export or a foreign operation raises costs only speed
            log.info("the part above layer %s cannot run alone: %s", layer, " ".join(str(error).split())[:160])
            prepared[layer] = None
    return prepared[layer]


def above_layer_of(subject: Subject, layer: str) -> AboveLayer | None:
    """Return the part above a layer if it was prepared."""
    return _PREPARED.get(subject, {}).get(layer)


def values_from(subject: Subject, layer: str) -> Callable[[Tensor], Tensor]:
    """Return the fastest function there is from the layer's output to the logits."""
    above = above_layer_of(subject, layer)
    return above if above is not None else lambda z: subject.forward_from(layer, z)


def _checked(subject: Subject, layer: str) -> AboveLayer | None:
    if subject.max_batch is not None:
        return None  # a frozen batch: the graph cannot take another
    graph = graph_of(subject)
    if graph.batch is not None:
        return None
    above = AboveLayer(graph, layer, subject.n_classes)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(N_TRIALS, *subject.input_shape, generator=generator).to(subject.device, subject.dtype)
    with torch.no_grad():
        z = subject.activations(x, [layer])[layer]
        points = torch.cat([z, 2 * z.flip(0), torch.zeros_like(z[:1]), -z[:1]])
        computed, expected = above(points), subject.forward_from(layer, points)
        scale = float(expected.abs().max().clamp_min(1.0))
        if computed.shape != expected.shape or float((computed - expected).abs().max()) > CLOSE * scale:
            raise AuditError(f"the graph above {layer!r} does not give the model's logits")
        above.is_affine = is_affine(above, z, scale)
        head = pooled_head(above.start, above.steps, graph.constants, tuple(z.shape[1:]))
        if head is not None and head.weight.shape[0] == expected.shape[1]:
            gap = float((head.logits(points.flatten(2)) - expected).abs().max())
            above.head = head if gap <= CLOSE * scale else None
    return above


def is_affine(logits_of: Callable[[Tensor], Tensor], z: Tensor, scale: float | None = None) -> bool:
    """Whether logits are affine in the layer, tried between, beyond and below two activations ``z``.

    >>> is_affine(lambda z: 2 * z + 1, torch.ones(2, 3).cumsum(0)), is_affine(torch.square, torch.ones(2, 3).cumsum(0))
    (True, False)
    """
    with torch.no_grad():
        zero, ends = torch.zeros_like(z[:1]), torch.cat([z[:1], z[-1:]])
        points = torch.cat([z[:1] * 0.25 + z[-1:] * 0.75, ends, zero, 3 * ends])
        between, first, last, bottom, *far = logits_of(points)
        scale = scale or float(torch.stack([first, last, bottom]).abs().max().clamp_min(1.0))
        mixed = between - (first * 0.25 + last * 0.75)
        tripled = torch.stack(far) - 3 * torch.stack([first, last]) + 2 * bottom
    return max(float(mixed.abs().max()), float(tripled.abs().max()) / 3) <= CLOSE * scale


def _only_needed(steps: list[Node], output: Node) -> list[Node]:
    """Return the steps that the output is computed from."""
    candidates, needed = set(steps), {output}
    for node in reversed(steps):
        if node in needed:
            needed.update(n for n in node.all_input_nodes if n in candidates)
    return [node for node in steps if node in needed]
