"""Frank-Wolfe on functions whose answer is known in closed form or by an independent solver."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from auditor.kernels.frank_wolfe.polytope import Birkhoff, Box, KSparse, Simplex
from auditor.kernels.frank_wolfe.solver import FrankWolfe, Status, decaying_momentum, solve
from auditor.kernels.frank_wolfe.step_size import Backtracking, MonotoneNonConvex, NonConvex, OpenLoop, ShortStep

RULES = {
    "open": OpenLoop,
    "nonconvex": NonConvex,
    "monotone": MonotoneNonConvex,
    "short": lambda: ShortStep(4.0),
    "backtracking": Backtracking,
}


class Quadratic:
    """f(s) = 1/2 sum_i a_i (s_i - c_i)^2, one problem per row; a <= 4."""

    def __init__(self, batch: int, n: int, seed: int = 0, shift: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.a = 0.5 + 3.5 * torch.rand(batch, n, dtype=torch.float64, generator=generator)
        self.c = torch.randn(batch, n, dtype=torch.float64, generator=generator) + shift
        self.evaluated = 0

    def gradient(self, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        self.evaluated += len(rows)
        away = s - self.c[rows]
        return 0.5 * (self.a[rows] * away.square()).sum(1), self.a[rows] * away

    def minimum(self, k: float) -> Tensor:
        """Bisect the multiplier of sum(s) <= k: s_i = clip(c_i - m / a_i, 0, 1)."""
        low, high = torch.zeros(len(self.c), 1).double(), 50 * torch.ones(len(self.c), 1).double()
        point = lambda m: (self.c - m / self.a).clamp(0, 1)  # noqa: E731
        free = point(low)
        for _ in range(200):
            middle = (low + high) / 2
            over = point(middle).sum(1, keepdim=True) > k
            low, high = torch.where(over, middle, low), torch.where(over, high, middle)
        s = torch.where(free.sum(1, keepdim=True) <= k, free, point(high))
        return 0.5 * (self.a * (s - self.c).square()).sum(1)


@pytest.mark.parametrize("variant", ["vanilla", "away", "pairwise"])
@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("is_lazy", [False, True])
def test_every_variant_and_rule_bounds_the_optimum(variant: str, rule: str, is_lazy: bool) -> None:
    f = Quadratic(3, 13)
    solver = FrankWolfe(variant, RULES[rule](), is_lazy=is_lazy)  # type: ignore[arg-type]
    answer = solve(solver, f, KSparse(4), torch.zeros(3, 13, dtype=torch.float64), max_steps=400)
    excess = answer.value - f.minimum(4)
    assert (excess >= -1e-9).all()
    assert (excess <= answer.gap + 1e-9).all(), "the gap is a certificate"
    assert (excess <= 0.06).all()
    assert KSparse(4).violation(answer.s).max() <= 1e-9
    value, g = f.gradient(answer.s, torch.arange(3))
    exact = (g * (answer.s - KSparse(4).vertex(g))).sum(1)
    torch.testing.assert_close(answer.gap, exact, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(answer.value, value, rtol=1e-9, atol=1e-12)


def test_open_loop_gap_falls_like_one_over_t() -> None:
    f = Quadratic(2, 30)
    scaled = []
    for step in FrankWolfe(rule=OpenLoop()).run(f, KSparse(5), torch.zeros(2, 30, dtype=torch.float64)):
        scaled.append(step.best_gap * (step.t + 1))
        if step.t == 800:
            break
    curvature = 4.0 * 10  # L diam^2 with diam^2 <= 2k
    assert torch.stack(scaled[10:]).max() <= 2 * 27 / 8 * curvature  # Jaggi's constant for the best gap


def test_away_steps_converge_where_plain_steps_zigzag() -> None:
    f = Quadratic(1, 20, seed=3, shift=0.4)
    s = torch.zeros(1, 20, dtype=torch.float64)
    plain = solve(FrankWolfe(rule=Backtracking(), gap_tol=1e-8), f, KSparse(6), s, max_steps=600)
    assert plain.status == [Status.STEP_LIMIT]
    assert plain.gap > 1e-6
    for variant in ("away", "pairwise"):
        fast = solve(FrankWolfe(variant, Backtracking(), gap_tol=1e-8), f, KSparse(6), s, max_steps=600)
        assert fast.status == [Status.CONVERGED]
        assert fast.gap <= 1e-8


def test_monotone_rule_never_climbs_even_on_a_non_convex_function() -> None:
    class Ripples:
        def gradient(self, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                s = s.detach().requires_grad_()
                value = (torch.cos(7 * s) + (s - 0.3).square() * torch.arange(1, 12)).sum(1)
                return value.detach(), torch.autograd.grad(value.sum(), s)[0]

    answer = solve(FrankWolfe(), Ripples(), KSparse(5), torch.zeros(2, 11), max_steps=200)
    assert (answer.history.diff(dim=0) <= 0).all()
    assert answer.history[-1].max() < answer.history[0].min() - 0.5


def test_batch_equals_its_problems_one_by_one() -> None:
    f, k = Quadratic(4, 9), torch.tensor([1, 3, 2, 6])
    start = torch.zeros(4, 9, dtype=torch.float64)
    together = solve(FrankWolfe("away", Backtracking()), f, KSparse(k), start, max_steps=60)
    for row in range(4):
        one = Quadratic(4, 9)
        one.a, one.c = f.a[row : row + 1], f.c[row : row + 1]
        alone = solve(FrankWolfe("away", Backtracking()), one, KSparse(int(k[row])), start[:1], max_steps=60)
        torch.testing.assert_close(together.s[row], alone.s[0], rtol=0, atol=1e-7)
    assert together.value.unique().numel() == 4


def test_problems_that_are_done_are_not_evaluated_again() -> None:
    f = Quadratic(2, 9)
    f.c[0] = 5.0  # its solution is a vertex: one step
    answer = solve(FrankWolfe(), f, KSparse(3), torch.zeros(2, 9, dtype=torch.float64), max_steps=50)
    assert answer.status == [Status.CONVERGED, Status.STEP_LIMIT]
    assert answer.steps == 50
    assert len(answer.history) == 51
    assert f.evaluated == answer.gradient_calls
    g = f.evaluated
    assert g < 2 * 51 + 20  # the first problem asked twice, not fifty times


def test_lazified_runs_ask_the_assignment_solver_less_often() -> None:
    generator = torch.Generator().manual_seed(0)
    goal = torch.stack([torch.eye(12)[torch.randperm(12, generator=generator)] for _ in range(4)]).mean(0).double()

    class Near:
        def gradient(self, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            return 0.5 * (s - goal).square().sum((1, 2)), s - goal

    start = torch.eye(12, dtype=torch.float64)[None]
    eager = solve(FrankWolfe("vanilla", Backtracking()), Near(), Birkhoff(), start, max_steps=200)
    lazy = solve(FrankWolfe("vanilla", Backtracking(), is_lazy=True), Near(), Birkhoff(), start, max_steps=200)
    assert lazy.oracle_calls < eager.oracle_calls / 2
    assert lazy.value <= lazy.gap <= 0.05
    assert Birkhoff().violation(lazy.s).max() < 1e-9


def test_stochastic_momentum_beats_raw_samples() -> None:
    class Sampled(Quadratic):
        generator = torch.Generator().manual_seed(5)

        def gradient(self, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            value, g = super().gradient(s, rows)
            return value, g + 6 * torch.randn(g.shape, dtype=g.dtype, generator=self.generator)

        full_gradient = Quadratic.gradient

    f = Sampled(8, 25)
    start = torch.zeros(8, 25, dtype=torch.float64)
    momentum = solve(
        FrankWolfe("stochastic", NonConvex(), momentum=decaying_momentum), f, KSparse(6), start, max_steps=400
    )
    raw = solve(FrankWolfe("stochastic", NonConvex(), momentum=lambda t: 0.0), f, KSparse(6), start, max_steps=400)
    assert momentum.value.mean() < raw.value.mean()
    assert (momentum.value - f.minimum(6) <= momentum.gap + 1e-9).all()


@pytest.mark.parametrize("polytope", [Box(), Simplex()])
def test_box_and_simplex(polytope: Box | Simplex) -> None:
    f = Quadratic(1, 7)
    start = polytope.vertex(torch.ones(1, 7, dtype=torch.float64))
    answer = solve(FrankWolfe("pairwise", Backtracking()), f, polytope, start, max_steps=2000)
    assert answer.status == [Status.CONVERGED]
    if isinstance(polytope, Box):
        torch.testing.assert_close(answer.s, f.c.clamp(0, 1), rtol=0, atol=1e-3)
    assert polytope.violation(answer.s).max() < 1e-9


def test_nan_stops_only_the_problem_it_is_in() -> None:
    class Holey(Quadratic):
        def gradient(self, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            value, g = super().gradient(s, rows)
            g[(rows == 1) & (s.sum(1) > 0)] = torch.nan
            return value, g

    answer = solve(
        FrankWolfe(), Holey(3, 9, shift=1.0), KSparse(3), torch.zeros(3, 9, dtype=torch.float64), max_steps=30
    )
    assert answer.status[1] == Status.FAILED
    assert answer.s.isfinite().all()
    assert Status.FAILED not in (answer.status[0], answer.status[2])


def test_deadline_and_certificate() -> None:
    f = Quadratic(1, 9)
    answer = solve(FrankWolfe(), f, KSparse(3), torch.zeros(1, 9).double(), max_steps=10**9, deadline=time.monotonic())
    assert answer.status == [Status.TIME_LIMIT]
    assert answer.steps == 0
    assert answer.gap.isfinite().all()


def test_momentum_schedule_known_values() -> None:
    assert decaying_momentum(0) == pytest.approx(0)
    assert decaying_momentum(19) == pytest.approx(5 / 9)  # 27^(2/3) = 9
    assert decaying_momentum(56) == pytest.approx(3 / 4)  # 64^(2/3) = 16


@pytest.mark.parametrize("momentum", [decaying_momentum, lambda t: 0.3])
def test_stochastic_steps_follow_the_averaged_gradient(momentum) -> None:
    """The trajectory of a plain loop: the average starts at the first sample and decays by rho_t."""

    class Changing(Quadratic):
        """A gradient that says something else at every call, the same in every run."""

        def gradient(self, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            value, g = super().gradient(s, rows)
            generator = torch.Generator().manual_seed(self.evaluated)
            return value, g + 3 * torch.randn(g.shape, dtype=g.dtype, generator=generator)

        full_gradient = Quadratic.gradient

    polytope, s = KSparse(4), torch.zeros(2, 13, dtype=torch.float64)
    f = Changing(2, 13)
    steps = FrankWolfe("stochastic", NonConvex(t0=3), momentum=momentum).run(f, polytope, s)
    plain = Changing(2, 13)
    average = plain.gradient(s, torch.arange(2))[1]
    for t in range(12):
        step = next(steps)
        torch.testing.assert_close(step.s, s, rtol=0, atol=1e-12)
        v = polytope.vertex(average)
        torch.testing.assert_close(step.gap, (average * (s - v)).sum(1), rtol=1e-12, atol=1e-12)
        s = s + (t + 4) ** -0.5 * (v - s)
        fresh = plain.gradient(s, torch.arange(2))[1]
        average = momentum(t + 1) * average + (1 - momentum(t + 1)) * fresh


def test_the_answer_is_the_best_iterate_and_the_best_gap_the_least_certificate() -> None:
    """Open-loop steps begin by jumping to a vertex: from a good start the first iterate stays the best."""
    f, k = Quadratic(3, 13, shift=0.3), 4
    good = solve(
        FrankWolfe("away", Backtracking(), gap_tol=1e-3), f, KSparse(k), torch.zeros(3, 13).double(), max_steps=99
    )
    gaps: list[Tensor] = []
    for start in (good.s, torch.zeros(3, 13).double()):
        gaps.clear()
        answer = solve(
            FrankWolfe(rule=OpenLoop()), f, KSparse(k), start, max_steps=30, on_step=lambda step: gaps.append(step.gap)
        )
        torch.testing.assert_close(answer.value, answer.history.amin(0), rtol=0, atol=0)
        torch.testing.assert_close(f.gradient(answer.s, torch.arange(3))[0], answer.value)
        torch.testing.assert_close(answer.best_gap, torch.stack(gaps).amin(0), rtol=0, atol=0)
    assert (answer.best_gap < answer.gap).any()  # the least gap and the least value are of different iterates
    sampled = solve(FrankWolfe("stochastic", NonConvex()), f, KSparse(k), start, max_steps=8)
    assert torch.equal(sampled.best_gap, sampled.gap)  # an averaged gradient certifies nothing on the way


def test_a_step_tried_and_refused_leaves_value_and_gradient_as_they_were() -> None:
    def refuse(line):
        line.try_step(torch.ones_like(line.value), line.rows)
        return torch.zeros_like(line.value)

    start = torch.full((2, 9), 0.1, dtype=torch.float64)
    first, last = FrankWolfe(rule=refuse).run(Quadratic(2, 9), KSparse(3), start)
    assert last.status.tolist() == [Status.STALLED] * 2
    for name in ("s", "value", "gap"):
        assert torch.equal(getattr(first, name), getattr(last, name))
