"""Projected gradient on the unit cube with an l1 penalty:  minimise  f(s) + penalty |s|_1  over  0 <= s <= 1.

The Lagrangian way to a sparse mask, kept as the baseline of the rate-constrained one. Backtracking with a sufficient
decrease [Macdonald2019]: start 0.25, factor 0.7, decrease 0.65.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from auditor.kernels.frank_wolfe.polytope import Box
from auditor.kernels.frank_wolfe.solver import Objective, Status, Step

SHRINK, DECREASE, MAX_SHRINKS = 0.7, 0.65, 60


def projected_gradient(
    objective: Objective, s: Tensor, penalty: float | Tensor, *, step_size: float = 1.0, gap_tol: float = 1e-7
) -> Iterator[Step]:
    """Yield iterates from ``s`` (batch, n) in the cube; ``value`` includes the penalty (one number, or (batch,)).

    The gap is Frank-Wolfe's over the cube, so the certificates of both methods read alike.
    """
    n = len(s)
    penalty = torch.as_tensor(penalty, dtype=s.dtype).expand(n)
    size = torch.full((n,), step_size, dtype=s.dtype)
    status = torch.full((n,), Status.RUNNING)
    calls, t = 0, 0
    best_gap = torch.full((n,), torch.inf, dtype=s.dtype)

    def evaluate(point: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += len(rows)
        value, grad = objective.gradient(point, rows)
        return value + penalty[rows] * point.sum(1), grad + penalty[rows, None]

    value, g = evaluate(s, torch.arange(n))
    while True:
        status[~(value.isfinite() & g.isfinite().all(1)) & (status == Status.RUNNING)] = Status.FAILED
        gap = (g * (s - Box().vertex(g))).sum(1)
        best_gap = torch.minimum(best_gap, gap.nan_to_num(torch.inf))
        status[(gap <= gap_tol) & (status == Status.RUNNING)] = Status.CONVERGED
        yield Step(t, s, value, gap, best_gap, torch.ones(n, dtype=torch.bool), status.clone(), t + 1, calls)
        pending = (status == Status.RUNNING).nonzero().squeeze(1)
        if not len(pending):
            return
        s, new_value, new_g = s.clone(), value.clone(), g.clone()
        size[pending] /= SHRINK  # a little bolder than last time
        for _ in range(MAX_SHRINKS):
            current = s[pending]
            candidate = (current - size[pending, None] * g[pending]).clamp(0, 1)
            tried, grad = evaluate(candidate, pending)
            enough = tried <= value[pending] + DECREASE * (g[pending] * (candidate - current)).sum(1)
            done = pending[enough]
            s[done], new_value[done], new_g[done] = candidate[enough], tried[enough], grad[enough]
            pending = pending[~enough]
            if not len(pending):
                break
            size[pending] *= SHRINK
        status[pending] = Status.STALLED
        value, g, t = new_value, new_g, t + 1
