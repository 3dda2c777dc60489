"""The layer explanation heads attach to."""

from __future__ import annotations

import math

import torch

from auditor.subject.layers import Layer
from auditor.subject.subject import Subject


def head_layer(subject: Subject, name: str | None = None) -> str:
    """Return the layer a head attaches to; default: the last non-negative vector below the logits, else a map.

    A layer that hands on what another puts out (a dropout, an identity, a flatten of one position) computes nothing, so
    that layer is taken instead. A map that is flattened stays the vector it is: its head reads every position apart.
    """
    if name is not None:
        return source_of(subject, subject.layer(name).name)
    vectors = [
        item
        for item in subject.layers()[:-1]
        if item.explainable and item.layout is not None and item.layout.name == "vector" and item.shape[0] > 1
    ]
    vectors = [v for v in vectors if v.shape != (subject.n_classes,)] or vectors
    vectors = [v for v in vectors if not _is_image(subject, v.name)] or vectors
    best = [v for v in vectors if v.nonnegative] or vectors
    return source_of(subject, best[-1].name if best else subject.default_layer())


def source_of(subject: Subject, name: str) -> str:
    """Return the nearest layer up to ``name`` that computes something (all between hand its output on)."""
    items = {item.name: item for item in subject.layers()}
    if name not in items or not items[name].is_passive:
        return name
    names = list(items)
    before = [items[k] for k in names[max(0, names.index(name) - 6) : names.index(name)]]
    before = [item for item in before if item.explainable and _reads_like(item, items[name])]
    with torch.no_grad():
        x = torch.rand(1, *subject.input_shape, generator=torch.Generator().manual_seed(0))
        outputs = subject.activations(x.to(subject.device), [name, *(item.name for item in before)])
    for item in reversed(before):
        if torch.equal(outputs[item.name].flatten(1), outputs[name].flatten(1)):
            return source_of(subject, item.name)
    return name


def _is_image(subject: Subject, name: str) -> bool:
    """Whether a layer hands the image on as it is, in a row: its values are pixels and no features."""
    x = torch.rand(1, *subject.input_shape, generator=torch.Generator().manual_seed(0))
    if subject.layer(name).shape != (x.numel(),):
        return False
    with torch.no_grad():
        row = subject.activations(x, [name])[name].flatten(1)
        return torch.equal(row, subject.normalise(x).to(row).flatten(1))


def _reads_like(item: Layer, other: Layer) -> bool:
    """Whether a head that reads one may read the other instead: the same shape, or one position of as many channels."""
    return item.shape == other.shape or (not item.is_spatial and math.prod(item.shape) == math.prod(other.shape))
