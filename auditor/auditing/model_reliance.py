"""Reliance in an audit: what each class hangs on, by plain heat and by that of every attached explainer with maps.

The verdict is that of plain heat, on which the judgement is calibrated. An explainer's heat is asked as well, on fewer
images: where it comes to another verdict, that is said, and a class that only an explainer accuses is one to look at.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from auditor.auditing.images import Answers
from auditor.auditing.performance import MAX_CLASSES, plain, two_sided
from auditor.data.sampling import Sample, stratified
from auditor.data.source import Data
from auditor.errors import AuditError
from auditor.explainers.base import Explainer
from auditor.metrics.measure import Measure, bootstrap, of_value, skipped
from auditor.progress import Progress, silent
from auditor.reliance import Finding, Heat, Reliance, RelianceConfig, explainer_heat, judge, measure, metrics_of
from auditor.reliance.measures import MIN_IMAGES
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
PREFIX = "model/reliance"
PER_CLASS = 30  # images of a class at most
SECOND_OPINION = 12  # the same for an explainer's heat, so that all sources together stay within 60 passes per image
MIN_SIDE = 16  # pixels: below it the deciding 3% of an image are a handful of pixels
SPOT = ("box", "spot", "region", "pattern")  # causes that a deciding box can show


@dataclass(frozen=True, eq=False)
class ClassImages:
    """The images on which reliance is measured: pixels, labels (None: not known), their rows of the data and names."""

    images: Tensor
    labels: Tensor | None
    rows: list[int]
    ids: list[str]
    words: str


def reliance(
    subject: Subject,
    data: Data,
    said: Answers,
    explainers: Mapping[str, Explainer],
    *,
    n_images: int = 400,
    seed: int = 0,
    batch_size: int = 64,
    progress: Progress = silent,
) -> tuple[dict[str, Measure], dict[str, Any]]:
    """Return the metrics ``model/reliance/…`` and what the audit keeps of the findings, ready for JSON."""
    reason = why_not(said, subject.input_shape)
    if reason:
        return not_measured(reason)
    try:
        chosen = class_images(subject, data, said, n_images, seed, batch_size)
        config = RelianceConfig(seed=seed, images_per_class=PER_CLASS)
        reference = measure(subject, chosen.images, chosen.labels, config, progress=progress)
        findings = judge(reference, subject.class_names)
    except AuditError as error:
        return not_measured(" ".join(str(error).split()).rstrip("."))
    if all(f.verdict == "skipped" for f in findings):
        return not_measured("no class has enough images: " + findings[0].sentence.rstrip("."))
    others, unused = second_opinions(subject, chosen, explainers, reference, seed, progress)
    findings = tuple(_with_second_opinion(f, others) for f in findings)
    document = {
        "schema_version": SCHEMA_VERSION,
        "status": "measured",
        "reason": "",
        "by_prediction": reference.by_prediction,
        "images": chosen.words,
        "source": reference.source,
        "passes_per_image": round(reference.passes_per_image, 1),
        "sources": {name: {f.name: f.verdict for f in other} for name, (_, other) in others.items()},
        "sources_not_used": unused,
        "findings": [
            f.to_json()
            | {"rows": [chosen.rows[i] for i in f.rows], "images": [chosen.ids[i] for i in f.rows]}
            | {"concepts": involved(subject, explainers, chosen.images, f)}
            for f in findings
        ],
    }
    return metrics(reference, findings, seed), document


def why_not(said: Answers, shape: Sequence[int]) -> str:
    """Return why reliance of this model on this data is not worth measuring; empty when it is."""
    height, width = shape[-2:]
    if min(height, width) < MIN_SIDE:
        return (
            f"images of {height} x {width} pixels are too small: 3% of one is no region that can be hidden or "
            f"transplanted; {MIN_SIDE} x {MIN_SIDE} is the least"
        )
    labelled = said.labelled
    if not bool(labelled.any()):
        return ""
    labels, logits = said.labels[labelled], two_sided(said.logits[labelled])
    right = (logits.argmax(1) == (labels if said.logits.shape[1] > 1 else 1 - labels)).double()
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


def class_images(subject: Subject, data: Data, said: Answers, n_images: int, seed: int, batch_size: int) -> ClassImages:
    """Read the images to measure on: as many of every class as of any other, ``n_images`` in all.

    Where there are too many classes to give each ten images, some of the classes are drawn.
    """
    labels = said.labels if bool(said.labelled.any()) else said.logits.argmax(1)
    counts = labels[labels >= 0].bincount(minlength=subject.n_classes)
    enough = (counts >= MIN_IMAGES).nonzero()[:, 0].numpy()
    room = max(2, n_images // MIN_IMAGES)
    if len(enough) > room:
        enough = np.sort(np.random.default_rng(seed).permutation(enough)[:room])
    few = [k for k in range(len(counts)) if 0 < int(counts[k]) < MIN_IMAGES]
    usable = np.flatnonzero(np.isin(labels.numpy(), [*enough, *few]))
    per_class = min(PER_CLASS, max(MIN_IMAGES, n_images // max(1, len(enough))))
    n = sum(min(per_class, int(counts[k])) for k in [*enough, *few])
    rows = usable[stratified(labels.numpy()[usable], n, seed).rows]
    mask = torch.zeros(len(said.ids), dtype=torch.bool)
    mask[torch.from_numpy(rows)] = True
    images: list[Tensor] = []
    start = 0
    for batch in data.batches(subject, batch_size):
        images.append(batch.images[mask[start : start + len(batch)]])
        start += len(batch)
    sizes = np.unique(labels.numpy()[rows], return_counts=True)[1]
    words = Sample(rows, len(said.ids), tuple(int(n) for n in sizes), seed).words
    return ClassImages(
        torch.cat(images),
        said.labels[rows] if bool(said.labelled.any()) else None,
        rows.tolist(),
        [said.ids[i] for i in rows],
        words,
    )


def second_opinions(
    subject: Subject,
    chosen: ClassImages,
    explainers: Mapping[str, Explainer],
    reference: Reliance,
    seed: int,
    progress: Progress,
) -> tuple[dict[str, tuple[Reliance, tuple[Finding, ...]]], dict[str, str]]:
    """Return what each explainer's heat comes to, by name, and why the heat of others was not used."""
    measured = [c.label for c in reference.classes if not c.skipped]
    opinions: dict[str, tuple[Reliance, tuple[Finding, ...]]] = {}
    unused: dict[str, str] = {}
    config = RelianceConfig(seed=seed, images_per_class=SECOND_OPINION)
    for name, explainer in sorted(explainers.items()):
        if explainer.searches:
            unused[name] = f"kind {explainer.kind} searches every image, which takes too long here"
        elif explainer.config.target is not None or not all(explainer.can_explain(k) for k in measured):
            unused[name] = "it speaks of some classes only"
        if name in unused:
            continue

        def heat_of(images: Tensor, targets: Tensor, explainer: Explainer = explainer) -> Heat:
            heat = explainer_heat(explainer, subject, images, targets)
            if not bool((heat.maps > 0).any()):
                raise AuditError("it gives no maps")
            return heat

        try:
            result = measure(subject, chosen.images, chosen.labels, config, heat_of=heat_of, progress=progress)
            opinions[name] = (result, judge(result, subject.class_names))
        except AuditError as error:
            unused[name] = " ".join(str(error).split()).rstrip(".")
    return opinions, unused


def _with_second_opinion(f: Finding, others: Mapping[str, tuple[Reliance, tuple[Finding, ...]]]) -> Finding:
    """Return the finding, raised to *look* where an explainer's heat found what plain heat did not."""
    if f.verdict != "nothing":
        return f
    for name, (_, findings) in others.items():
        other = next(o for o in findings if o.label == f.label)
        if other.verdict == "found":
            sentence = f"With the heat of {name}, though not with plain heat: {other.sentence} Look at these pictures."
            return replace(other, verdict="look", score=f.score, sentence=sentence)
    return f


def involved(
    subject: Subject, explainers: Mapping[str, Explainer], images: Tensor, finding: Finding
) -> list[dict[str, Any]]:
    """Return the concepts whose maps fall into the deciding boxes of a finding's images, the strongest first.

    A concept is involved when its heat is at least three times as dense inside the boxes as it would be if spread
    evenly over the image, and it counts for the class.
    """
    if finding.boxes is None or finding.verdict not in ("found", "look") or finding.cause not in SPOT:
        return []
    x = images[list(finding.rows)]
    height, width = x.shape[2:]
    shown: list[dict[str, Any]] = []
    for name, explainer in sorted(explainers.items()):
        if explainer.searches or not explainer.can_explain(finding.label):
            continue
        try:
            explanations = explainer.explain(subject, x, finding.label)
        except AuditError:  # an explainer that cannot speak of these images names none
            continue
        inside: dict[int, list[tuple[float, float, str]]] = {}
        for i, e in enumerate(explanations):
            b = [int(getattr(finding.boxes, side)[i]) for side in ("top", "left", "height", "width")]
            for c in e.concepts:
                value = c.activation if c.contribution is None else c.contribution
                if c.heatmap is not None and value > 0 and float(c.heatmap.sum()) > 0:
                    share = share_inside(c.heatmap, (b[0] / height, b[1] / width, b[2] / height, b[3] / width))
                    inside.setdefault(c.index, []).append((share, value, c.label))
        area = float((finding.boxes.height * finding.boxes.width).double().mean()) / (height * width)
        rows: list[dict[str, Any]] = [
            {
                "explainer": name,
                "index": k,
                "label": entries[0][2],
                "share": float(np.mean([s for s, _, _ in entries])),
                "adds": float(sum(v for _, v, _ in entries) / len(x)),
            }
            for k, entries in inside.items()
        ]
        shown += sorted((r for r in rows if r["share"] >= 3 * area), key=lambda r: -r["share"] * r["adds"])[:4]
    return shown


def share_inside(heatmap: Tensor, box: tuple[float, float, float, float]) -> float:
    """Return the share of a map's heat inside a box (top, left, height, width as shares of the image).

    Cells that the box cuts count by the part of them that is inside.

    >>> share_inside(torch.ones(2, 2), (0.0, 0.0, 0.5, 1.0))
    0.5
    """
    weights = []
    for n, start, size in ((heatmap.shape[0], box[0], box[2]), (heatmap.shape[1], box[1], box[3])):
        cells = torch.arange(n, dtype=torch.float64)
        weights.append(
            (
                torch.minimum(cells + 1, torch.tensor((start + size) * n))
                - torch.maximum(cells, torch.tensor(start * n, dtype=torch.float64))
            ).clamp(0, 1)
        )
    positive = heatmap.double().clamp_min(0).cpu()
    return float((weights[0][:, None] * weights[1][None] * positive).sum() / positive.sum().clamp_min(1e-300))


def metrics(reference: Reliance, findings: Sequence[Finding], seed: int) -> dict[str, Measure]:
    """Return ``model/reliance/found``, ``/worst/…`` and, up to fifty classes, ``/<class>/…``."""
    by_label = {f.label: f for f in findings}
    each: dict[str, dict[str, Measure]] = {}
    for c in reference.classes:
        f = by_label[c.label]
        measures = metrics_of(c, seed)
        score = skipped(c.skipped, "down") if c.skipped else of_value(f.score, "down", n=c.n)
        each[plain(c.name) + "_" * (plain(c.name) == "worst")] = {"score": score, **({} if c.skipped else measures)}
    taken = [m for m in each.values() if m["score"].is_taken]
    out = {f"{PREFIX}/found": of_value(float(sum(f.verdict == "found" for f in findings)), "down", n=len(taken))}
    for name in taken[0]:
        values = [m[name] for m in taken if name in m and m[name].is_taken and m[name].direction != "none"]
        if values:
            worst = max(values, key=lambda m: m.value if m.direction == "down" else -m.value)
            out[f"{PREFIX}/worst/{name}"] = replace(worst, per_image=())
    if len(each) <= MAX_CLASSES:
        for name, measures in each.items():
            out |= {f"{PREFIX}/{name}/{k}": replace(m, per_image=()) for k, m in measures.items()}
    return out
