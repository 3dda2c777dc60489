"""Frank-Wolfe: minimise a smooth function over a polytope that is known only by its linear minimisation oracle.

    v = argmin_{v in C} <g, v>,   gap = <g, s - v>,   s <- s + gamma d

with  d = v - s  (vanilla),  the better of  v - s  and  s - v_a  (away-step),  or  v - v_a  (pairwise), v_a the worst
vertex of the active set. Lazified runs answer from vertices seen before while those promise half of the gap estimate
phi. Stochastic runs follow a momentum average of sampled gradients. [Jaggi2013],
[LacosteJulienJaggi2015], [Braun2017], [Mokhtari2018], [MacdonaldBesanconPokutta2022].

The gap is the certificate: for convex f it bounds  f(s) - min f  from above; for any smooth f it is zero exactly at
stationary points. The problems of a batch are independent and move together; those that are done stand still and are
not evaluated again. Every problem has its own step size and active set.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, Protocol

import torch
from torch import Tensor

from auditor.kernels.frank_wolfe.active_set import ActiveSet
from auditor.kernels.frank_wolfe.polytope import Polytope
from auditor.kernels.frank_wolfe.step_size import Line, MonotoneNonConvex, StepRule

REFRESH_EVERY = 100  # steps after which an iterate is rebuilt from its active set


class Status(IntEnum):
    """Why a problem stands where it stands."""

    RUNNING = 0
    CONVERGED = 1  # gap below the tolerance
    STALLED = 2  # no step along the direction decreases f in this float format
    FAILED = 3  # NaN or infinite value or gradient: the point is the last one that was finite
    STEP_LIMIT = 4
    TIME_LIMIT = 5


class Objective(Protocol):
    """A batch of smooth functions. ``rows`` names the problems that ``s`` belongs to: s is (len(rows), *shape)."""

    def gradient(self, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return f(s) as (len(rows),) and its gradient, shaped like ``s``."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """One iterate. ``gap`` is exact where ``is_exact``; a lazified row answers with its upper estimate in between."""

    t: int
    s: Tensor  # (batch, *shape)
    value: Tensor  # (batch,)
    gap: Tensor  # (batch,)
    best_gap: Tensor  # (batch,) smallest exact gap so far
    is_exact: Tensor  # (batch,) bool
    status: Tensor  # (batch,) of Status
    oracle_calls: int
    gradient_calls: int


@dataclass(frozen=True, slots=True)
class Solution:
    """The answer of `solve`, with its certificate."""

    s: Tensor
    value: Tensor
    gap: Tensor
    best_gap: Tensor
    status: list[Status]
    steps: int
    oracle_calls: int
    gradient_calls: int
    seconds: float
    history: Tensor  # (steps + 1, batch) values


def decaying_momentum(t: int) -> float:
    """Return  rho_t = 1 - 4 / (8 + t)^(2/3),  the schedule under which averaged stochastic gradients converge."""
    return 1 - 4 / float((8 + t) ** (2 / 3))


@dataclass
class FrankWolfe:
    """A configured solver; iterate ``run(...)``, or let `solve` hold the budget.

    >>> class Quadratic:
    ...     def gradient(self, s, rows):
    ...         return 0.5 * (s - 0.3).square().sum(1), s - 0.3
    >>> from auditor.kernels.frank_wolfe.polytope import KSparse
    >>> answer = solve(FrankWolfe(variant="pairwise"), Quadratic(), KSparse(2), torch.zeros(1, 4), max_steps=99)
    >>> bool(answer.gap < 1e-3)
    True
    """

    variant: Literal["vanilla", "away", "pairwise", "stochastic"] = "vanilla"
    rule: StepRule = field(default_factory=MonotoneNonConvex)
    is_lazy: bool = False
    momentum: Callable[[int], float] = decaying_momentum  # stochastic only
    gap_tol: float | Tensor = 1e-7

    def run(
        self, objective: Objective, polytope: Polytope, s: Tensor, is_late: Callable[[], bool] = lambda: False
    ) -> Iterator[Step]:
        """Yield iterates from the feasible point ``s`` (batch, *shape) until no problem moves any more.

        The rule carries state: give every run a rule of its own. ``is_late`` may end a rule's search for a step.
        """
        n = len(s)
        everyone = torch.arange(n)
        value, g = _evaluated(objective.gradient, s, everyone)
        status = torch.full((n,), Status.RUNNING)
        status[~(value.isfinite() & _finite_rows(g))] = Status.FAILED
        g[status == Status.FAILED] = 0
        best_gap = torch.full_like(value, torch.inf)
        phi = torch.full_like(value, torch.inf)
        keeps_vertices = self.is_lazy or self.variant in ("away", "pairwise")
        active = [ActiveSet(row) for row in s] if keeps_vertices else []
        averaged = g
        n_oracle, n_gradient = 0, n
        t = 0
        while True:
            if self.variant == "stochastic":
                rho = self.momentum(t) if t else 0.0
                averaged = rho * averaged + (1 - rho) * g
                g = averaged
            v, gap, is_exact = self._vertex(polytope, g, s, active, phi, status)
            n_oracle += int(is_exact.sum())
            gap = torch.where(value.isfinite(), gap, torch.nan)
            best_gap = torch.where(is_exact & (status != Status.FAILED), torch.minimum(best_gap, gap), best_gap)
            done = is_exact & (gap <= self.gap_tol) & (status == Status.RUNNING)
            status = torch.where(done, torch.tensor(int(Status.CONVERGED)), status)
            yield Step(t, s, value, gap, best_gap, is_exact, status, n_oracle, n_gradient)
            rows = (status == Status.RUNNING).nonzero().squeeze(1)
            if not len(rows):
                return
            d, gamma_max, moves = self._direction(g, s, v, gap, active, rows)
            trials = _Trials(objective, s, d, value, g)
            gamma = self.rule(Line(t, value, -_dot(g, d), _dot(d, d), gamma_max, rows, trials, is_late))
            gamma[status != Status.RUNNING] = 0
            new_s, new_value, new_g = trials.settle(gamma, value, g)
            n_gradient += trials.n_gradients
            broken = ~(new_value.isfinite() & _finite_rows(new_g))
            stuck = (gamma == 0) & (status == Status.RUNNING) & (not is_late())
            status = torch.where(stuck, torch.tensor(int(Status.STALLED)), status)
            status = torch.where(broken, torch.tensor(int(Status.FAILED)), status)
            s = torch.where(_like(broken, s), s, new_s)
            value, g = torch.where(broken, value, new_value), torch.where(_like(broken, g), g, new_g)
            for row, move in moves.items():
                if not broken[row]:
                    _move(active[row], move, v[row], float(gamma[row]))
            if moves and (t + 1) % REFRESH_EVERY == 0:
                s = torch.stack([a.point() for a in active])
            t += 1

    def _vertex(
        self, polytope: Polytope, g: Tensor, s: Tensor, active: list[ActiveSet], phi: Tensor, status: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return vertex, gap (exact, or an estimate where a stored vertex was good enough) and whether it is exact."""
        is_exact = torch.ones(len(g), dtype=torch.bool)
        if not self.is_lazy:
            v = polytope.vertex(g)
            return v, _dot(g, s - v), is_exact
        v, value = torch.zeros_like(s), _dot(g, s)
        for row in (status == Status.RUNNING).nonzero().squeeze(1).tolist():
            scores = active[row].scores(g[row])
            a = int(scores.argmin())
            if float(value[row] - scores[a]) >= float(phi[row]) / 2 > 0:
                v[row] = active[row].vertex(a)
                is_exact[row] = False
        ask = is_exact.nonzero().squeeze(1)
        if len(ask):
            v[ask] = polytope.vertex(g[ask], ask)
        gap = _dot(g, s - v)
        phi[ask] = torch.where(gap[ask] < phi[ask] / 2, gap[ask], phi[ask])  # at least halved, or kept
        if self.variant in ("vanilla", "stochastic"):
            for row in ask.tolist():
                active[row].remember(v[row])
        return v, torch.where(is_exact, gap, torch.maximum(gap, phi)), is_exact

    def _direction(
        self, g: Tensor, s: Tensor, v: Tensor, gap: Tensor, active: list[ActiveSet], rows: Tensor
    ) -> tuple[Tensor, Tensor, dict[int, tuple[str, int]]]:
        """Return d, the longest feasible step, and for away and pairwise steps what to do with the active set."""
        d, gamma_max = v - s, torch.ones_like(gap)
        moves: dict[int, tuple[str, int]] = {}
        if self.variant not in ("away", "pairwise"):
            return d, gamma_max, moves
        forward = _dot(g, s - v)
        for row in rows.tolist():
            scores = active[row].scores(g[row])
            a = int(scores.argmax())
            w = active[row].weights[a]
            if self.variant == "pairwise":
                d[row] = v[row] - active[row].vertex(a)
                gamma_max[row], moves[row] = w, ("swap", a)
            elif w < 1 and float(scores[a] - (g[row] * s[row]).sum()) > float(forward[row]):
                d[row] = s[row] - active[row].vertex(a)
                gamma_max[row], moves[row] = w / (1 - w), ("away", a)
            else:
                moves[row] = ("towards", -1)
        return d, gamma_max, moves


class _Trials:
    """Remembers value and gradient of the last step tried per row, so that an accepted trial is never redone."""

    def __init__(self, objective: Objective, s: Tensor, d: Tensor, value: Tensor, g: Tensor) -> None:
        self.objective, self.s, self.d = objective, s, d
        self.gamma, self.value, self.g = torch.zeros_like(value), value.clone(), g.clone()
        self.n_gradients = 0

    def __call__(self, gamma: Tensor, rows: Tensor) -> Tensor:
        point = self.s[rows] + _like(gamma[rows], self.s) * self.d[rows]
        self.value[rows], self.g[rows] = _evaluated(self.objective.gradient, point, rows)
        self.gamma[rows] = gamma[rows]
        self.n_gradients += len(rows)
        return self.value[rows]

    def settle(self, gamma: Tensor, value: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return s + gamma d with value and gradient; a row with gamma 0 keeps the ``value`` and ``g`` it had."""
        fresh = ((gamma > 0) & (gamma != self.gamma)).nonzero().squeeze(1)
        if len(fresh):
            self(gamma, fresh)
        still = gamma == 0
        s = self.s + _like(gamma, self.s) * self.d
        return s, torch.where(still, value, self.value), torch.where(_like(still, g), g, self.g)


def solve(
    solver: FrankWolfe,
    objective: Objective,
    polytope: Polytope,
    s: Tensor,
    *,
    max_steps: int,
    min_steps: int = 0,
    deadline: float | None = None,
    on_step: Callable[[Step], None] = lambda step: None,
) -> Solution:
    """Run until every problem is done, ``max_steps`` are made, or the next step would end after ``deadline``.

    ``deadline`` is a reading of ``time.monotonic()``; a step is taken to last as long as the one before it, and
    ``min_steps`` are made in any case.
    The answer is the last iterate of a stochastic run, and otherwise the one with the lowest value. Its gap is exact:
    where the last one was an estimate, the oracle is asked once more.
    """
    started = time.monotonic()
    best_s, best_value = s, torch.full((len(s),), torch.inf, dtype=s.dtype)
    gap, is_exact = best_value, torch.zeros(len(s), dtype=torch.bool)
    history: list[Tensor] = []
    limit = Status.RUNNING
    stepped = started

    def is_late() -> bool:
        return deadline is not None and len(history) > min_steps and time.monotonic() >= deadline

    for step in solver.run(objective, polytope, s, is_late):
        history.append(step.value)
        better = (step.value <= best_value) | (step.t == 0) | (solver.variant == "stochastic")
        best_s = step.s if bool(better.all()) else torch.where(_like(better, step.s), step.s, best_s)
        best_value = torch.where(better, step.value, best_value)
        gap, is_exact = torch.where(better, step.gap, gap), torch.where(better, step.is_exact, is_exact)
        on_step(step)
        if bool((step.status != Status.RUNNING).all()):
            break
        if step.t >= max_steps:
            limit = Status.STEP_LIMIT
            break
        now = time.monotonic()
        if deadline is not None and step.t >= min_steps and now + (now - stepped) >= deadline:
            limit = Status.TIME_LIMIT
            break
        stepped = now
    best_value, gap, n_calls = _certified(solver, objective, polytope, best_s, best_value, gap, is_exact)
    return Solution(
        s=best_s,
        value=best_value,
        gap=gap,
        best_gap=gap if solver.variant == "stochastic" else torch.minimum(step.best_gap, gap),
        status=[Status(int(c)) if c != Status.RUNNING else limit for c in step.status],
        steps=step.t,
        oracle_calls=step.oracle_calls + n_calls,
        gradient_calls=step.gradient_calls + n_calls,
        seconds=time.monotonic() - started,
        history=torch.stack(history),
    )


def _certified(
    solver: FrankWolfe,
    objective: Objective,
    polytope: Polytope,
    s: Tensor,
    value: Tensor,
    gap: Tensor,
    is_exact: Tensor,
) -> tuple[Tensor, Tensor, int]:
    """Return value and gap at ``s``, both exact, and for how many problems they had to be computed afresh.

    A momentum average certifies nothing, and a stored vertex only half.
    """
    unsure = torch.arange(len(s)) if solver.variant == "stochastic" else (~is_exact).nonzero().squeeze(1)
    if len(unsure):
        value, gap = value.clone(), gap.clone()
        value[unsure], g = _evaluated(exact_gradient(objective), s[unsure], unsure)
        gap[unsure] = _dot(g, s[unsure] - polytope.vertex(g, unsure))
    return value, gap, len(unsure)


Gradient = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _evaluated(gradient: Gradient, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return value and gradient in the type of the point, whatever the objective computes in."""
    value, g = gradient(s, rows)
    return value.to(s.dtype), g.to(s.dtype)


def exact_gradient(objective: Objective) -> Gradient:
    """Return the full gradient of an objective whose ``gradient`` may be a sample."""
    full: Gradient = getattr(objective, "full_gradient", objective.gradient)
    return full


def _move(active: ActiveSet, move: tuple[str, int], v: Tensor, gamma: float) -> None:
    kind, a = move
    if kind == "towards":
        active.towards(v, gamma)
    elif kind == "away":
        active.away(a, gamma)
    else:
        active.swap(a, v, gamma)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a.flatten(1) * b.flatten(1)).sum(1)


def _like(flag: Tensor, s: Tensor) -> Tensor:
    return flag.view(-1, *([1] * (s.dim() - 1)))


def _finite_rows(g: Tensor) -> Tensor:
    return g.flatten(1).isfinite().all(1)
