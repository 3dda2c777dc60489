"""Image work: explaining and flipping an audit's images by the workers of a runner, since images are independent.

Items are cut by a fixed number of images, so that the numbers do not depend on how many workers there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auditor.explainers.answer import explanations_of
from auditor.explainers.base import Explainer
from auditor.explainers.explanation import Explanation
from auditor.perturbation.pixel_flipping import MaskedImages, flip_curve
from auditor.runners.runner import Runner
from auditor.subject.subject import Subject

IMAGES = 8  # of an item
SEARCHED = 1  # of an item of a kind that searches per image


@dataclass(frozen=True)
class ToExplain:
    """Images with the logits that the model is known to give for them, and the classes to explain."""

    images: Tensor
    logits: Tensor
    targets: list[int | None]


@dataclass(frozen=True)
class Explaining:
    """Explains images by one explainer, from a pass of its own."""

    subject: Subject
    explainer: Explainer
    heatmaps: bool
    options: Mapping[str, Any]

    def __call__(self, item: ToExplain) -> list[Explanation]:
        """Return the explanation of every image."""
        outputs: tuple[Tensor, dict[str, Tensor]] = item.logits, {}
        layers = self.explainer.layers()
        if layers:  # else it runs the subject itself
            with torch.no_grad():
                outputs = self.subject.run(item.images, layers)
        return explanations_of(
            self.explainer, self.subject, item.images, item.targets, outputs, heatmaps=self.heatmaps, **self.options
        )


def explained(
    runner: Runner, work: Explaining, images: Tensor, logits: Tensor, targets: Sequence[int | None]
) -> Iterator[list[Explanation]]:
    """Yield the explanations of images, some at a time and in their order."""
    n = SEARCHED if work.explainer.searches else IMAGES
    rows = [slice(k, k + n) for k in range(0, len(images), n)]
    return runner.map(work, (ToExplain(images[r].clone(), logits[r].clone(), list(targets[r])) for r in rows))


@dataclass(frozen=True)
class ToFlip:
    """Images, the class of each, relevance maps (maps, images, cells), and where in the audit's images they are."""

    images: Tensor
    targets: Tensor
    maps: Tensor
    index: list[int]


@dataclass(frozen=True)
class Flipping:
    """Flips cells of images by several maps, under the same noise."""

    masked: MaskedImages
    group: int

    def __call__(self, item: ToFlip) -> Tensor:
        """Return the areas (maps, images) under the curves."""
        curves = (
            flip_curve(self.masked, item.images, item.targets, scores, item.index, group=self.group)
            for scores in item.maps
        )
        return torch.stack([curve.area().double() for curve in curves])


def flipped(
    runner: Runner, masked: MaskedImages, group: int, images: Tensor, targets: Tensor, maps: Tensor, index: list[int]
) -> Tensor:
    """Return the areas (maps, images) under the curves of all images."""
    n = 1 if runner.is_remote else max(1, len(images))
    rows = [slice(k, k + n) for k in range(0, len(images), n)]
    items = (ToFlip(images[r].clone(), targets[r], maps[:, r].clone(), index[r]) for r in rows)
    return torch.cat(list(runner.map(Flipping(masked, group), items)), 1)
