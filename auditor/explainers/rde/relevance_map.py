"""Relevance maps by rate-distortion: the few cells of an image that keep the network's decision.

    RC-RDE    min D(s)  over  0 <= s <= 1, sum(s) <= k                       one rate k
    MR-RDE    the average of the RC solutions over a list of rates           cells in many solutions rank first
    Ord-RDE   min sum_{k=1}^{n-1} D(P p_k)  over doubly stochastic P         p_k: ones in the first k slots
    L-RDE     min D(s) + penalty |s|_1  over the cube                        the Lagrangian baseline

After [Macdonald2019] and [MacdonaldBesanconPokutta2022]. The published
code fills the last k slots of p_k and sums to n; ours fills the first and leaves k = n out, where D is 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from auditor.errors import NumericsError, OptionError
from auditor.kernels.frank_wolfe.polytope import Birkhoff, KSparse
from auditor.kernels.frank_wolfe.projected_gradient import projected_gradient
from auditor.kernels.frank_wolfe.solver import (
    FrankWolfe,
    Solution,
    Status,
    Step,
    decaying_momentum,
    exact_gradient,
    solve,
)
from auditor.kernels.frank_wolfe.step_size import (
    Backtracking,
    MonotoneNonConvex,
    NonConvex,
    OpenLoop,
    ShortStep,
    StepRule,
)

WARM_T0 = 48  # the first step of an ordering that starts somewhere is 1/7


class Distortion(Protocol):
    """D over masks of m cells: `MonteCarlo` or `AssumedDensity`."""

    def gradient(self, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return D(s) as (rows,) and its gradient (rows, m); a row may be named more than once."""
        ...


Variant = Literal["vanilla", "away", "pairwise", "stochastic"]
Rule = Literal["open-loop", "non-convex", "monotone", "short", "backtracking"]
RatePath = Literal["down", "up", "cold"]  # where the search at a rate begins


@dataclass(frozen=True, slots=True)
class Budget:
    """When a solver stops: steps per rate, seconds for the whole call, or a gap below ``gap_share`` of D(start)."""

    max_steps: int = 200
    timeout_s: float | None = None
    gap_share: float = 1e-3


@dataclass(frozen=True, slots=True)
class Method:
    """Which Frank-Wolfe: variant, step rule (``lipschitz`` for the short one), lazified or not."""

    variant: Variant = "vanilla"
    rule: Rule = "monotone"
    is_lazy: bool = False
    lipschitz: float = 1.0
    momentum: float | None = None  # None: the decaying schedule
    t0: int = 0  # of the non-convex rule: how late in its schedule a run begins

    def solver(self, gap_tol: float | Tensor) -> FrankWolfe:
        """Return a fresh solver: its rule has seen nothing yet."""
        rules: dict[Rule, Callable[[], StepRule]] = {
            "open-loop": OpenLoop,
            "non-convex": lambda: NonConvex(self.t0),
            "monotone": MonotoneNonConvex,
            "short": lambda: ShortStep(self.lipschitz),
            "backtracking": Backtracking,
        }
        if self.variant == "stochastic" and self.rule not in ("open-loop", "non-convex"):
            raise OptionError(
                f"rate-distortion: stochastic steps need a rule that asks for no value of D (open-loop, non-convex), "
                f"got {self.rule!r}; set the rule."
            )
        fixed = self.momentum
        momentum = decaying_momentum if fixed is None else lambda t: fixed
        return FrankWolfe(self.variant, rules[self.rule](), self.is_lazy, momentum, gap_tol)


@dataclass(frozen=True, eq=False)
class Relevance:
    """A relevance map per image with the solutions behind it; cells with a higher ``score`` are kept longer."""

    score: Tensor  # (batch, m) in [0, 1]
    rates: tuple[int, ...]
    masks: Tensor  # (batch, rates, m)
    distortion: Tensor  # (batch, rates) the objective at the masks
    gap: Tensor  # (batch, rates)
    status: list[list[Status]]  # [image][rate]
    steps: int
    seconds: float

    def failed(self) -> int:
        """Return how many of the solves met NaN or infinite values."""
        return sum(status == Status.FAILED for row in self.status for status in row)


def checked_rates(rates: Sequence[int | float], size: int) -> tuple[int, ...]:
    """Return rates as numbers of cells, ascending and without repeats: integers count cells, floats are shares.

    >>> checked_rates([0.1, 0.5, 12], 64)
    (6, 12, 32)
    """
    counts = []
    for rate in rates:
        count = rate if isinstance(rate, int) else round(rate * size)
        if isinstance(rate, float) and 0 < rate <= 1:
            count = max(1, count)
        if not 1 <= count <= size:
            raise OptionError(
                f"rate-distortion: a rate must be 1 to {size} cells (integer) or a share above 0 up to 1.0 (float), "
                f"got {rate}; {sum(_is_bad(r, size) for r in rates)} of {len(rates)} rates are out of range."
            )
        counts.append(int(count))
    if not counts:
        raise OptionError("rate-distortion: no rate given; name at least one, such as 0.1.")
    return tuple(sorted(set(counts)))


def _is_bad(rate: int | float, size: int) -> bool:
    return not (1 <= rate <= size) if isinstance(rate, int) else not (0 < rate <= 1)


def rate_constrained(
    distortion: Distortion,
    k: Tensor,
    start: Tensor,
    budget: Budget,
    method: Method,
    on_step: Callable[[Step], None] = lambda step: None,
    blank: Tensor | None = None,
    min_steps: int = 0,
) -> Solution:
    """Solve RC-RDE for every row: rate ``k`` (rows,), feasible ``start`` (rows, m); ``blank`` is D(0) where known."""
    deadline = None if budget.timeout_s is None else time.monotonic() + budget.timeout_s
    if blank is None:
        blank, _ = distortion.gradient(torch.zeros_like(start), torch.arange(len(k)))
    solver = method.solver(budget.gap_share * blank.nan_to_num(0.0).to(start.dtype))
    answer = solve(
        solver,
        distortion,
        KSparse(k),
        start,
        max_steps=budget.max_steps,
        min_steps=min_steps,
        deadline=deadline,
        on_step=on_step,
    )
    over = KSparse(k).violation(answer.s)
    assert float(over.max()) <= 1e-5 * float(k.max()) + 1e-6, f"left the polytope by {float(over.max())}"
    return answer


def multi_rate(
    distortion: Distortion,
    n_images: int,
    size: int,
    rates: Sequence[int | float],
    budget: Budget | None = None,
    method: Method | None = None,
    *,
    start: Tensor | None = None,
    path: RatePath = "up",
    blank: Tensor | None = None,
    on_step: Callable[[int, Step], None] = lambda k, step: None,
) -> Relevance:
    """Solve RC-RDE at every rate and average: MR-RDE. One rate gives plain RC-RDE.

    Up: each rate starts at the solution of the next smaller one, which is feasible for it, the first at zero. Down:
    each starts at the solution of the next larger one, scaled to its budget, the largest at an even mask; a network
    that sees nothing in an image of noise has useless gradients at zero and good ones there. Or each rate starts at its
    own ``start`` (batch, rates, m). Cold: every rate starts at zero, as published, all in one batch. When the time is
    up before a rate's turn, the answer has fewer rates; the first rate makes a step however late it is. ``blank`` is
    D(0) where known.
    """
    budget, method = budget or Budget(), method or Method()
    counts = checked_rates(rates, size)
    began = time.monotonic()
    zero = torch.zeros(n_images, size)
    if path == "cold" and start is None:
        ks = torch.tensor(counts).repeat(n_images)
        rows, s = _Repeated(distortion, len(counts)), zero.repeat_interleave(len(counts), 0)
        both = rate_constrained(rows, ks, s, budget, method, lambda step: on_step(0, step))
        return _relevance(counts, [both], n_images, began)
    if blank is None:
        blank, _ = distortion.gradient(zero, torch.arange(n_images))
    s = zero if path == "up" else torch.full_like(zero, counts[-1] / size)
    answers: dict[int, Solution] = {}
    for k in counts if path == "up" else counts[::-1]:
        left = None
        if budget.timeout_s is not None:
            left = (budget.timeout_s - (time.monotonic() - began)) / (len(counts) - len(answers))
            if left <= 0 and answers:
                break
        part = Budget(budget.max_steps, left, budget.gap_share)
        ks = torch.full((n_images,), k)
        first = _within(s, k) if start is None else start[:, counts.index(k)]
        report = partial(on_step, k)
        answers[k] = rate_constrained(distortion, ks, first, part, method, report, blank, 0 if answers else 1)
        s = answers[k].s
    done = tuple(sorted(answers))
    return _relevance(done, [answers[k] for k in done], n_images, began)


def _within(s: Tensor, k: int) -> Tensor:
    """Return ``s`` scaled down to the budget: at most ``k`` in every row."""
    return s * (k / s.sum(1, keepdim=True).clamp_min(1e-12)).clamp_max(1)


def _relevance(counts: tuple[int, ...], answers: list[Solution], n: int, began: float) -> Relevance:
    """Put solutions together: one per rate with a row per image, or a single one with the rates side by side."""
    r = len(counts)
    if len(answers) == 1:
        one = answers[0]
        masks, value, gap = one.s.view(n, r, -1), one.value.view(n, r), one.gap.view(n, r)
        status = [one.status[i * r : (i + 1) * r] for i in range(n)]
    else:
        masks = torch.stack([a.s for a in answers], 1)
        value, gap = torch.stack([a.value for a in answers], 1), torch.stack([a.gap for a in answers], 1)
        status = [[a.status[i] for a in answers] for i in range(n)]
    sound = torch.tensor([[code != Status.FAILED for code in row] for row in status])
    if not bool(sound.any(1).all()):
        raise NumericsError(
            f"rate-distortion: {int((~sound).sum())} of {sound.numel()} solves met NaN or infinite gradients, on "
            f"{int((~sound.any(1)).sum())} of {n} images at every rate; check the network's weights and input range."
        )
    weight = sound.to(masks)[..., None]
    score = (masks * weight).sum(1) / weight.sum(1)  # rates with NaN gradients are left out of the average
    steps = sum(a.steps for a in answers)
    return Relevance(score, counts, masks, value, gap, status, steps, time.monotonic() - began)


@dataclass(frozen=True)
class _Repeated:
    """A distortion whose row r is row r // times of another: several rates of each image in one batch."""

    distortion: Distortion
    times: int

    def gradient(self, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.distortion.gradient(s, rows // self.times)

    def full_gradient(self, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return exact_gradient(self.distortion)(s, rows // self.times)


@dataclass(frozen=True, eq=False)
class OrderDistortion:
    """sum_k D(P p_k) over k = 1..n-1 for P (rows, n, n); with ``sampled`` rates, an unbiased estimate of it."""

    distortion: Distortion
    sampled: int | None = None
    generator: torch.Generator | None = None

    def gradient(self, P: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return value (rows,) and gradient (rows, n, n), from all rates or from a sample of them."""
        n = P.shape[1]
        if self.sampled is None or self.sampled >= n - 1:
            return self.full_gradient(P, rows)
        k = torch.randint(1, n, (self.sampled,), generator=self.generator)
        return self._at(P, rows, k, (n - 1) / len(k))

    def full_gradient(self, P: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return value and gradient from all rates."""
        return self._at(P, rows, torch.arange(1, P.shape[1]), 1.0)

    def _at(self, P: Tensor, rows: Tensor, k: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        n = P.shape[1]
        masks = P.cumsum(2)[:, :, k - 1].transpose(1, 2).clamp(0, 1)  # (rows, rates, n)
        value, g = self.distortion.gradient(masks.flatten(0, 1), rows.repeat_interleave(len(k)))
        by_rate = torch.zeros_like(P).index_add_(1, k - 1, g.view(len(rows), len(k), n))
        # Slot j is on at every rate above j: column j of the gradient is the sum of g_k over k > j.
        G = by_rate.flip(1).cumsum(1).flip(1).transpose(1, 2)
        return weight * value.view(len(rows), len(k)).sum(1), weight * G


@dataclass(frozen=True, eq=False)
class Ordering:
    """An Ord-RDE answer: the doubly stochastic P, its certificate, and the score  P (1, ..., 0)."""

    score: Tensor  # (batch, n)
    P: Tensor  # (batch, n, n)
    solution: Solution


def ordering(
    distortion: Distortion,
    n_images: int,
    size: int,
    budget: Budget | None = None,
    method: Method | None = None,
    *,
    sampled: int | None = None,
    start: Tensor | None = None,
    generator: torch.Generator | None = None,
    on_step: Callable[[Step], None] = lambda step: None,
) -> Ordering:
    """Solve Ord-RDE. ``start`` is (batch, n) scores whose ordering to begin with; default: the identity, as published.

    The default method is stochastic with momentum and steps 1 / sqrt(t + 1) when rates are ``sampled``, vanilla with
    those steps otherwise; from a ``start`` the steps are short from the beginning, or the first would forget it.
    """
    budget = budget or Budget()
    late = 0 if start is None else WARM_T0
    method = method or Method("stochastic" if sampled else "vanilla", "non-convex", t0=late)
    if size > 2048:
        raise OptionError(
            f"Ord-RDE: a {size} x {size} ordering matrix is too large to assign; use a grid of at most 2048 cells."
        )
    objective = OrderDistortion(distortion, sampled, generator)
    P = torch.eye(size).repeat(n_images, 1, 1)
    if start is not None:
        slot = start.argsort(dim=1, descending=True).argsort(1)
        P = torch.zeros(n_images, size, size).scatter_(2, slot[..., None], 1)
    deadline = None if budget.timeout_s is None else time.monotonic() + budget.timeout_s
    blank, _ = distortion.gradient(torch.zeros(n_images, size), torch.arange(n_images))
    solver = method.solver(budget.gap_share * (size - 1) * blank)
    answer = solve(solver, objective, Birkhoff(), P, max_steps=budget.max_steps, deadline=deadline, on_step=on_step)
    return Ordering(answer.s @ torch.linspace(1, 0, size), answer.s, answer)


def lagrangian(
    distortion: Distortion, n_images: int, size: int, penalty: float, budget: Budget | None = None
) -> tuple[Tensor, Step]:
    """Solve L-RDE and return the masks (batch, m) and the last step with its certificate."""
    budget = budget or Budget(max_steps=1500)
    deadline = None if budget.timeout_s is None else time.monotonic() + budget.timeout_s
    blank, _ = distortion.gradient(torch.zeros(n_images, size), torch.arange(n_images))
    gap_tol = budget.gap_share * float(blank.nan_to_num(0.0).min())
    for step in projected_gradient(distortion, torch.full((n_images, size), 0.25), penalty, gap_tol=gap_tol):
        if step.t >= budget.max_steps or (deadline is not None and time.monotonic() >= deadline):
            break
    if bool((step.status == Status.FAILED).any()):
        raise NumericsError(
            f"L-RDE: {int((step.status == Status.FAILED).sum())} of {n_images} solves met NaN or infinite gradients; "
            f"check the network's weights and its input range."
        )
    return step.s, step
