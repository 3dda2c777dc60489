"""Suspicious labels: images whose label the model contradicts with confidence, after confident learning.

[ConfidentLearning]: class j is confident for an image when its probability p_j is at least t_j, the mean of p_j over
the images labelled j. An image whose most probable confident class is not its label is suspicious; the probabilities
must be out of sample, as they are where a model that was trained on other images says them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FEW = 5  # images of a class below which its threshold is chance


@dataclass(frozen=True, slots=True)
class Suspicion:
    """An image (row) with its label, the class that the model holds it for, and the margin p_suggested - p_label."""

    row: int
    label: int
    suggested: int
    margin: float


def suspicious_labels(probabilities: Tensor, labels: Tensor) -> list[Suspicion]:
    """Return the suspicious images of ``probabilities`` (n, classes) and ``labels`` (n,; -1 unknown), worst first.

    >>> p = torch.tensor([[0.9, 0.1]] * 6 + [[0.1, 0.9]] * 6 + [[0.02, 0.98]])
    >>> suspicious_labels(p, torch.tensor([0] * 6 + [1] * 6 + [0]))
    [Suspicion(row=12, label=0, suggested=1, margin=0.96)]
    """
    n, k = probabilities.shape
    p = probabilities.double()
    labelled = (labels >= 0) & (labels < k)
    member = torch.zeros(n, k, dtype=torch.float64)
    member[labelled] = torch.nn.functional.one_hot(labels[labelled], k).double()
    counts = member.sum(0)
    thresholds = torch.where(counts >= FEW, (member * p).sum(0) / counts.clamp_min(1), torch.inf)
    confident = p >= thresholds
    best = torch.where(confident, p, -torch.inf).argmax(1)
    rows = (labelled & confident.any(1) & (best != labels)).nonzero()[:, 0].tolist()
    suspicions = [
        Suspicion(i, int(labels[i]), int(best[i]), round(float(p[i, best[i]] - p[i, labels[i]]), 6)) for i in rows
    ]
    return sorted(suspicions, key=lambda s: (-s.margin, s.row))
