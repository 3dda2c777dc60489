"""What changed between two versions on the same images: where they look, and what their classes hang on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auditor.auditing.images import answers
from auditor.auditing.model_reliance import class_images, why_not
from auditor.data.source import Data
from auditor.errors import AuditError
from auditor.progress import Progress, silent
from auditor.reliance import RelianceConfig, judge, measure, plain_heat
from auditor.reliance.heat import overlap_of_sources
from auditor.reliance.regions import Boxes, boxes
from auditor.subject.subject import Subject

PER_CLASS = 12  # images of a class for the change of reliance
SHOWN = 8  # pairs of pictures


@dataclass(frozen=True, eq=False)
class Regions:
    """The deciding regions of two versions on the same images, each of the image's own class.

    ``overlap`` is the share of the hottest 5% of pixels that both have, ``null`` the same of two different images of
    the first version. ``shown`` are rows spread over the classes, for pictures.
    """

    images: Tensor
    ids: list[str]
    targets: list[str]
    a: Boxes
    b: Boxes
    overlap: Tensor
    null: float
    shown: list[int]
    words: str

    def sentence(self) -> str:
        """Return how much the deciding regions have in common."""
        return (
            f"On the same images the deciding regions have {float(self.overlap.mean()):.0%} in common (two different "
            f"images: {self.null:.0%}; {self.words})."
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain Python for JSON, without the pixels."""
        mean = float(self.overlap.mean())
        return {
            "overlap": mean,
            "null": self.null,
            "images": self.words,
            "each": [
                {"id": self.ids[i], "class": self.targets[i], "overlap": float(self.overlap[i]),
                 "a": self.a.to_json()[i][:4], "b": self.b.to_json()[i][:4]}
                for i in range(len(self.ids))
            ],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class ClassChange:
    """What one class hangs on in both versions: score and verdict of each."""

    name: str
    score: tuple[float, float]
    verdict: tuple[str, str]
    sentence: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain Python for JSON."""
        score = [None if math.isnan(s) else s for s in self.score]
        return {"class": self.name, "score": score, "verdict": list(self.verdict), "sentence": self.sentence}


@dataclass(frozen=True, slots=True)
class Changes:
    """Both kinds of change; ``not_measured`` says why reliance is missing."""

    regions: Regions | None
    reliance: tuple[ClassChange, ...] = ()
    not_measured: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain Python for JSON."""
        return {
            "regions": None if self.regions is None else self.regions.to_json(),
            "reliance": [c.to_json() for c in self.reliance],
            "reliance_not_measured": self.not_measured,
        }


def version_changes(
    a: Subject,
    b: Subject,
    data: Data,
    *,
    n_images: int = 24,
    seed: int = 0,
    reliance: bool = True,
    progress: Progress = silent,
) -> Changes:
    """Measure where two versions look on the same images, and what their classes hang on."""
    try:
        regions = deciding_regions(a, b, data, n_images, seed)
    except AuditError as error:
        return Changes(None, not_measured=" ".join(str(error).split()))
    if not reliance:
        return Changes(regions, not_measured="it was left out (--no-reliance)")
    both_answers = [answers(s, data, progress=progress) for s in (a, b)]
    reason = why_not(both_answers[0], a.input_shape) or why_not(both_answers[1], b.input_shape)
    if reason:
        return Changes(regions, not_measured=reason)
    config = RelianceConfig(seed=seed, images_per_class=PER_CLASS)
    try:
        findings = []
        for subject, model_answers in zip((a, b), both_answers, strict=True):
            chosen = class_images(subject, data, model_answers, 400, seed, 64)
            result = measure(subject, chosen.images, chosen.labels, config, progress=progress)
            findings.append({f.label: f for f in judge(result, subject.class_names)})
    except AuditError as error:
        return Changes(regions, not_measured=" ".join(str(error).split()))
    left, right = findings
    rows = [
        ClassChange(
            left[k].name,
            (left[k].score, right[k].score),
            (left[k].verdict, right[k].verdict),
            right[k].sentence if right[k].verdict in ("found", "look") else "",
        )
        for k in left
    ]
    rows.sort(key=lambda c: -(c.score[1] - c.score[0]) if not any(math.isnan(s) for s in c.score) else math.inf)
    return Changes(regions, tuple(rows))


def deciding_regions(a: Subject, b: Subject, data: Data, n_images: int, seed: int) -> Regions:
    """Find the deciding regions of both versions, for the label of each image, else the first version's answer."""
    part = data.only(data.draw(n_images, seed))
    batches = list(part.batches(a, 64))
    images, labels = torch.cat([x.images for x in batches]), torch.cat([x.labels for x in batches])
    with torch.no_grad():
        predicted = torch.cat([a.logits(x.images).argmax(1).cpu() for x in batches])
    targets = torch.where((labels >= 0) & (labels < a.n_classes), labels, predicted)
    heat = [plain_heat(s, images, targets).maps for s in (a, b)]
    null = float(overlap_of_sources(heat[0], heat[0].roll(1, 0)).mean()) if len(images) > 1 else math.nan
    at = [boxes(maps) for maps in heat]
    return Regions(
        images,
        [i for x in batches for i in x.ids],
        [a.class_names[k] for k in targets.tolist()],
        at[0],
        at[1],
        overlap_of_sources(heat[0], heat[1]),
        null,
        _one_of_each(targets.tolist(), SHOWN),
        part.sample.words,
    )


def _one_of_each(classes: Sequence[int], n: int) -> list[int]:
    """Return up to ``n`` rows, taking the classes in turn.

    >>> _one_of_each([0, 0, 0, 1, 2], 4)
    [0, 1, 3, 4]
    """
    rank: dict[int, int] = {}
    order = []
    for row, k in enumerate(classes):
        rank[k] = rank.get(k, -1) + 1
        order.append((rank[k], row))
    return sorted(row for _, row in sorted(order)[:n])
