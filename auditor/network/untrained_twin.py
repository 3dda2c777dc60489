"""Null model: the same network with weights that were never trained.

A number of a trained model means something when it differs from that of its null model. Weights are drawn from torch's
own initialisation (uniform within 1/sqrt(inputs) of zero, biases too), normalisation layers are the identity.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from auditor.network.aten_graph import BATCH_NORM, AtenGraph, Node
from auditor.subject.subject import Subject

Swapped = Mapping[int, Tensor]  # new values by the address of the old ones


@contextmanager
def untrained(subject: Subject, seed: int = 0) -> Iterator[Swapped]:
    """Give the subject's module random weights for a while; its own weights are restored at the end.

    The module is not copied: one that came out of a pt2 file cannot be.
    """
    generator = torch.Generator().manual_seed(seed)
    _ = subject.digest  # taken of the true weights, should anybody ask for it meanwhile
    with subject.at_rest():
        held = [*subject.module.named_parameters(), *subject.module.named_buffers()]
        width = {name.rpartition(".")[0]: _inputs(p) for name, p in held if p.dim() > 1}
        originals: list[tuple[Tensor, Tensor]] = []
        new: dict[int, Tensor] = {}
        try:
            for name, p in held:
                value = _drawn(name, p, width, generator)
                if value is not None:
                    originals.append((p, p.data))
                    new[p.data_ptr()] = value
                    p.data = value
            yield new
        finally:
            for p, old in originals:
                p.data = old


def untrained_graph(graph: AtenGraph, new: Swapped) -> AtenGraph:
    """Return the graph with the weights of `untrained`; what is not among them becomes that of a fresh layer."""
    generator = torch.Generator().manual_seed(0)
    units: set[Node] = set()  # slopes and variances of batch norm
    for node in graph.steps:
        if node.target is BATCH_NORM:
            units |= {n for n in (node.args[1], node.args[4]) if isinstance(n, Node)}
    constants: dict[Node, Tensor] = {}
    for node, old in graph.constants.items():
        if old.data_ptr() in new and new[old.data_ptr()].shape == old.shape:
            constants[node] = new[old.data_ptr()]
        elif node in units:
            constants[node] = torch.ones_like(old)
        elif old.dim() > 1 and old.is_floating_point():
            constants[node] = _uniform(old, _inputs(old), generator)
        else:
            constants[node] = old
    return dataclasses.replace(graph, constants=constants, clipped={}, _folded={})


def _drawn(name: str, p: Tensor, width: dict[str, int], generator: torch.Generator) -> Tensor | None:
    owner, _, last = name.rpartition(".")
    if not p.is_floating_point():
        return None
    if last == "running_mean":
        return torch.zeros_like(p)
    if last == "running_var":
        return torch.ones_like(p)
    if not isinstance(p, torch.nn.Parameter):
        return None  # constants of the architecture
    if p.dim() > 1 or owner in width:
        return _uniform(p, width[owner], generator)
    return torch.full_like(p, 1.0 if "weight" in last else 0.0)


def _uniform(like: Tensor, inputs: int, generator: torch.Generator) -> Tensor:
    return ((torch.rand(like.shape, generator=generator) * 2 - 1) / math.sqrt(inputs)).to(like)


def _inputs(p: Tensor) -> int:
    return max(1, math.prod(p.shape[1:]))
