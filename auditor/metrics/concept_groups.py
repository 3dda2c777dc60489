"""Groups of concepts: those that fire together in the same places are one thing, whatever a basis made of it.

Two concepts are alike by the geometric mean of the cosine of their score maps, over positions and pooled over images,
and the overlap of their top images. Average linkage joins them as long as they are more alike than score maps whose
images and positions are shuffled ever are.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from torch import Tensor

TOP = 0.1  # share of the images that are the top images of a concept
SHUFFLES = 10
MARGIN = 0.1  # by which a join must be beyond chance: score maps of one layer are never quite independent


def likeness(S: Tensor) -> Tensor:
    """Return how alike concepts are, (concepts, concepts), from score maps S >= 0 (images, concepts, positions).

    >>> S = torch.rand(20, 1, 9, generator=torch.Generator().manual_seed(0)).repeat(1, 2, 1)
    >>> likeness(S).round(decimals=3).tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    rows = S.transpose(0, 1).flatten(1).double()
    unit = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-30)
    n_top = max(1, round(TOP * len(S)))
    is_top = torch.zeros(S.shape[1], len(S), dtype=torch.float64)
    is_top.scatter_(1, S.amax(-1).T.topk(n_top, dim=1).indices, 1.0)
    overlap = is_top @ is_top.T / n_top
    cosines: Tensor = ((unit @ unit.T).clamp(0, 1) * overlap).sqrt()
    return cosines


def groups(S: Tensor, *, seed: int = 0) -> list[list[int]]:
    """Return groups of concepts from score maps (images, concepts, positions), each in order, by first concept.

    >>> a, b = torch.rand(2, 60, 1, 16, generator=torch.Generator().manual_seed(0)) ** 4
    >>> groups(torch.cat([a, b, a], 1))
    [[0, 2], [1]]
    """
    n = S.shape[1]
    if n < 2:
        return [[k] for k in range(n)]
    generator = torch.Generator().manual_seed(seed)
    chance = max(float(_joins(likeness(_shuffled(S, generator))).max()) for _ in range(SHUFFLES))
    height = 1 - min(1.0, chance + MARGIN)
    of_concept = fcluster(_tree(likeness(S)), t=height, criterion="distance")
    joined: dict[int, list[int]] = {}
    for k, group in enumerate(of_concept.tolist()):
        joined.setdefault(group, []).append(k)
    return sorted(joined.values())


def dominance(by_class: Tensor, parts: list[list[int]]) -> Tensor:
    """Return per class the share of positive contributions that its largest group gives; NaN where there are none.

    >>> dominance(torch.tensor([[3.0], [1.0], [-5.0]]), [[0, 1], [2]]).tolist()
    [1.0]
    """
    positive = by_class.clamp_min(0).double()
    of_group = torch.stack([positive[part].sum(0) for part in parts])
    return torch.where(positive.sum(0) > 0, of_group.amax(0) / positive.sum(0), torch.nan)


def _shuffled(S: Tensor, generator: torch.Generator) -> Tensor:
    """Return score maps with the images, and the positions, of every concept in an order of its own."""
    columns = []
    for k in range(S.shape[1]):
        images = torch.randperm(len(S), generator=generator)
        positions = torch.randperm(S.shape[2], generator=generator)
        columns.append(S[images, k][:, positions])
    return torch.stack(columns, 1)


def _tree(likeness: Tensor) -> NDArray[np.float64]:
    distance = (1 - likeness).clamp_min(0)
    distance.fill_diagonal_(0)
    tree: NDArray[np.float64] = linkage(squareform(distance.numpy(), checks=False), method="average")
    return tree


def _joins(likeness: Tensor) -> NDArray[np.float64]:
    """Return how alike the two sides of every join are."""
    joins: NDArray[np.float64] = 1 - _tree(likeness)[:, 2]
    return joins
