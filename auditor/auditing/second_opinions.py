"""Second opinions: what the attached explainers say of what a class hangs on, within a budget of forward passes.

The verdict of an audit is that of plain heat, on which the judgement is calibrated. Every explainer with maps is asked
as well: where its heat has the deciding boxes, and what follows these. The classes with most evidence come first; what
the budget does not reach is said. Concepts are named where they show the spot, or predict the class by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from auditor.errors import AuditError
from auditor.explainers.base import Explainer
from auditor.reliance import Finding, Heat, Reliance, RelianceConfig, explainer_heat, judge
from auditor.reliance.concept_leak import Leak, leak_of
from auditor.reliance.likeness import centres, edge_distance, place_entropy
from auditor.reliance.measures import ClassReliance, second_look
from auditor.subject.subject import Subject

PASSES = 60.0  # per image, for all of reliance
PER_CLASS = 12  # images of a class that an explainer's heat is asked of
PASSES_OF_AN_EXPLANATION = 4.0  # a forward pass, and a gradient above the layer counted as a whole one
SPOT = ("box", "best_box", "spot", "region", "pattern")  # causes that a deciding box can show
SHOWN = 4  # concepts of an explainer that are named


class NoMaps(Exception):
    """Raised where an explainer says nothing that counts for a class."""


@dataclass
class Passes:
    """Forward passes of one image: what is there, and what was spent."""

    most: float
    spent: float

    @property
    def left(self) -> float:
        """Return what may still be spent."""
        return self.most - self.spent


@dataclass(frozen=True)
class Opinions:
    """By explainer: its findings by class, the leaks of its concepts by class, and why it was not asked (all)."""

    findings: dict[str, dict[int, Finding]] = field(default_factory=dict)
    leaks: dict[str, dict[int, Leak]] = field(default_factory=dict)
    not_used: dict[str, str] = field(default_factory=dict)

    def verdicts(self) -> dict[str, dict[str, str]]:
        """Return the verdict of each explainer on each class it was asked of."""
        return {name: {f.name: f.verdict for f in of_class.values()} for name, of_class in self.findings.items()}


def second_opinions(
    subject: Subject,
    images: Tensor,
    explainers: Mapping[str, Explainer],
    reference: Reliance,
    findings: Sequence[Finding],
    passes: Passes,
    seed: int,
) -> Opinions:
    """Ask every explainer, in the order of their names, each for an equal part of the passes that are left."""
    opinions = Opinions()
    order = [f.label for f in findings if f.verdict != "skipped"]
    usable = {}
    for name, explainer in sorted(explainers.items()):
        reason = why_not_asked(explainer, order)
        if reason:
            opinions.not_used[name] = reason
        else:
            usable[name] = explainer
    for k, (name, explainer) in enumerate(usable.items()):
        share = Passes(passes.left / (len(usable) - k), 0.0)
        try:
            if explainer.concept_directions() is not None:
                opinions.leaks[name] = _leaks(subject, images, explainer, reference, share, seed)
            looked = _looks(subject, images, explainer, reference, order, share, seed)
            if looked:
                again = judge(looked_again(reference, looked), subject.class_names)
                opinions.findings[name] = {f.label: f for f in again}
            else:
                opinions.not_used[name] = f"the {PASSES:.0f} passes per image were spent"
        except AuditError as error:
            opinions.not_used[name] = " ".join(str(error).split()).rstrip(".")
        finally:
            passes.spent += share.spent
    return opinions


def why_not_asked(explainer: Explainer, classes: Sequence[int]) -> str:
    """Return why an explainer's heat is not asked at all; empty where it is."""
    if explainer.searches:
        return f"kind {explainer.kind} searches every image, which takes too long here"
    if explainer.config.target is not None or not all(explainer.can_explain(k) for k in classes):
        return "it explains some classes only"
    return ""


def looked_again(reference: Reliance, looked: Sequence[ClassReliance]) -> Reliance:
    """Return a reliance of the classes that were looked at again, for one judgement over these.

    How alike boxes are in an early layer was measured for those of plain heat, so it does not count.
    """
    return Reliance(
        tuple(replace(_placed(c), sameness_early=None, sameness_early_null=None) for c in looked),
        reference.source,
        0.0,
        reference.by_prediction,
        reference.accuracy,
        reference.n_images,
        reference.n_present,
        rows=reference.rows,
    )


def _placed(c: ClassReliance) -> ClassReliance:
    """Return the class with the places of the boxes that it has now."""
    if c.boxes is None or c.divergence is None:
        return c
    at = centres(c.boxes, (c.divergence.shape[0], c.divergence.shape[1]))
    return replace(c, place_entropy=place_entropy(at), edge_distance=float(edge_distance(at).mean()))


def _looks(
    subject: Subject,
    images: Tensor,
    explainer: Explainer,
    reference: Reliance,
    order: Sequence[int],
    passes: Passes,
    seed: int,
) -> list[ClassReliance]:
    def heat_of(x: Tensor, targets: Tensor) -> Heat:
        heat = explainer_heat(explainer, subject, x, targets)
        if not bool((heat.maps > 0).any()):
            passes.spent += PASSES_OF_AN_EXPLANATION * len(x)
            raise NoMaps
        return Heat(heat.maps, heat.source, PASSES_OF_AN_EXPLANATION)

    config = RelianceConfig(seed=seed, images_per_class=PER_CLASS)
    looked: list[ClassReliance] = []
    silent = 0  # classes that it says nothing for
    for label in order:
        n = min(PER_CLASS, reference.classes[label].n)
        if passes.left < n * (PASSES_OF_AN_EXPLANATION + 5):
            break
        try:
            result, cost = second_look(subject, images, reference, label, heat_of, config)
        except NoMaps:
            silent += 1
            continue
        passes.spent += cost
        looked.append(result)
    if silent and not looked:
        raise AuditError("it gives no maps")
    return looked


def _leaks(
    subject: Subject, images: Tensor, explainer: Explainer, reference: Reliance, passes: Passes, seed: int
) -> dict[int, Leak]:
    """Return, by class, what leaks it most among the explainer's concepts and groups: a pass per image."""
    measured = [c for c in reference.classes if not c.skipped]
    rows = torch.cat([torch.tensor(c.rows) for c in measured])
    layer = explainer.layer_
    if layer is None or passes.left < len(rows):
        return {}
    maps = []
    for part in torch.split(rows, 32):
        with torch.no_grad():
            maps.append(explainer.score_maps(subject, subject.activations(images[part], [layer])[layer]).cpu())
    passes.spent += len(rows)
    of_row = torch.cat([torch.full((c.n,), c.label) for c in measured])
    S = torch.cat(maps).float()
    return {c.label: leak_of(S, of_row == c.label, explainer.groups, seed) for c in measured}


def involved(
    subject: Subject, explainers: Mapping[str, Explainer], images: Tensor, finding: Finding, passes: Passes
) -> list[dict[str, Any]]:
    """Return the concepts whose maps fall into the deciding boxes of a finding's images, the strongest first.

    A concept is involved when its heat is at least three times as dense inside the boxes as it would be if spread
    evenly over the image, and it counts for the class.
    """
    if finding.boxes is None or finding.verdict not in ("found", "look") or finding.cause not in SPOT:
        return []
    x = images[list(finding.rows)]
    shown: list[dict[str, Any]] = []
    for name, explainer in sorted(explainers.items()):
        cost = PASSES_OF_AN_EXPLANATION * len(x)
        if explainer.searches or not explainer.can_explain(finding.label) or passes.left < cost:
            continue
        passes.spent += cost
        try:
            explanations = explainer.explain(subject, x, finding.label)
        except AuditError:  # an explainer that cannot explain these images names none
            continue
        shown += _inside(name, explanations, finding, (x.shape[2], x.shape[3]))
    return shown


def _inside(name: str, explanations: Sequence[Any], finding: Finding, size: tuple[int, int]) -> list[dict[str, Any]]:
    height, width = size
    assert finding.boxes is not None
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
            "adds": float(sum(v for _, v, _ in entries) / len(explanations)),
        }
        for k, entries in inside.items()
    ]
    return sorted((r for r in rows if r["share"] >= 3 * area), key=lambda r: -r["share"] * r["adds"])[:SHOWN]


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
