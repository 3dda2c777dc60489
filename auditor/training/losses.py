"""Training losses as ADMM sees them: a value of the last variable, and its prox.

A prox is ``argmin_z J(y, z) + beta/2 |z - v|^2``. Values and proxes are plain sums over samples: a variable belongs to
one sample, so nothing is averaged. What ``y`` is belongs to the loss: class numbers, or the logits of another network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as nf

from auditor.errors import DataError, OptionError
from auditor.kernels.admm.subproblems import SOFTMAX_CURVATURE, cross_entropy_prox, squared_prox
from auditor.training.cycle import check_labels

LossName = Literal["squared", "cross_entropy", "distillation", "triplet"]
PARTNERS = 4  # samples of one identity that come together in a mini-batch of triplets


class Loss(ABC):
    """A loss J(y, z) of outputs ``z`` (samples, width) and class numbers ``y`` (samples,), or what a loss asks for."""

    name: str

    @abstractmethod
    def value(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the sum over samples."""

    @abstractmethod
    def prox(self, v: Tensor, y: Tensor, beta: float) -> Tensor:
        """Return argmin_z J(y, z) + beta/2 |z - v|^2."""

    def check(self, y: Tensor, n: int, width: int, where: str) -> None:
        """Refuse a ``y`` that does not fit ``n`` samples and a last block of so many outputs."""
        check_labels(y, n, width, where)

    def batches(self, y: Tensor, size: int, generator: torch.Generator) -> list[Tensor]:
        """Return the rows of the mini-batches of one epoch, about ``size`` each."""
        order = torch.randperm(len(y), generator=generator)
        return list(torch.tensor_split(order, max(1, round(len(y) / size))))

    def gradient(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of the value in z."""
        with torch.enable_grad():
            z = z.detach().clone().requires_grad_()
            (grad,) = torch.autograd.grad(self.value(z, y), z)
        return grad


class Squared(Loss):
    """1/2 |z - onehot(y)|^2."""

    name = "squared"

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the sum over samples."""
        return 0.5 * (z - nf.one_hot(y, z.shape[1]).to(z.dtype)).square().sum()

    def prox(self, v: Tensor, y: Tensor, beta: float) -> Tensor:
        """Return the closed form."""
        return squared_prox(nf.one_hot(y, v.shape[1]).to(v.dtype), v, beta)


class CrossEntropy(Loss):
    """Cross-entropy of logits."""

    name = "cross_entropy"

    def __init__(self, steps: int = 10) -> None:
        self.steps = steps

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the sum over samples."""
        return nf.cross_entropy(z, y, reduction="sum")

    def prox(self, v: Tensor, y: Tensor, beta: float) -> Tensor:
        """Return the FISTA solution."""
        return cross_entropy_prox(y, v, beta, self.steps)


class Distillation(Loss):
    """1/2 |z - y|^2 to another network's logits y (samples, width)."""

    name = "distillation"

    def check(self, y: Tensor, n: int, width: int, where: str) -> None:
        """Refuse logits that do not fit."""
        if y.shape != (n, width) or not y.is_floating_point():
            raise DataError(
                f"{where}: distillation wants the logits to imitate, {n} x {width} numbers, got {y.dtype} "
                f"{tuple(y.shape)}; give those of the network on the same samples."
            )

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the sum over samples."""
        return 0.5 * (z - y).square().sum()

    def prox(self, v: Tensor, y: Tensor, beta: float) -> Tensor:
        """Return the closed form."""
        return squared_prox(y, v, beta)


class LabelsAndLogits(Loss):
    """(1 - share) cross-entropy (or squared error) to the labels + share/2 |z - logits|^2 / spread^2.

    ``y`` (samples, 1 + width) holds the label first, -1 where there is none, and then the other network's logits.
    """

    name = "labels and logits"

    def __init__(self, share: float, spread: float, squared: bool = False, steps: int = 10) -> None:
        self.share, self.spread, self.squared, self.steps = share, max(spread, 1e-6), squared, steps

    def check(self, y: Tensor, n: int, width: int, where: str) -> None:
        """Refuse what does not fit."""
        if y.shape != (n, 1 + width) or not y.is_floating_point():
            raise DataError(f"{where}: want {n} rows of a label and {width} logits, got {y.dtype} {tuple(y.shape)}.")
        if bool((y[:, 0] >= width).any()):
            raise DataError(
                f"{where}: class {int(y[:, 0].max())} is beyond the {width} outputs of the last block; give it one per "
                "class."
            )

    def each(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the loss of every sample."""
        labels = y[:, 0].long()
        if self.squared:
            one_hot = nf.one_hot(labels.clamp_min(0), z.shape[1]).to(z.dtype)
            of_labels = 0.5 * (z - one_hot).square().sum(1) * (labels >= 0)
        else:
            of_labels = nf.cross_entropy(z, labels, ignore_index=-1, reduction="none")
        if self.share == 0:
            return of_labels
        distance = ((z - y[:, 1:]) / self.spread).square().sum(1)
        return (1 - self.share) * of_labels + 0.5 * self.share * distance

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the sum over samples."""
        return self.each(z, y).sum()

    def prox(self, v: Tensor, y: Tensor, beta: float) -> Tensor:
        """Return the point after gradient steps with the curvature of all terms, which only descend."""
        of_labels = 1.0 if self.squared else SOFTMAX_CURVATURE
        length = 1 / ((1 - self.share) * of_labels + self.share / self.spread**2 + beta)
        z = v.detach()
        for _ in range(self.steps):
            z = z - length * (self.gradient(z, y) + beta * (z - v))
        return z


class Triplet(Loss):
    """Batch-hard triplets of embeddings: the farthest of its own class against the nearest of another, per anchor."""

    name = "triplet"

    def __init__(self, margin: float = 1.0, steps: int = 10) -> None:
        self.margin, self.steps = margin, steps

    def check(self, y: Tensor, n: int, width: int, where: str) -> None:
        """Refuse identities that make no triplet: the embedding may have any width."""
        check_labels(y, n, None, where)
        counts = torch.bincount(y)
        if int((counts > 1).sum()) < 1:
            raise DataError(
                f"{where}: a triplet needs two samples of one identity and one of another, and no identity has two; "
                "give data with more per identity."
            )

    def batches(self, y: Tensor, size: int, generator: torch.Generator) -> list[Tensor]:
        """Return mini-batches in which a few samples of each identity come together, so that anchors have partners."""
        groups = []
        for identity in torch.unique(y):
            rows = (y == identity).nonzero()[:, 0].cpu()
            mixed = rows[torch.randperm(len(rows), generator=generator)]
            groups += list(mixed.tensor_split(-(-len(rows) // PARTNERS)))  # nearly equal: nobody is left alone
        order = torch.randperm(len(groups), generator=generator).tolist()
        n_batches = max(1, min(round(len(y) / size), len(groups) // 2))
        return [torch.cat([groups[i] for i in part]) for part in np.array_split(order, n_batches)]

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the sum over anchors; an anchor without a partner in the batch counts 0."""
        same = y[:, None] == y[None, :]
        partners = same & ~torch.eye(len(y), dtype=torch.bool, device=y.device)
        usable = partners.any(1) & (~same).any(1)
        if not bool(usable.any()):
            return z.sum() * 0
        distance = (z[:, None] - z[None, :]).square().sum(-1).add(1e-12).sqrt()
        farthest = distance.masked_fill(~partners, -torch.inf).amax(1)[usable]
        nearest = distance.masked_fill(same, torch.inf).amin(1)[usable]
        return nf.relu(farthest - nearest + self.margin).sum()

    def prox(self, v: Tensor, y: Tensor, beta: float) -> Tensor:
        """Return the best point of a short subgradient descent with backtracking; never worse than ``v``."""

        def objective(point: Tensor) -> Tensor:
            return self.value(point, y) + 0.5 * beta * (point - v).square().sum()

        z, step = v.detach(), 0.5 / beta
        with torch.enable_grad():
            for _ in range(self.steps):
                z = z.requires_grad_()
                value = objective(z)
                (grad,) = torch.autograd.grad(value, z)
                z = z.detach()
                for _ in range(8):
                    tried = z - step * grad
                    if objective(tried) <= value:
                        z = tried
                        break
                    step /= 2
        return z.detach()


def loss_of(name: str) -> Loss:
    """Return the loss of that name."""
    table: dict[str, type[Loss]] = {
        "squared": Squared,
        "cross_entropy": CrossEntropy,
        "distillation": Distillation,
        "triplet": Triplet,
    }
    if name not in table:
        raise OptionError(f"training: loss must be one of {', '.join(table)}, got {name!r}.")
    return table[name]()
