"""Step-size rules: formulas, and searches against plain loops over one problem."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from auditor.kernels.frank_wolfe.step_size import (
    MAX_HALVINGS,
    Backtracking,
    Line,
    MonotoneNonConvex,
    NonConvex,
    OpenLoop,
    ShortStep,
)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Along:
    """f along a direction, one function of gamma per row; counts the tries."""

    def __init__(self, *f: Callable[[float], float]) -> None:
        self.f, self.tries = f, [0] * len(f)

    def __call__(self, gamma: Tensor, rows: Tensor) -> Tensor:
        for row in rows.tolist():
            self.tries[row] += 1
        return vector(*(self.f[row](float(gamma[row])) for row in rows.tolist()))

    def line(
        self, t: int = 0, slope: float = 1.0, norm2: float = 1.0, longest: float = 1.0, rows=None, late=False
    ) -> Line:
        n = len(self.f)
        every = torch.arange(n) if rows is None else torch.tensor(rows)
        value = vector(*(f(0.0) for f in self.f))
        same = torch.ones(n, dtype=torch.float64)
        return Line(t, value, slope * same, norm2 * same, longest * same, every, self, lambda: late)


def test_rules_without_a_search() -> None:
    along = Along(lambda g: g, lambda g: -g)
    assert OpenLoop()(along.line(t=0)).tolist() == [1.0, 1.0]
    assert OpenLoop()(along.line(t=3)).tolist() == [0.4, 0.4]
    assert OpenLoop()(along.line(t=3, longest=0.3)).tolist() == [0.3, 0.3]
    torch.testing.assert_close(NonConvex()(along.line(t=3)), vector(0.5, 0.5))
    torch.testing.assert_close(NonConvex(t0=5)(along.line(t=3)), vector(1 / 3, 1 / 3))
    assert NonConvex()(along.line(t=0)).tolist() == [1.0, 1.0]
    assert NonConvex()(along.line(t=3, longest=0.3)).tolist() == [0.3, 0.3]
    torch.testing.assert_close(ShortStep(4.0)(along.line(slope=2.0, norm2=5.0)), vector(0.1, 0.1))
    torch.testing.assert_close(ShortStep(4.0)(along.line(slope=2.0, norm2=5.0, longest=0.05)), vector(0.05, 0.05))
    assert ShortStep(4.0)(along.line(slope=0.0, norm2=0.0)).tolist() == [0.0, 0.0]
    assert along.tries == [0, 0]


def descends_up_to(limit: float) -> Callable[[float], float]:
    return lambda gamma: gamma * (gamma - limit)  # at the limit it is as low as at the start


def test_the_monotone_rule_halves_until_f_does_not_grow_and_remembers() -> None:
    along = Along(descends_up_to(1.0), descends_up_to(0.25), descends_up_to(0.2), lambda g: g and math.nan)
    rule = MonotoneNonConvex()
    gamma = rule(along.line(rows=[0, 1, 2]))
    assert gamma.tolist() == [1.0, 0.25, 0.125, 0.0]
    assert along.tries == [1, 3, 4, 0]
    assert rule.halvings.tolist() == [0, 2, 3, 0]
    gamma = rule(along.line(t=3, rows=[0, 1, 2]))  # 2^-N / sqrt(4)
    assert gamma.tolist() == [0.5, 0.125, 0.0625, 0.0]
    assert along.tries == [2, 4, 5, 0]
    assert rule(along.line(t=8, longest=0.1, rows=[0, 1])).tolist() == [0.1, pytest.approx(1 / 12), 0.0, 0.0]


def test_the_monotone_rule_gives_up_after_the_last_halving_and_at_once_when_late() -> None:
    never = Along(lambda g: g, lambda g: g and math.nan)
    rule = MonotoneNonConvex()
    assert rule(never.line()).tolist() == [0.0, 0.0]
    assert never.tries == [MAX_HALVINGS + 1] * 2
    assert rule.halvings.tolist() == [MAX_HALVINGS] * 2
    assert rule(never.line()).tolist() == [0.0, 0.0]
    assert never.tries == [MAX_HALVINGS + 2] * 2
    late = Along(descends_up_to(1.0), lambda g: g)
    assert MonotoneNonConvex()(late.line(late=True)).tolist() == [1.0, 0.0]
    assert late.tries == [1, 1]


def plain_backtracking(f, slope, norm2, longest, curvature, shrink=0.9, grow=2.0):
    """One row, number by number; returns gamma and the curvature that is carried on."""
    curvature = slope / (longest * norm2) if curvature is None else curvature
    curvature *= shrink
    for _ in range(MAX_HALVINGS):
        gamma = min(slope / (curvature * norm2), longest)
        model = f(0) - gamma * slope + 0.5 * gamma**2 * curvature * norm2
        if f(gamma) <= model + 4 * torch.finfo(torch.float64).eps * abs(f(0)):
            return gamma, curvature
        curvature *= grow
    return 0.0, curvature


@pytest.mark.parametrize("longest", [1.0, 0.3])
@pytest.mark.parametrize("rates", [{}, {"shrink": 0.5, "grow": 3.0}])
def test_backtracking_equals_the_plain_loop(longest: float, rates: dict[str, float]) -> None:
    def quadratic(c):
        return lambda g: 7.0 - 2.0 * g + 0.5 * c * 5.0 * g * g

    functions = [quadratic(c) for c in (0.01, 0.5, 3.0, 40.0)]
    along, rule, curvature = Along(*functions), Backtracking(**rates), [None] * 4
    for _ in range(3):
        gamma = rule(along.line(slope=2.0, norm2=5.0, longest=longest))
        for row, f in enumerate(functions):
            want, curvature[row] = plain_backtracking(f, 2.0, 5.0, longest, curvature[row], **rates)
            assert float(gamma[row]) == pytest.approx(want, rel=1e-12)
            assert float(rule.curvature[row]) == pytest.approx(curvature[row], rel=1e-12)
    assert along.tries[0] < along.tries[3]


def test_backtracking_forgives_rounding_and_nothing_more() -> None:
    for ulps, gamma in ((3.5, 1.0), (6.0, 0.0)):
        wrong = ulps * torch.finfo(torch.float64).eps
        flat = Along(lambda g, wrong=wrong: 1.0 + wrong * (g > 0))
        rule = Backtracking(shrink=1.0, curvature=vector(1e-20))
        assert rule(flat.line(slope=1e-20)).tolist() == [gamma]


def test_backtracking_gives_up() -> None:
    never = Along(lambda g: g, lambda g: g and math.nan, descends_up_to(9.0))
    gamma = Backtracking()(never.line(slope=1.0))
    assert gamma.tolist()[:2] == [0.0, 0.0]
    assert gamma[2] > 0
    assert never.tries[:2] == [MAX_HALVINGS] * 2
    late = Along(lambda g: g, descends_up_to(9.0))
    gamma = Backtracking()(late.line(slope=1.0, late=True))
    assert gamma[0] == 0
    assert gamma[1] > 0
    assert late.tries == [1, 1]
    some = Along(descends_up_to(9.0), descends_up_to(9.0))
    assert Backtracking()(some.line(rows=[1])).tolist()[0] == 0
    assert some.tries == [0, 1]


def test_backtracking_starts_at_the_curvature_of_the_longest_step_and_never_at_none() -> None:
    rule = Backtracking()
    rule(Along(lambda g: -6.0 * g).line(slope=6.0, norm2=4.0, longest=0.5))
    torch.testing.assert_close(rule.curvature, vector(0.9 * 3.0))
    rule = Backtracking()
    rule(Along(lambda g: -6.0 * g).line(slope=6.0, norm2=0.02, longest=0.5))
    torch.testing.assert_close(rule.curvature, vector(0.9 * 600.0))
    rule = Backtracking()
    rule(Along(lambda g: 0.0).line(slope=0.0, norm2=0.0))
    torch.testing.assert_close(rule.curvature, vector(0.9e-12))
