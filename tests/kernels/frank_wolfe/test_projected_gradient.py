"""Projected gradient against the closed form of a separable quadratic with an l1 penalty on the cube."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from auditor.kernels.frank_wolfe.projected_gradient import projected_gradient
from auditor.kernels.frank_wolfe.solver import Status


class Quadratic:
    """f(s) = 1/2 sum_i a_i (s_i - c_i)^2, one problem per row; remembers where it was asked."""

    def __init__(self, batch: int = 3, n: int = 13) -> None:
        generator = torch.Generator().manual_seed(0)
        self.a = 0.5 + 3 * torch.rand(batch, n, dtype=torch.float64, generator=generator)
        self.c = torch.randn(batch, n, dtype=torch.float64, generator=generator)
        self.asked: list[tuple[Tensor, list[int]]] = []

    def gradient(self, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        self.asked.append((s.clone(), rows.tolist()))
        return 0.5 * (self.a[rows] * (s - self.c[rows]).square()).sum(1), self.a[rows] * (s - self.c[rows])

    def minimiser(self, penalty: Tensor) -> Tensor:
        return (self.c - penalty[:, None] / self.a).clamp(0, 1)


def last_of(states, most: int = 500):
    return list(itertools.islice(states, most))


@pytest.mark.parametrize("penalty", [0.0, 0.4, torch.tensor([0.0, 0.3, 2.0])])
@pytest.mark.parametrize("step_size", [1.0, 0.01, 50.0])
def test_it_ends_at_the_closed_form(penalty: float | Tensor, step_size: float) -> None:
    f = Quadratic()
    start = torch.full((3, 13), 0.5, dtype=torch.float64)
    steps = last_of(projected_gradient(f, start, penalty, step_size=step_size, gap_tol=1e-6))
    each = torch.as_tensor(penalty, dtype=torch.float64).expand(3)
    s, answer = f.minimiser(each), steps[-1]
    assert (answer.status == Status.CONVERGED).all()
    assert (answer.gap <= 1e-6).all()
    torch.testing.assert_close(answer.s, s, rtol=0, atol=2e-3)  # |s - s*|^2 is at most twice the gap over 0.5
    lowest = 0.5 * (f.a * (s - f.c).square()).sum(1) + each * s.sum(1)
    torch.testing.assert_close(answer.value, lowest, rtol=0, atol=1e-6)
    assert torch.equal(start, torch.full((3, 13), 0.5, dtype=torch.float64))
    for before, after in itertools.pairwise(steps):
        assert (after.value <= before.value).all()
        assert (after.best_gap <= before.best_gap).all()
        assert (before.value - lowest <= before.gap + 1e-9).all()  # the certificate
        assert float(after.s.min()) >= 0
        assert float(after.s.max()) <= 1
    assert [step.t for step in steps] == list(range(len(steps)))
    assert answer.gradient_calls == sum(len(rows) for _, rows in f.asked)
    assert answer.oracle_calls == len(steps)


def test_value_gap_and_first_trial_by_hand() -> None:
    f = Quadratic(1, 2)
    f.a, f.c = torch.tensor([[1.0, 2.0]]).double(), torch.tensor([[0.0, 1.0]]).double()
    s = torch.tensor([[0.5, 0.5]]).double()
    states = projected_gradient(f, s, 0.25, step_size=0.07)
    first = next(states)
    assert float(first.value) == pytest.approx(0.125 + 0.25 + 0.25)
    g = torch.tensor([[0.5 + 0.25, -1.0 + 0.25]]).double()
    assert float(first.gap) == pytest.approx(0.75 * 0.5 + 0.75 * 0.5)  # towards (0, 1)
    assert first.is_exact.all()
    next(states)
    torch.testing.assert_close(f.asked[1][0], s - 0.1 * g)  # a little bolder: 0.07 / 0.7
    f.asked.clear()
    list(itertools.islice(projected_gradient(f, s, 0.25), 2))
    torch.testing.assert_close(f.asked[1][0], (s - g / 0.7).clamp(0, 1))


def test_a_step_is_taken_only_when_the_decrease_suffices() -> None:
    """From s = 0 on (s - 1)^2 / 2 a step of x gains x - x^2 / 2, and 0.65 x are asked: x <= 0.7."""
    f = Quadratic(1, 1)
    f.a, f.c = torch.ones(1, 1).double(), torch.ones(1, 1).double()
    for step_size, tried in ((0.7 * 0.69, [0.69]), (0.7 * 0.99, [0.99, 0.99 * 0.7])):
        f.asked.clear()
        states = projected_gradient(f, torch.zeros(1, 1).double(), 0.0, step_size=step_size)
        next(states)
        assert float(next(states).s) == pytest.approx(tried[-1])
        assert [float(s) for s, _ in f.asked[1:]] == pytest.approx(tried)
    next(states)
    assert float(f.asked[3][0]) == pytest.approx(min(1.0, 0.693 + 0.99 * (1 - 0.693)))  # the size is carried on


def test_rows_that_are_done_or_broken_are_not_asked_again() -> None:
    f = Quadratic(3, 4)
    f.c[0] = 5.0  # the corner is the answer
    plain = f.gradient

    def holey(s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        value, g = plain(s, rows)
        g[rows == 1, 2] = torch.nan  # one entry is enough
        return value, g

    f.gradient = holey  # type: ignore[method-assign]
    start = torch.ones(3, 4, dtype=torch.float64)
    steps = last_of(projected_gradient(f, start, 0.0, gap_tol=1e-9))
    assert steps[-1].status.tolist() == [Status.CONVERGED, Status.FAILED, Status.CONVERGED]
    assert steps[0].status.tolist()[:2] == [Status.CONVERGED, Status.FAILED]
    assert all(rows == [2] for _, rows in f.asked[1:])
    assert torch.equal(steps[-1].s[:2], start[:2])
    assert steps[-1].best_gap[1] == torch.inf


def test_a_gradient_that_lies_stalls() -> None:
    class Liar(Quadratic):
        def gradient(self, s: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            value, g = super().gradient(s, rows)
            return value, -g

    start = torch.full((2, 3), 0.5, dtype=torch.float64)
    f = Liar(2, 3)
    steps = last_of(projected_gradient(f, start, 0.0))
    assert steps[-1].status.tolist() == [Status.STALLED] * 2
    assert torch.equal(steps[-1].s, start)
    assert len(f.asked) == 1 + 60
