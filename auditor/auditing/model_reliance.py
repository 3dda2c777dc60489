"""Reliance in an audit: what each class hangs on, by plain heat and by that of every attached explainer with maps.

The verdict is that of plain heat, on which the judgement is calibrated. An explainer's heat is asked as well
(`auditor.auditing.second_opinions`): where it comes to another verdict, that is said, and a class that only an
explainer accuses is one to look at. All of it stays within 60 forward passes per image.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from auditor.auditing.annotated_heat import HeatOnParts
from auditor.auditing.images import Answers
from auditor.auditing.performance import MAX_CLASSES, two_sided
from auditor.auditing.second_opinions import PASSES, Opinions, Passes, involved, second_opinions
from auditor.data.sampling import Sample, stratified
from auditor.data.source import Data
from auditor.errors import AuditError
from auditor.explainers.base import Explainer
from auditor.metrics.measure import Measure, bootstrap, of_value, skipped
from auditor.metrics.names import plain
from auditor.progress import Progress, silent
from auditor.reliance import Finding, Reliance, RelianceConfig, judge, measure, metrics_of, read_regions
from auditor.reliance.measures import MIN_IMAGES, ClassReliance
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
PREFIX = "model/reliance"
PER_CLASS = 30  # images of a class at most
MIN_SIDE = 16  # pixels: below it the deciding 3% of an image are a handful of pixels


@dataclass(frozen=True, eq=False)
class ClassImages:
    """The images on which reliance is measured: pixels, labels (None: not known), their rows of the data and names."""

    images: Tensor
    labels: Tensor | None
    rows: list[int]
    ids: list[str]
    words: str
    drawn: frozenset[int] = frozenset()  # classes that have images enough and are among these
    not_drawn: frozenset[int] = frozenset()  # the same, and not among these


def reliance(
    subject: Subject,
    data: Data,
    model_answers: Answers,
    explainers: Mapping[str, Explainer],
    *,
    n_images: int = 400,
    seed: int = 0,
    batch_size: int = 64,
    regions: Path | None = None,
    progress: Progress = silent,
) -> tuple[dict[str, Measure], dict[str, Any]]:
    """Return the metrics ``model/reliance/…`` and what the audit keeps of the findings, ready for JSON."""
    reason = why_not(model_answers, subject.input_shape)
    if reason:
        return not_measured(reason)
    chosen = class_images(subject, data, model_answers, n_images, seed, batch_size)
    masks = None
    if regions is not None:
        masks = read_regions(regions, model_answers.ids, subject.preprocessing, data.image_size, chosen.ids)
    try:
        config = RelianceConfig(seed=seed, images_per_class=PER_CLASS)
        reference = _with_reasons(measure(subject, chosen.images, chosen.labels, config, progress=progress), chosen)
        findings = judge(reference, subject.class_names)
    except AuditError as error:
        return not_measured(" ".join(str(error).split()).rstrip("."))
    if all(f.verdict == "skipped" for f in findings):
        return not_measured("no class has enough images: " + findings[0].sentence.rstrip("."))
    passes = Passes(PASSES * len(reference.rows), reference.image_passes)
    opinions = second_opinions(subject, chosen.images, explainers, reference, findings, passes, seed)
    findings = tuple(_with_second_opinion(f, opinions) for f in findings)
    on_parts = None if masks is None else HeatOnParts.of(reference, chosen.ids, masks)
    entries = [_entry(f, chosen, on_parts, involved(subject, explainers, chosen.images, f, passes)) for f in findings]
    document = {
        "schema_version": SCHEMA_VERSION,
        "status": "measured",
        "reason": "",
        "by_prediction": reference.by_prediction,
        "images": chosen.words,
        "source": reference.source,
        "passes_per_image": round(passes.spent / len(reference.rows), 1),
        "sources": opinions.verdicts(),
        "sources_not_used": opinions.not_used,
        **({} if on_parts is None else {"regions": on_parts.words}),
        "findings": entries,
    }
    return metrics(reference, findings, seed, opinions, on_parts), document


def _entry(
    f: Finding, chosen: ClassImages, on_parts: HeatOnParts | None, concepts: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a finding for JSON, with the rows and names of its images in the data."""
    if on_parts is not None and f.verdict in ("found", "look"):
        f = replace(f, sentence=f"{f.sentence} {on_parts.sentence(f)}".strip())
    rows = {"rows": [chosen.rows[i] for i in f.rows], "images": [chosen.ids[i] for i in f.rows]}
    return f.to_json() | rows | {"concepts": concepts}


def _with_reasons(reference: Reliance, chosen: ClassImages) -> Reliance:
    """Return the reliance with the reason of classes that the budget of images did not reach."""
    reason = f"it is not among the {len(chosen.drawn)} classes that were drawn of those with images enough"
    classes = (replace(c, skipped=reason) if c.label in chosen.not_drawn else c for c in reference.classes)
    return replace(reference, classes=tuple(classes))


def why_not(model_answers: Answers, shape: Sequence[int]) -> str:
    """Return why reliance of this model on this data is not worth measuring; empty when it is."""
    height, width = shape[-2:]
    if min(height, width) < MIN_SIDE:
        return (
            f"images of {height} x {width} pixels are too small: 3% of one is no region that can be hidden or "
            f"transplanted; {MIN_SIDE} x {MIN_SIDE} is the least"
        )
    labelled = model_answers.labelled
    if not bool(labelled.any()):
        return ""
    labels, logits = model_answers.labels[labelled], two_sided(model_answers.logits[labelled])
    right = (logits.argmax(1) == (labels if model_answers.logits.shape[1] > 1 else 1 - labels)).double()
    counts = labels.bincount()
    null = float(counts.max() / counts.sum())
    low, _ = bootstrap(right.numpy())
    if int((counts > 0).sum()) < 2 or (low is not None and low > null):
        return ""
    return (
        f"the model is right on {float(right.mean()):.1%} of the labelled images, no better than always saying the "
        f"most frequent class ({null:.1%}), so there is nothing yet that it hangs on"
    )


def not_measured(reason: str) -> tuple[dict[str, Measure], dict[str, Any]]:
    """Return metrics and record of an audit in which reliance was not measured."""
    document = {"schema_version": SCHEMA_VERSION, "status": "skipped", "reason": reason, "findings": []}
    names = ("found", "worst/score")
    return {f"{PREFIX}/{name}": skipped(reason, "down") for name in names}, document


def class_images(
    subject: Subject, data: Data, model_answers: Answers, n_images: int, seed: int, batch_size: int
) -> ClassImages:
    """Read the images to measure on: as many of every class as of any other, ``n_images`` in all.

    Where there are too many classes to give each ten images, some of the classes are drawn.
    """
    labels = model_answers.labels if bool(model_answers.labelled.any()) else model_answers.logits.argmax(1)
    counts = labels[labels >= 0].bincount(minlength=subject.n_classes)
    enough = (counts >= MIN_IMAGES).nonzero()[:, 0].numpy()
    room = max(2, n_images // MIN_IMAGES)
    usable_classes = frozenset(enough.tolist())
    if len(enough) > room:
        enough = np.sort(np.random.default_rng(seed).permutation(enough)[:room])
    few = [k for k in range(len(counts)) if 0 < int(counts[k]) < MIN_IMAGES]
    usable = np.flatnonzero(np.isin(labels.numpy(), [*enough, *few]))
    per_class = min(PER_CLASS, max(MIN_IMAGES, n_images // max(1, len(enough))))
    n = sum(min(per_class, int(counts[k])) for k in [*enough, *few])
    rows = usable[stratified(labels.numpy()[usable], n, seed).rows]
    mask = torch.zeros(len(model_answers.ids), dtype=torch.bool)
    mask[torch.from_numpy(rows)] = True
    images: list[Tensor] = []
    start = 0
    for batch in data.batches(subject, batch_size):
        images.append(batch.images[mask[start : start + len(batch)]])
        start += len(batch)
    sizes = np.unique(labels.numpy()[rows], return_counts=True)[1]
    words = Sample(rows, len(model_answers.ids), tuple(int(n) for n in sizes), seed).words
    drawn = frozenset(enough.tolist())
    if drawn != usable_classes:
        words += f"; {len(drawn):,} of {len(usable_classes):,} classes were drawn"
    return ClassImages(
        torch.cat(images),
        model_answers.labels[rows] if bool(model_answers.labelled.any()) else None,
        rows.tolist(),
        [model_answers.ids[i] for i in rows],
        words,
        drawn,
        usable_classes - drawn,
    )


def _with_second_opinion(f: Finding, opinions: Opinions) -> Finding:
    """Return the finding, raised to *look* where an explainer's heat found what plain heat did not."""
    if f.verdict != "nothing":
        return f
    for name, findings in opinions.findings.items():
        other = findings.get(f.label)
        if other is not None and other.verdict == "found":
            sentence = f"With the heat of {name}, though not with plain heat: {other.sentence} Look at these pictures."
            return replace(other, verdict="look", score=f.score, sentence=sentence)
    return f


def metrics(
    reference: Reliance,
    findings: Sequence[Finding],
    seed: int,
    opinions: Opinions | None = None,
    on_parts: HeatOnParts | None = None,
) -> dict[str, Measure]:
    """Return ``model/reliance/found``, ``/worst/…`` and, up to fifty classes, ``/<class>/…``."""
    by_label = {f.label: f for f in findings}
    each: dict[str, dict[str, Measure]] = {}
    for c in reference.classes:
        f = by_label[c.label]
        measures = metrics_of(c, seed) | _leak_metrics(c, opinions) | ({} if on_parts is None else on_parts.metrics(c))
        score = skipped(c.skipped, "down") if c.skipped else of_value(f.score, "down", n=c.n)
        each[plain(c.name) + "_" * (plain(c.name) == "worst")] = {"score": score, **({} if c.skipped else measures)}
    measured = [m for m in each.values() if m["score"].is_taken]
    out = {f"{PREFIX}/found": of_value(float(sum(f.verdict == "found" for f in findings)), "down", n=len(measured))}
    for name in dict.fromkeys(name for m in measured for name in m):
        values = [m[name] for m in measured if name in m and m[name].is_taken and m[name].direction != "none"]
        if values:
            worst = max(values, key=lambda m: m.value if m.direction == "down" else -m.value)
            out[f"{PREFIX}/worst/{name}"] = replace(worst, per_image=())
    if len(each) <= MAX_CLASSES:
        for name, measures in each.items():
            out |= {f"{PREFIX}/{name}/{k}": replace(m, per_image=()) for k, m in measures.items()}
    return out


def _leak_metrics(c: ClassReliance, opinions: Opinions | None) -> dict[str, Measure]:
    """Return how well the best concept of any explainer predicts the class by itself, and how much it covers."""
    leaks = [of_class[c.label] for of_class in opinions.leaks.values() if c.label in of_class] if opinions else []
    if not leaks:
        return {}
    best = max(leaks, key=lambda leak: leak.auc)
    return {
        "concept_leak": of_value(best.auc, "down", n=c.n, null=best.null),
        "concept_area": of_value(best.area, "none", n=c.n),
    }
