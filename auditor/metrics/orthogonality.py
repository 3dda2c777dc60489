"""How little the heatmaps of n x-features overlap: O1 and O2 of their correlation matrix P [XNN].

    O1 = |P|_F - sqrt(n)               O2 = -log det P

Both are 0 when no two maps are correlated, and grow with the correlations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FLOOR = 1e-6  # added to the diagonal before the determinant, so a singular matrix gives a large number and not infinity


@dataclass(frozen=True, slots=True)
class Orthogonality:
    """``o1 = |P|_F - sqrt(n)`` and ``o2 = -log det P``, both 0 at best; ``n`` maps were compared, ``left_out`` not."""

    o1: float
    o2: float
    n: int
    left_out: int


def correlation(maps: Tensor) -> Tensor:
    """Return the correlations (n, n) of heatmaps given as long rows (n, pixels of all images)."""
    centred: Tensor = maps.double() - maps.double().mean(1, keepdim=True)
    unit: Tensor = centred / centred.norm(dim=1, keepdim=True).clamp(min=1e-300)
    return unit @ unit.T


def orthogonality_of(P: Tensor, left_out: int = 0) -> Orthogonality:
    """Return O1 and O2 of a correlation matrix.

    >>> o = orthogonality_of(torch.tensor([[1.0, 0.5], [0.5, 1.0]], dtype=torch.float64))
    >>> round(o.o1, 6), round(o.o2, 5)
    (0.166925, 0.28768)
    """
    n = len(P)
    P = P.double()
    _, logdet = torch.linalg.slogdet(P + FLOOR * torch.eye(n, dtype=torch.float64))
    return Orthogonality(float(P.norm()) - math.sqrt(n), -float(logdet), n, left_out)


def orthogonality(maps: Tensor) -> Orthogonality | None:
    """Measure heatmaps (images, features, height, width); constant ones are left out; None if fewer than two remain."""
    rows = maps.transpose(0, 1).flatten(1)
    varied = rows.std(1) > 0
    if int(varied.sum()) < 2:
        return None
    return orthogonality_of(correlation(rows[varied]), int((~varied).sum()))
