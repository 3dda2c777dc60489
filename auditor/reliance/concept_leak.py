"""Leak: how well one concept's activation, or that of a group of concepts, alone predicts the class of an image.

A concept that predicts a class nearly by itself and covers little of the image is a spot that gives the class away; one
that covers most of it is a tint or a texture. The null is the best concept for shuffled labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SHUFFLES = 40
BAND = 0.95  # share of the shuffles that stay below the null


@dataclass(frozen=True)
class Leak:
    """The concepts (one, or a group) that predict a class best: area under the ROC curve, null, area of their maps."""

    concepts: tuple[int, ...]
    auc: float
    null: float
    area: float


def aucs(activations: Tensor, is_class: Tensor) -> Tensor:
    """Return for each column of activations (images, concepts) the area under the ROC curve; ties count half.

    >>> aucs(torch.tensor([[0.1, 3.0], [0.2, 2.0], [0.9, 2.0]]), torch.tensor([False, False, True])).tolist()
    [1.0, 0.25]
    """
    inside, outside = activations[is_class].double(), activations[~is_class].double()
    above = (inside[:, None] > outside[None]).double() + 0.5 * (inside[:, None] == outside[None]).double()
    return above.mean((0, 1))


def areas(maps: Tensor) -> Tensor:
    """Return the share of the image that each map (images, concepts, positions) covers: (sum h)^2 / (n sum h^2).

    >>> areas(torch.tensor([[[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]])).tolist()
    [0.5, 1.0]
    """
    h = maps.double().clamp_min(0)
    share = h.sum(-1).square() / (h.shape[-1] * h.square().sum(-1)).clamp_min(1e-300)
    has_heat = h.sum(-1) > 0
    mean: Tensor = torch.where(has_heat, share, 0.0).sum(0) / has_heat.sum(0).clamp_min(1)
    return mean


def leak_of(maps: Tensor, is_class: Tensor, groups: Sequence[Sequence[int]], seed: int = 0) -> Leak:
    """Return what leaks a class most, from score maps (images, concepts, positions) and which images are of it."""
    parts = [(k,) for k in range(maps.shape[1])] + [tuple(g) for g in groups if len(g) > 1]
    together = torch.stack([maps[:, list(part)].sum(1) for part in parts], 1)
    activations = together.mean(-1)
    values = aucs(activations, is_class)
    generator = torch.Generator().manual_seed(seed)
    shuffled = [
        float(aucs(activations, is_class[torch.randperm(len(is_class), generator=generator)]).max())
        for _ in range(SHUFFLES)
    ]
    best = int(values.argmax())
    null = float(torch.tensor(shuffled).quantile(BAND))
    return Leak(parts[best], float(values[best]), null, float(areas(together[is_class][:, best : best + 1])[0]))
