"""The graph of a subject's module, traced once while the subject lives."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from auditor.network.aten_graph import AtenGraph
from auditor.subject.subject import Subject

_GRAPHS: WeakKeyDictionary[Subject, AtenGraph] = WeakKeyDictionary()


def graph_of(subject: Subject) -> AtenGraph:
    """Return the graph of a subject's module, traced once while the subject lives."""
    if subject not in _GRAPHS:
        with subject.at_rest():
            example = subject.normalise(torch.full((subject.max_batch or 2, *subject.input_shape), 0.5))
            _GRAPHS[subject] = AtenGraph.trace(subject.module, example)
    return _GRAPHS[subject]
