"""Shown concepts: what several images' explanations show side by side, as slots H1, H2, … with normalised numbers.

Where all images are explained with the same concepts, a slot is a concept, those that count most first. Where the
concepts depend on the class that is explained (heads, or a basis, per class), a slot would give the class away or mean
something else in every image; there a slot is a rank: H1 is what counts most for its own image. Values are
contributions by the sum of their sizes,  c / sum |c| , or activations where a kind gives no contributions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from auditor.explainers.explanation import Concept, Explanation

Array = np.ndarray[Any, Any]
MOST_SLOTS = 7  # as many as the x-features that people were shown in [Khorram2020]


@dataclass(frozen=True, slots=True)
class ShownConcepts:
    """Slots of several images: ``concepts[i][s]`` is None where an image has fewer, ``values`` (images, slots)."""

    concepts: tuple[tuple[Concept | None, ...], ...]
    values: Array
    is_by_rank: bool
    has_contributions: bool
    labels: tuple[str, ...]  # of slots, where each is one concept


def shown_concepts(explanations: Sequence[Explanation], *, is_of_class: bool, most: int = MOST_SLOTS) -> ShownConcepts:
    """Return the slots of some images; ``is_of_class``: the concepts are those of the class that is explained."""
    rows = [{c.index: c for c in e.concepts} for e in explanations]
    scales = [sum(c.strength for c in e.concepts) or 1.0 for e in explanations]
    targets = {e.target.index for e in explanations}
    by_rank = is_of_class and len(targets) > 1
    chosen: list[list[Concept | None]]
    labels: tuple[str, ...] = ()
    if by_rank:
        ranked = [e.ranked()[:most] for e in explanations]
        width = max((len(r) for r in ranked), default=0)
        chosen = [[*r, *[None] * (width - len(r))] for r in ranked]
    else:
        total: dict[int, float] = {}
        for row, scale in zip(rows, scales, strict=True):
            for index, c in row.items():
                total[index] = total.get(index, 0.0) + c.strength / scale
        best = sorted(total, key=lambda k: (-total[k], k))[:most]
        chosen = [[row.get(k) for k in best] for row in rows]
        names = {c.index: c.label for row in rows for c in row.values()}
        labels = tuple(names[k] for k in best)
    has = bool(explanations) and all(c.contribution is not None for e in explanations for c in e.concepts)
    values = np.array(
        [[_value(c) / scale for c in row] for row, scale in zip(chosen, scales, strict=True)], dtype=np.float64
    ).reshape(len(explanations), len(chosen[0]) if chosen else 0)
    return ShownConcepts(tuple(tuple(row) for row in chosen), values, by_rank, has, labels)


def _value(concept: Concept | None) -> float:
    if concept is None:
        return 0.0
    return float(concept.activation if concept.contribution is None else concept.contribution)
