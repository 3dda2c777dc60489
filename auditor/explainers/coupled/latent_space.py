"""Read-outs of a shared latent F (concepts, examples): neighbours, classes, sensitivity, distinct factors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from auditor.metrics.concept_vectors import RisingShare


def unit(M: Tensor, dim: int) -> Tensor:
    """Return M with unit vectors along ``dim``; a zero vector stays zero."""
    norms = M.norm(dim=dim, keepdim=True)
    return torch.where(norms > 0, M / norms.clamp_min(1e-300 if M.dtype == torch.float64 else 1e-30), M * 0)


def top_examples(F: Tensor, n: int = 20) -> Tensor:
    """Return the indices (concepts, n) of the examples with the largest score of each concept."""
    return F.argsort(dim=1, descending=True, stable=True)[:, :n]


def class_scores_of(F: Tensor, labels: Tensor, n_classes: int) -> Tensor:
    """Return (concepts, classes): each concept's score summed over the examples of a class; unknown labels left out."""
    labelled = labels >= 0
    out = torch.zeros(F.shape[0], n_classes, dtype=F.dtype)
    return out.index_add_(1, labels[labelled], F[:, labelled])


def purity(F: Tensor, labels: Tensor, n: int = 20) -> float:
    """Return the mean share of the most frequent label in the concepts' top lists; NaN without labels."""
    shares = []
    for top in top_examples(F, n):
        of_labelled = labels[top][labels[top] >= 0]
        if of_labelled.numel():
            shares.append(int(of_labelled.bincount().max()) / of_labelled.numel())
    return sum(shares) / len(shares) if shares else math.nan


@dataclass(frozen=True, slots=True)
class Distinctness:
    """Cosine matrix of a layer's factors, its eigenvalues, the mean of the larger half and the off-diagonal RMS.

    The trace is the number of concepts, so the mean of all eigenvalues is always one: only the top half is informative.
    """

    cosines: Tensor  # (concepts, concepts)
    eigenvalues: Tensor  # descending
    top_mean: float
    off_diagonal: float


def distinctness(basis: Tensor) -> Distinctness:
    """Measure how far the columns of a basis (neurons, concepts) are from being orthogonal."""
    U = unit(basis.double(), 0)
    C = U.T @ U
    d = C.shape[0]
    values = torch.linalg.eigvalsh(C).flip(0)
    off = C - torch.diag(C.diagonal())
    rms = math.sqrt(float(off.square().sum()) / (d * (d - 1))) if d > 1 else 0.0
    return Distinctness(C, values, float(values[: math.ceil(d / 2)].mean()), rms)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Nearest examples of one image in the latent space, and how their strongest concepts are distributed."""

    index: list[int]
    similarity: list[float]
    concepts: list[float]  # share of the neighbours whose strongest concept it is


def neighbours(f: Tensor, F: Tensor, n: int = 30, skip: int | None = None) -> Neighbours:
    """Return the ``n`` examples of F nearest to f by cosine; a blank example has none. ``skip`` is f itself."""
    cosine = unit(F.double(), 0).T @ unit(f.double(), 0)
    if skip is not None:
        cosine[skip] = -math.inf
    nearest = cosine.argsort(descending=True, stable=True)[: min(n, F.shape[1] - (skip is not None))]
    strongest = F[:, nearest].argmax(0).bincount(minlength=F.shape[0]).double()
    share = strongest / max(1, nearest.numel())
    return Neighbours(nearest.tolist(), [float(c) for c in cosine[nearest]], share.tolist())


def one_dimensional_order(rows: Tensor) -> Tensor:
    """Return an order of the examples of ``rows`` (numbers >= 0, examples) in which neighbours are alike.

    Spectral seriation: examples are sorted by the second eigenvector of the random walk whose steps go by cosine. An
    example without any activation comes last.
    """
    from scipy.sparse.linalg import LinearOperator, eigsh

    U = unit(rows.clamp(min=0).double(), 0)
    n = U.shape[1]
    degree = U.T @ U.sum(1)  # of each example, the sum of its cosines
    blank = degree <= 0
    root = torch.where(blank, 0.0, degree.clamp_min(1e-30).rsqrt())
    if n - int(blank.sum()) < 3:
        return blank.double().argsort(stable=True)
    still = torch.where(blank, 0.0, degree.clamp_min(0).sqrt())
    still = still / still.norm()  # the first eigenvector, which says nothing

    def step(v: Any) -> Any:
        x = torch.as_tensor(v, dtype=torch.float64).reshape(-1)
        x = x - still * (still @ x)
        x = root * (U.T @ (U @ (root * x)))
        return (x - still * (still @ x)).numpy()

    start = torch.linspace(-1, 1, n, dtype=torch.float64).numpy()
    _, vectors = eigsh(LinearOperator((n, n), matvec=step, dtype=np.float64), k=1, which="LA", v0=start, tol=1e-6)
    position = torch.from_numpy(vectors[:, 0].copy()) * root
    position = position if float(position[0]) <= float(position[-1]) else -position  # the sign is arbitrary
    return torch.where(blank, torch.inf, position).argsort(stable=True)


def mask_of(latent: Tensor) -> Tensor:
    """Return where a latent image lies above its median."""
    return latent > latent.median()


class ConceptSensitivity(RisingShare):
    """For which share of a class's images more of a concept would raise the class's logit.

    The quantity of TCAV scores [TCAV], but the direction of a concept is its factor in the layer: no classifier is
    trained and nothing is tested against random directions. ``auditor tcav`` does both.
    """

    def __init__(self, directions: Tensor, n_classes: int) -> None:
        super().__init__(directions.T, n_classes)  # given as (neurons of the layer, concepts)

    def scores(self) -> Tensor:
        """Return (concepts, classes): shares in [0, 1], NaN for a class without images."""
        return super().scores().float()
