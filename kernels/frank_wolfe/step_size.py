"""Step sizes for Frank-Wolfe: how far to walk along a direction d from s, per batch row.

A rule sees one `Line` at a time: the slope  -<g, d>,  |d|^2,  the longest feasible step, and a way to try a step. Rules
carry their state (halvings, curvature estimates) per row, so one rule object serves one run of the solver.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

MAX_HALVINGS = 40  # the published loop has no cap: with 2^-40 the point no longer moves in any float format
ROUNDING = 4  # units in the last place by which two evaluations of the same value may differ


@dataclass(frozen=True)
class Line:
    """One direction for every row of the batch.

    ``try_step(gamma, rows)`` gives f(s + gamma d) of those rows; ``is_late()`` says that no further try fits the time.
    """

    t: int
    value: Tensor  # (batch,) f(s)
    slope: Tensor  # (batch,) -<g, d> >= 0
    norm2: Tensor  # (batch,) |d|^2
    gamma_max: Tensor  # (batch,)
    rows: Tensor  # (active,) the rows still moving
    try_step: Callable[[Tensor, Tensor], Tensor]
    is_late: Callable[[], bool] = lambda: False


class StepRule(Protocol):
    """Return gamma (batch,); a row that cannot descend gets 0."""

    def __call__(self, line: Line) -> Tensor:
        """Return the step size of every row; rows outside ``line.rows`` are ignored."""
        ...


@dataclass(frozen=True)
class OpenLoop:
    """gamma = 2 / (t + 2): needs nothing, O(1/t) on convex functions."""

    def __call__(self, line: Line) -> Tensor:
        """Return the step size of every row."""
        return line.gamma_max.clamp_max(2 / (line.t + 2))


@dataclass(frozen=True)
class NonConvex:
    """gamma = 1 / sqrt(t + t0 + 1): O(1/sqrt(t)) stationarity on smooth non-convex functions.

    With t0 = 0 the first step goes all the way to a vertex and forgets the start; a start worth keeping wants t0 > 0.
    """

    t0: int = 0

    def __call__(self, line: Line) -> Tensor:
        """Return the step size of every row."""
        return line.gamma_max.clamp_max((line.t + self.t0 + 1) ** -0.5)


@dataclass
class MonotoneNonConvex:
    """gamma = 2^-N / sqrt(t + 1),  N per row raised (never lowered) until f does not grow."""

    halvings: Tensor | None = None

    def __call__(self, line: Line) -> Tensor:
        """Return the step size of every row."""
        if self.halvings is None:
            self.halvings = torch.zeros_like(line.value, dtype=torch.long)
        gamma = torch.zeros_like(line.value)
        pending = line.rows
        while len(pending):
            scale = (line.t + 1) ** -0.5 * 0.5 ** self.halvings[pending].to(line.value.dtype)
            gamma[pending] = torch.minimum(scale, line.gamma_max[pending])
            tried = line.try_step(gamma, pending)
            worse = ~(tried <= line.value[pending])  # NaN counts as worse
            exhausted = worse & (self.halvings[pending] >= MAX_HALVINGS)
            gamma[pending[exhausted]] = 0
            pending = pending[worse & ~exhausted]
            self.halvings[pending] += 1
            if line.is_late():
                gamma[pending] = 0
                break
        return gamma


@dataclass(frozen=True)
class ShortStep:
    """gamma = slope / (L |d|^2)  for a gradient with Lipschitz constant  L:  descends on every L-smooth function."""

    lipschitz: float

    def __call__(self, line: Line) -> Tensor:
        """Return the step size of every row."""
        return torch.minimum(line.slope / (self.lipschitz * line.norm2).clamp_min(1e-30), line.gamma_max)


@dataclass
class Backtracking:
    """The short step with a local estimate M of the curvature: relaxed each step, raised until the model holds.

    Accepts when  f(s + gamma d) <= f(s) - gamma slope + gamma^2 M |d|^2 / 2,  [Pedregosa2020].
    """

    shrink: float = 0.9
    grow: float = 2.0
    curvature: Tensor | None = field(default=None)

    def __call__(self, line: Line) -> Tensor:
        """Return the step size of every row."""
        if self.curvature is None:
            # The curvature for which the longest step is the short step: the most hopeful that is not idle.
            self.curvature = (line.slope / (line.gamma_max * line.norm2).clamp_min(1e-30)).clamp_min(1e-12)
        eps = ROUNDING * torch.finfo(line.value.dtype).eps
        gamma = torch.zeros_like(line.value)
        pending = line.rows
        self.curvature[pending] *= self.shrink
        for _ in range(MAX_HALVINGS):
            slope, norm2 = line.slope[pending], line.norm2[pending]
            curvature = self.curvature[pending]
            step = torch.minimum(slope / (curvature * norm2).clamp_min(1e-30), line.gamma_max[pending])
            gamma[pending] = step
            tried = line.try_step(gamma, pending)
            model = line.value[pending] - step * slope + 0.5 * step**2 * curvature * norm2
            broken = ~(tried <= model + eps * line.value[pending].abs())
            pending = pending[broken]
            if not len(pending):
                return gamma
            self.curvature[pending] *= self.grow
            if line.is_late():
                break
        gamma[pending] = 0
        return gamma
