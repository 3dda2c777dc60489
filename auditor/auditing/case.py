"""Case: one explainer before the audit's images, and what all its measures share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from auditor.attribution.heatmap import upsample
from auditor.auditing.images import AuditImages, spread
from auditor.data.source import Data
from auditor.errors import DataError
from auditor.explainers.answer import explanations_of
from auditor.explainers.base import Explainer
from auditor.explainers.explanation import Explanation
from auditor.metrics.measure import Measure
from auditor.progress import Progress, silent
from auditor.subject.subject import Subject

EXPLAINED_AT_ONCE = 32  # images


@dataclass(frozen=True)
class Effort:
    """How much work goes into one explainer."""

    images: int = 100
    flip_images: int = 40
    flip_draws: int = 2  # more do not narrow the interval: images differ far more than draws, bench_flip_draws.py
    flip_steps: int = 16
    noise_images: int = 40
    noise_samples: int = 3
    random_images: int = 40
    random_stages: int = 3
    random_classes: int | None = None  # images of at most so many classes are explained on randomised models
    refits: int = 0
    radius: float = 0.02
    options: Mapping[str, Any] = field(default_factory=dict)  # handed to ``explain``

    def share(self, n: int) -> float:
        """Return ``n`` images as a share of all of them."""
        return min(n, self.images) / max(1, self.images)

    @classmethod
    def of(cls, explainer: Explainer, images: int, refits: int, slow_images: int) -> Effort:
        """Return the usual effort; less for kinds that search per image, or that trace the model for each class."""
        if explainer.searches:
            n = slow_images
            return cls(
                n, n, noise_images=n, noise_samples=1, random_images=n, random_stages=1, options=explainer.quick_options
            )
        some = min(images, 40)
        per_class = explainer.explainable_classes() is not None
        return cls(
            images,
            some,
            noise_images=some,
            random_images=some,
            random_classes=4 if per_class else None,
            random_stages=1 if per_class else 3,
            refits=refits,
        )


@dataclass(frozen=True, eq=False)
class Case:
    """One explainer before the audit's images; explanations are made once and shared by all measures."""

    subject: Subject
    explainer: Explainer
    chosen: AuditImages
    data: Data
    effort: Effort
    seed: int = 0
    progress: Progress = silent

    @cached_property
    def sample(self) -> AuditImages:
        """Return the images this explainer is judged on: those of classes it can explain."""
        if self.explainer.config.target is not None:
            return self.chosen.first(self.effort.images)
        rows = [i for i, k in enumerate(self.chosen.logits.argmax(1).tolist()) if self.explainer.can_explain(k)]
        if not rows:
            raise DataError(f"none of the {len(self.chosen)} audit images is predicted as a class it was fitted for.")
        return self.chosen.rows(rows).first(self.effort.images)

    @cached_property
    def explanations(self) -> list[Explanation]:
        """Return the explanation of every image, each of the class the explainer chooses."""
        return explain(self.explainer, self.subject, self.sample.images, None, self.effort, self.progress)

    def subset(self, n: int) -> tuple[AuditImages, list[Explanation]]:
        """Return at most ``n`` of the images with their explanations."""
        rows = spread(len(self.sample), n)
        return self.sample.rows(rows), [self.explanations[i] for i in rows]


def explain(
    explainer: Explainer,
    subject: Subject,
    images: Tensor,
    targets: Sequence[int] | None,
    effort: Effort,
    progress: Progress = silent,
) -> list[Explanation]:
    """Explain images, each for its own target where targets are given."""
    explanations: list[Explanation] = []
    for part in torch.split(torch.arange(len(images)), EXPLAINED_AT_ONCE):
        chosen = [None if targets is None else targets[i] for i in part.tolist()]
        explanations += explanations_of(explainer, subject, images[part], chosen, **effort.options)
        progress("explaining", len(explanations), len(images))
    return explanations


def strengths(explanations: Sequence[Explanation], width: int | None = None) -> Tensor:
    """Return contributions (activations where a kind gives none) as rows (images, concepts), 0 where absent."""
    width = width or 1 + max((c.index for e in explanations for c in e.concepts), default=0)
    rows = torch.zeros(len(explanations), width, dtype=torch.float64)
    for i, e in enumerate(explanations):
        for c in e.concepts:
            rows[i, c.index] = c.contribution if c.contribution is not None else c.activation
    return rows


def relevance(explanation: Explanation, size: tuple[int, int]) -> Tensor | None:
    """Return one map (height, width) of an explanation: heatmaps of unit mass, weighted by their contributions.

    A kind that says how relevant every place is (``extra["relevance"]``) is trusted to say so.
    """
    relevance_map = explanation.extra.get("relevance")
    if relevance_map is not None:
        return resized(torch.tensor(relevance_map, dtype=torch.float32), size)
    total: Tensor | None = None
    for c in explanation.concepts:
        if c.heatmap is None or float(c.heatmap.sum()) <= 0:
            continue
        weight = c.contribution if c.contribution is not None else c.activation
        part = resized(c.heatmap.float() / c.heatmap.float().sum(), size) * weight
        total = part if total is None else total + part
    return total


def resized(heatmap: Tensor, size: tuple[int, int]) -> Tensor:
    """Return a map at another size: averaged where it shrinks, interpolated where it grows."""
    if heatmap.shape[0] >= size[0] and heatmap.shape[1] >= size[1]:
        return F.adaptive_avg_pool2d(heatmap[None, None], size)[0, 0]
    return upsample(heatmap, size)


def similarity(a: Sequence[Explanation], b: Sequence[Explanation]) -> Tensor:
    """Return the correlation per image of what two sets of explanations say; NaN where one of them says nothing.

    What is compared is the relevance map where the kind gives one as such, else the contributions.
    """
    if all("relevance" in e.extra for e in (*a, *b)):
        rows = [torch.stack([torch.tensor(e.extra["relevance"]).flatten().double() for e in side]) for side in (a, b)]
    else:
        width = 1 + max((c.index for e in (*a, *b) for c in e.concepts), default=0)
        rows = [strengths(side, width) for side in (a, b)]
    return correlations(rows[0], rows[1])


def correlations(a: Tensor, b: Tensor) -> Tensor:
    """Return Pearson's correlation of the rows of two matrices; NaN for a constant row, the cosine for one column.

    >>> round(float(correlations(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[2.0, 4.0, 6.0]]))), 5)
    1.0
    """
    if a.shape[1] > 1:
        a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    size = a.norm(dim=1) * b.norm(dim=1)
    return torch.where(size > 1e-12, (a * b).sum(1) / size.clamp_min(1e-300), torch.nan)


def noted(measure: Measure, text: str) -> Measure:
    """Return the measure with a remark, unless it has a reason already."""
    return replace(measure, reason=text) if text and not measure.reason else measure
