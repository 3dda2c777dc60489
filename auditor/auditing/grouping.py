"""Grouping: how well images can be grouped by class from what an explanation shows alone; no people are needed.

An agent is shown batches as participants of a study are (`auditor.study`): ten images of four predicted classes. It
sees the slots' normalised contributions and nothing else (where a kind gives none, the image through its heatmap),
groups them by Ward's method into as many groups as there are classes, and purity is taken against the predictions. The
null is the purity of the same groups with the images shuffled among them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from auditor.auditing.case import Case, noted, relevance
from auditor.explainers.shown_concepts import shown_concepts
from auditor.metrics.grouping_purity import (
    drawn_batches,
    masked,
    purity,
    shuffled_purity,
    small_pictures,
    ward_groups,
)
from auditor.metrics.measure import Direction, Measure, of_items, skipped

Array = np.ndarray[Any, Any]
NAMES: Mapping[str, Direction] = {"grouping_purity": "up"}
CLASSES, PER_BATCH, BATCHES = 4, 10, 40


def grouping(case: Case) -> dict[str, Measure]:
    """Return the mean purity over batches; images may be in several batches, so the interval is of the drawing too."""
    explanations = case.explanations
    classes = [e.target.index for e in explanations]
    batches, n_classes = drawn_batches(classes, CLASSES, PER_BATCH, BATCHES, case.seed)
    if not batches:
        reason = f"fewer than two classes have {PER_BATCH // 2} of the {len(classes)} explained images"
        return {"grouping_purity": skipped(reason, "up")}
    maps = None
    if any(c.contribution is None for e in explanations for c in e.concepts):
        maps = _maps(case)
        if maps is None:
            return {"grouping_purity": skipped("its explanations give neither contributions nor heatmaps", "up")}
    rng = np.random.default_rng(case.seed)
    values, nulls = [], []
    for rows in batches:
        if maps is None:
            shown = shown_concepts([explanations[i] for i in rows], is_of_class=case.explainer.concepts_are_of_class)
            features = shown.values
        else:
            features = small_pictures(masked(case.sample.images[rows].double().numpy(force=True), maps[rows]))
        if not np.isfinite(features).all():  # of_items says how many, and the measure has failed
            values.append(math.nan)
            continue
        groups, of = ward_groups(features, n_classes), [classes[i] for i in rows]
        values.append(purity(groups, of))
        nulls.append(shuffled_purity(groups, of, rng, n=20))
    null = math.fsum(nulls) / len(nulls) if nulls else None
    measure = of_items(values, "up", null=null, seed=case.seed)
    few = "" if n_classes == CLASSES else f"batches hold {n_classes} classes: no more have enough explained images"
    return {"grouping_purity": noted(measure, few)}


def _maps(case: Case) -> Array | None:
    """Return one map per image, of zeros where an explanation has none; None where all have none."""
    size = (case.sample.images.shape[2], case.sample.images.shape[3])
    maps = [relevance(e, size) for e in case.explanations]
    if all(m is None for m in maps):
        return None
    blank = torch.zeros(size)
    return torch.stack([blank if m is None else m for m in maps]).clamp_min(0).double().numpy(force=True)
