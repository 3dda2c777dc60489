"""How explanations move with something else: the image (noise), the model (shuffled weights), the fit (seeds)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from auditor.auditing.case import Case, noted, similarity, strengths
from auditor.auditing.images import AuditImages
from auditor.explainers.explanation import Explanation
from auditor.metrics.concept_matching import match_columns
from auditor.metrics.measure import Measure, of_items, of_value, skipped
from auditor.metrics.sequential import is_settled
from auditor.metrics.thresholds import CHANGED, STEADY, UNCHANGED
from auditor.network.shuffled_twin import shuffled, stages


def noise(case: Case) -> dict[str, Measure]:
    """Return noise_c2 and noise_similarity: how much contributions move when the image moves a little.

    The null of the similarity is that of two different images' explanations. Images are added until it is clear
    whether the similarity is above ``STEADY``.
    """
    worst, likeness = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
    rounds = case.rounds(case.effort.noise_images)
    for k, rows in enumerate(rounds):
        a, b = _moved(case, rows)
        worst, likeness = torch.cat([worst, a]), torch.cat([likeness, b])
        case.progress("moving images", k + 1, len(rounds))
        if is_settled(likeness[~likeness.isnan()], [STEADY], len(rounds)):
            break
    before = case.rows([i for rows in rounds for i in rows][: len(likeness)])[1]
    null = float(similarity(before, [*before[1:], before[0]]).nanmean()) if len(before) > 1 else None
    measures = {"noise_c2": of_items(worst, "down", seed=case.seed)}
    return measures | {"noise_similarity": _without_nan(likeness, "up", null, case.seed)}


def _moved(case: Case, rows: list[int]) -> tuple[Tensor, Tensor]:
    """Return the largest change per change of the image, and the mean similarity, of some images under noise."""
    sample, before = case.rows(rows)
    targets = [e.target.index for e in before]
    x = sample.images
    worst, likeness = torch.zeros(2, len(x), dtype=torch.float64)
    for k in range(case.effort.noise_samples):
        moved = (x + _noise(case, k, sample)).clamp(0, 1)
        after = case.explain(case.subject, ("noise", k), sample, moved, targets)
        width = 1 + max((c.index for e in (*before, *after) for c in e.concepts), default=0)
        a, b = strengths(before, width), strengths(after, width)
        step = (moved - x).flatten(1).double().norm(dim=1).clamp_min(1e-8)
        worst = torch.maximum(worst, (b - a).norm(dim=1) / step)
        likeness += similarity(before, after) / case.effort.noise_samples
    return worst, likeness


def _noise(case: Case, k: int, sample: AuditImages) -> Tensor:
    """Return noise of the effort's radius, which depends on the seed, ``k`` and the image alone."""
    parts = []
    for i in sample.index:
        generator = torch.Generator().manual_seed((case.seed * 1_000_003 + k) * 1_000_003 + i)
        d = torch.randn(sample.images.shape[1:], generator=generator)
        parts.append(d / d.square().mean().sqrt() * case.effort.radius)
    return torch.stack(parts)


def randomisation(case: Case) -> dict[str, Measure]:
    """Return the similarity with explanations of models whose upper layers, at last all, were shuffled; null 1.

    Explanations must change: a mean above 0.9 with all layers destroyed fails the measure. Images are added until it is
    clear on which side of the limits the similarity lies; the stages before the last are measured on the first round.
    """
    if case.explainer.carries_network:  # shuffling the model cannot reach it
        reason = "it reads a network of its own, fine-tuned from the model; f_cls and f_reg say how near the two are"
        return {"randomisation": skipped(reason, "down")}
    rounds = [case.rows(rows) for rows in case.rounds(case.effort.random_images)]  # explained as the model is
    todo = stages(case.subject, case.effort.random_stages)
    by_stage: dict[str, Measure] = {}
    measure = skipped("the model has no weights to randomise", "down")
    for k, layers in enumerate(todo):
        is_last = k == len(todo) - 1
        likeness = torch.zeros(0, dtype=torch.float64)
        with shuffled(case.subject, layers, case.seed) as other:
            for sample, before in rounds if is_last else rounds[:1]:
                targets = [e.target.index for e in before]
                after = case.explain(other, ("shuffled", k), sample, sample.images, targets)
                # an explanation that fell silent has changed as much as one can
                likeness = torch.cat([likeness, similarity(before, after).nan_to_num(0.0)])
                if is_settled(likeness, [CHANGED, UNCHANGED], len(rounds)):
                    break
        measure = of_items(likeness, "down", null=1.0, seed=case.seed)
        by_stage[f"randomisation/{layers[-1] or 'model'}"] = measure
        case.progress("randomising", k + 1, len(todo))
    if measure.status == "passed" and measure.value > UNCHANGED:
        reason = f"explanations stay the same (correlation {measure.value:.2f}) though all weights are shuffled"
        measure = replace(measure, status="failed", reason=reason)
    return {"randomisation": measure, **(by_stage if len(by_stage) > 1 else {})}


def basis(case: Case) -> dict[str, Measure]:
    """Return basis_stability: as measured in the fit, or by re-fitting on the audit's data when asked to.

    Concepts of two fits are matched by the correlation of their activations over the audit's images.
    """
    stability = case.explainer.metrics.get("basis_stability")
    if case.effort.refits == 0:
        if stability is not None:
            return {"basis_stability": of_value(stability, "up", n=case.explainer.config.n_refits)}
        reason = f"kind {case.explainer.kind} does not measure it in its fit; ask for re-fits with --refits 2"
        return {"basis_stability": skipped(reason, "up")}
    if case.explainer.n_concepts == 0:
        return {"basis_stability": skipped(f"kind {case.explainer.kind} has no basis to re-fit", "up")}
    sample, before = case.rows([i for rows in case.rounds(case.effort.noise_images) for i in rows])
    targets = [e.target.index for e in before]
    first = _activations(before)
    values = []
    for i in range(case.effort.refits):
        config = case.explainer.config.with_another_start(1 + i)
        again = type(case.explainer)(config).fit(case.subject, case.data, case.progress)
        refitted = replace(case, explainer=again, shared=None)
        second = _activations(refitted.explain(case.subject, "as it is", sample, sample.images, targets))
        values.append(float(match_columns(first - first.mean(0), second - second.mean(0)).cosine.mean()))
    return {"basis_stability": of_items(values, "up", seed=case.seed)}


def _activations(explanations: Sequence[Explanation]) -> Tensor:
    width = 1 + max((c.index for e in explanations for c in e.concepts), default=0)
    rows = torch.zeros(len(explanations), width, dtype=torch.float64)
    for i, e in enumerate(explanations):
        for c in e.concepts:
            rows[i, c.index] = c.activation
    return rows


def _without_nan(values: Tensor, direction: Any, null: float | None, seed: int) -> Measure:
    """Return the mean over images where the correlation exists, with a note of how many were left out."""
    defined = values[~values.isnan()]
    if not len(defined):
        return skipped("no image has an explanation with more than one concept", direction)
    n_left_out = len(values) - len(defined)
    measure = of_items(defined, direction, null=null, seed=seed)
    return noted(measure, f"{n_left_out} images explained by a single concept are left out" if n_left_out else "")
