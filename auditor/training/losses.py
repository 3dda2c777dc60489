"""Training losses as ADMM sees them: a value of the last variable, and its prox.

A prox is ``argmin_z J(y, z) + beta/2 |z - v|^2``. Values and proxes are plain sums over samples: a variable belongs to
one sample, so nothing is averaged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as nf

from auditor.errors import OptionError
from auditor.kernels.admm.subproblems import cross_entropy_prox, squared_prox

LossName = Literal["squared", "cross_entropy", "triplet"]


class Loss(ABC):
    """A loss J(y, z) of outputs ``z`` (samples, width) and class numbers ``y`` (samples,)."""

    name: str

    @abstractmethod
    def value(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the sum over samples."""

    @abstractmethod
    def prox(self, v: Tensor, y: Tensor, beta: float) -> Tensor:
        """Return argmin_z J(y, z) + beta/2 |z - v|^2."""

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


class Triplet(Loss):
    """Batch-hard triplets of embeddings: the farthest of its own class against the nearest of another, per anchor."""

    name = "triplet"

    def __init__(self, margin: float = 1.0, steps: int = 10) -> None:
        self.margin, self.steps = margin, steps

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
    table: dict[str, type[Loss]] = {"squared": Squared, "cross_entropy": CrossEntropy, "triplet": Triplet}
    if name not in table:
        raise OptionError(f"training: loss must be one of {', '.join(table)}, got {name!r}.")
    return table[name]()
