"""Matching two sets of concepts one to one by their cosines (Hungarian method)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Match:
    """Pairs ``left[i] ~ right[i]`` with their cosine; the best assignment in the sum of cosines."""

    left: Tensor
    right: Tensor
    cosine: Tensor


def match_columns(A: Tensor, B: Tensor) -> Match:
    """Match the columns of A (d, m) and B (d, n) so that the sum of cosines is largest; a zero column has cosine 0.

    >>> match_columns(torch.eye(3), torch.eye(3)[:, [2, 0, 1]]).right.tolist()
    [1, 2, 0]
    """

    def unit(M: Tensor) -> Tensor:
        M = M.double()
        norms = M.norm(dim=0)
        return torch.where(norms > 0, M / norms.clamp_min(1e-300), torch.zeros_like(M))

    cosines = (unit(A).T @ unit(B)).cpu().numpy()
    rows, columns = linear_sum_assignment(-cosines)
    picked = np.asarray(cosines[rows, columns])
    return Match(torch.from_numpy(rows), torch.from_numpy(columns), torch.from_numpy(picked))
