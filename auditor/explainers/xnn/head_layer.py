"""The layer explanation heads attach to."""

from __future__ import annotations

import torch

from auditor.subject.layer_calls import locate
from auditor.subject.subject import Subject


def head_layer(subject: Subject, name: str | None = None) -> str:
    """Return the layer a head attaches to; default: the last non-negative vector below the logits, else a map.

    A dropout gives the very output of the layer before it and is nothing in the graph, so that layer is taken instead.
    """
    if name is not None:
        return source_of(subject, subject.layer(name).name)
    vectors = [
        item
        for item in subject.layers()[:-1]
        if item.explainable and item.layout is not None and item.layout.name == "vector" and item.shape[0] > 1
    ]
    vectors = [v for v in vectors if v.shape != (subject.n_classes,)] or vectors
    best = [v for v in vectors if v.nonnegative] or vectors
    return source_of(subject, best[-1].name if best else subject.default_layer())


def source_of(subject: Subject, name: str) -> str:
    """Return the nearest layer up to ``name`` that has an operation in eval mode (all between hand its output on)."""
    if not isinstance(_module_of(subject, name), (torch.nn.Identity, torch.nn.modules.dropout._DropoutNd)):
        return name
    items = subject.layers()
    at = [item.name for item in items].index(name)
    with torch.no_grad():
        x = torch.rand(1, *subject.input_shape, generator=torch.Generator().manual_seed(0))
        outputs = subject.activations(x, [name, *(i.name for i in items[max(0, at - 6) : at] if i.explainable)])
    for item in reversed(items[max(0, at - 6) : at]):
        if item.explainable and torch.equal(outputs[item.name].flatten(1), outputs[name].flatten(1)):
            return source_of(subject, item.name)
    return name


def _module_of(subject: Subject, name: str) -> torch.nn.Module:
    return locate(subject.module, name)[0]
