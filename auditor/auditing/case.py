"""Case: one explainer before the audit's images, and what all its measures share."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from auditor.attribution.heatmap import upsample
from auditor.auditing.image_work import Explaining, explained
from auditor.auditing.images import AuditImages
from auditor.auditing.shared_passes import BATCH, Outputs, SharedPasses
from auditor.data.source import Data
from auditor.errors import DataError
from auditor.explainers.answer import explanations_of
from auditor.explainers.base import Explainer
from auditor.explainers.explanation import Explanation
from auditor.metrics.measure import Measure
from auditor.metrics.sequential import even_order, looks
from auditor.perturbation.pixel_flipping import MaskedImages
from auditor.progress import Progress, silent
from auditor.runners.runner import current
from auditor.subject.subject import Subject


@dataclass(frozen=True)
class Effort:
    """How much work goes into one explainer: at most so many images, taken in rounds until the verdict is clear."""

    images: int = 100
    flip_images: int = 40
    flip_draws: int = 1  # more do not narrow the interval: images differ far more than draws, bench_flip_draws.py
    flip_steps: int = 8
    noise_images: int = 40
    noise_samples: int = 2
    random_images: int = 40
    random_stages: int = 3
    refits: int = 0
    radius: float = 0.02
    is_sequential: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)  # handed to ``explain``

    def share(self, n: int) -> float:
        """Return ``n`` images as a share of all of them."""
        return min(n, self.images) / max(1, self.images)

    @classmethod
    def of(
        cls, explainer: Explainer, images: int, refits: int, slow_images: int, is_exhaustive: bool = False
    ) -> Effort:
        """Return the usual effort; less for kinds that search per image, all of it where the audit is exhaustive."""
        if explainer.searches:
            n = slow_images
            return cls(
                n, n, noise_images=n, noise_samples=1, random_images=n, random_stages=1, options=explainer.quick_options
            )
        some = min(images, 40)
        effort = cls(images, some, noise_images=some, random_images=some, refits=refits)
        if is_exhaustive:
            return replace(effort, flip_draws=2, flip_steps=16, noise_samples=3, is_sequential=False)
        return effort


@dataclass(frozen=True, eq=False)
class Case:
    """One explainer before the audit's images; explanations are made once and shared by all measures.

    ``shared`` and ``masked`` hold what the model said of the images, for all explainers of the audit.
    """

    subject: Subject
    explainer: Explainer
    chosen: AuditImages
    data: Data
    effort: Effort
    seed: int = 0
    progress: Progress = silent
    shared: SharedPasses | None = None
    masked: MaskedImages | None = None

    @cached_property
    def passes(self) -> SharedPasses:
        """Return the passes that all explainers of the audit read."""
        return self.shared or SharedPasses(self.explainer.layers())

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
        return self.explain(self.subject, "as it is", self.sample, self.sample.images, None, True)

    def explain(
        self,
        subject: Subject,
        condition: Hashable,
        sample: AuditImages,
        images: Tensor,
        targets: Sequence[int] | None,
        heatmaps: bool = False,
    ) -> list[Explanation]:
        """Explain ``images``, those of ``sample`` under a condition, from a pass that all explainers share."""
        classes: list[int | None] = list(targets) if targets is not None else [None] * len(images)
        explanations: list[Explanation] = []
        runner = current()
        if runner.is_remote:
            work = Explaining(subject, self.explainer, heatmaps, dict(self.effort.options))
            for some in explained(runner, work, images, sample.logits, classes):
                explanations += some
                self.progress("explaining", len(explanations), len(images))
            return explanations
        for part in torch.split(torch.arange(len(images)), BATCH):
            rows = part.tolist()
            row_targets = [classes[i] for i in rows]
            outputs: Outputs = sample.logits[part], {}  # for a kind that reads no layers and runs the subject itself
            if self.explainer.layers():
                index = [sample.index[i] for i in rows]
                outputs = self.passes.run(subject, condition, images[part], index)
            explanations += explanations_of(
                self.explainer, subject, images[part], row_targets, outputs, heatmaps=heatmaps, **self.effort.options
            )
            if len(images) > BATCH:
                self.progress("explaining", len(explanations), len(images))
        return explanations

    def rounds(self, most: int) -> list[list[int]]:
        """Return the rows of the sample that each round adds, ``most`` in all: one round where all are wanted."""
        n = min(most, len(self.sample))
        order = even_order(len(self.sample))[:n]
        sizes = [0, *(looks(n) if self.effort.is_sequential and not self.explainer.searches else [n])]
        return [order[a:b] for a, b in pairwise(sizes)]

    def rows(self, rows: list[int]) -> tuple[AuditImages, list[Explanation]]:
        """Return some of the images with their explanations."""
        return self.sample.rows(rows), [self.explanations[i] for i in rows]


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
