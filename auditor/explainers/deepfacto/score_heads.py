"""What reads the scores of a factorization: the network's own blocks above the layer, or a linear head.

Both give logits from scores and say what each factor adds to one of them. Where the head is linear that is a sum. Where
blocks follow, factor k gathers along the straight way from no scores to these

    c_k = integral_0^1  sum_p S_kp (d logit / d S_kp)(t S) dt,

integrated gradients [IntegratedGradients] in the scores, as the contributions of other kinds are at a layer. Either way

    logit of no scores + sum_k c_k + (model's logit - factorized network's logit) = model's logit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from auditor.explainers.contributions import POINTS, TOLERANCE, gauss_legendre
from auditor.kernels.factorization.deepfacto import LinearHead
from auditor.subject.layers import Layout
from auditor.training.factorization import Lift

ROWS = 64  # images that go through the blocks above at once


@dataclass(frozen=True, slots=True)
class Parts:
    """Of each image's target: the logit of no scores, what every factor adds, and the integration error shared out."""

    bias: Tensor  # (batch,)
    parts: Tensor  # (batch, rank)
    error: Tensor  # (batch,)


class ScoreHead(ABC):
    """Scores (batch, rank, positions) to logits."""

    form: ClassVar[str]

    @abstractmethod
    def logits(self, S: Tensor) -> Tensor:
        """Return the logits (batch, classes)."""

    @abstractmethod
    def contributions(self, S: Tensor, targets: Tensor) -> Parts:
        """Return what every factor adds to the logit of each image's target class."""

    @abstractmethod
    def module(self) -> nn.Module:
        """Return it as a module that takes scores (batch, rank, height, width) and can be exported."""

    @property
    def cells(self) -> int:
        """Cells of the grid of means that it reads; 0: positions as they are."""
        return 0


class LinearScoreHead(ScoreHead):
    """A linear map of scores averaged over the cells of a grid: contributions are exact sums."""

    form = "linear"

    def __init__(self, head: LinearHead) -> None:
        self.head = head

    def logits(self, S: Tensor) -> Tensor:
        """Return the logits."""
        return self.head.logits(S)

    def contributions(self, S: Tensor, targets: Tensor) -> Parts:
        """Return the terms of the sum."""
        bias = self.head.bias.double()[targets]
        return Parts(bias, self.head.parts(S.double(), targets), torch.zeros_like(bias))

    def module(self) -> nn.Module:
        """Return it as a module."""
        return PooledLinear(self.head)

    @property
    def cells(self) -> int:
        """Cells of the grid."""
        return int(self.head.pool.shape[1])


class BlocksHead(ScoreHead):
    """An affine lift from the scores to the layer's width, then the network's own blocks above it."""

    form = "blocks"

    def __init__(self, lift: Lift, above: nn.Module, layout: Layout) -> None:
        self.lift, self.above, self.layout = lift, above, layout
        self.top = nn.Sequential(lift, above).eval()

    def logits(self, S: Tensor) -> Tensor:
        """Return the logits, on the CPU."""
        device = self.lift.weight.device
        with torch.no_grad():
            parts = [self.top(native_scores(part.to(device), self.layout)) for part in torch.split(S, ROWS)]
        return torch.cat(parts).float().cpu()

    def contributions(self, S: Tensor, targets: Tensor) -> Parts:
        """Return the integrals along the way from no scores to these."""
        device = self.lift.weight.device
        return along_path(lambda some: self.top(native_scores(some.to(device), self.layout)).cpu(), S.float(), targets)

    def module(self) -> nn.Module:
        """Return it as a module."""
        return FromMaps(self.top, self.layout)


class PooledLinear(nn.Module):
    """Scores averaged over cells, then a linear map."""

    def __init__(self, head: LinearHead) -> None:
        super().__init__()
        self.register_buffer("pool", head.pool.clone())
        self.pool: Tensor
        self.head = nn.Linear(head.weight[0].numel(), len(head.bias))
        with torch.no_grad():
            self.head.weight.copy_(head.weight.flatten(1))
            self.head.bias.copy_(head.bias)

    def forward(self, S: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.head((S.flatten(2) @ self.pool).flatten(1))
        return logits


class FromMaps(nn.Module):
    """The lift and the blocks above, for scores as maps."""

    def __init__(self, top: nn.Module, layout: Layout) -> None:
        super().__init__()
        self.top, self.layout = top, layout

    def forward(self, S: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.top(native_scores(S.flatten(2), self.layout))
        return logits


def axis_of(layout: Layout) -> int:
    """Return the dimension of the channels in a batch of the layer's native outputs."""
    return 1 if layout.name in ("map", "vector") else -1


def native_scores(S: Tensor, layout: Layout) -> Tensor:
    """Return scores (batch, rank, positions) in the layer's own shape, with factors for channels.

    >>> native_scores(torch.zeros(2, 3, 20), Layout("map-last", 7, (4, 5))).shape
    torch.Size([2, 4, 5, 3])
    """
    if layout.name == "map":
        return S.reshape(S.shape[0], S.shape[1], *layout.grid)
    if layout.name == "map-last":
        return S.transpose(1, 2).reshape(S.shape[0], *layout.grid, S.shape[1])
    return S.squeeze(-1) if layout.name == "vector" else S.transpose(1, 2)


def along_path(
    logits_of: Callable[[Tensor], Tensor], S: Tensor, targets: Tensor, points: tuple[int, ...] = POINTS
) -> Parts:
    """Return the integral of every factor by Gauss-Legendre rules, each image by as few points as it needs.

    What a rule of the most points still misses is known, since the sum is, and shared out in proportion to |c_k|.

    >>> parts = along_path(lambda S: (S.sum(-1) ** 2), torch.tensor([[[1.0, 2.0], [3.0, 0.0]]]), torch.tensor([1]))
    >>> parts.bias.tolist(), parts.parts.tolist()
    ([0.0], [[0.0, 9.0]])
    """
    index = targets[:, None]
    with torch.no_grad():
        empty = logits_of(torch.zeros_like(S[:1]))
        full = torch.cat([logits_of(part) for part in torch.split(S, ROWS)]).double().gather(1, index)[:, 0]
    bias = empty.double().expand(len(S), -1).gather(1, index)[:, 0]
    goal, c = full - bias, torch.zeros(S.shape[:2], dtype=torch.float64)
    tolerance = TOLERANCE * full.abs().clamp_min(1.0)
    unfinished = torch.ones(len(S), dtype=torch.bool)
    for n_points in points:
        for rows in torch.split(unfinished.nonzero()[:, 0], ROWS):
            c[rows] = _by_rule(logits_of, S[rows], index[rows], n_points)
        unfinished = (goal - c.sum(1)).abs() > tolerance
        if not bool(unfinished.any()):
            break
    error = goal - c.sum(1)
    weight = c.abs() + 1e-12
    return Parts(bias, c + error[:, None] * weight / weight.sum(1, keepdim=True), error.abs())


def _by_rule(logits_of: Callable[[Tensor], Tensor], S: Tensor, index: Tensor, n_points: int) -> Tensor:
    total = torch.zeros_like(S)
    for t, weight in zip(*gauss_legendre(n_points), strict=True):
        with torch.enable_grad():
            at = (t * S).detach().requires_grad_(True)
            (g,) = torch.autograd.grad(logits_of(at).gather(1, index).sum(), at)
        total += weight * g
    return (S * total).sum(-1).double()
