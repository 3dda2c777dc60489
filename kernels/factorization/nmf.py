"""Non-negative and semi-non-negative matrix factorization  X ~ W S  by HALS or multiplicative updates.

HALS [CichockiPhan2009] with several inner passes per matrix product [GillisGlineur2012]; multiplicative updates
[LeeSeung2001], and [DingLiJordan2010] when W is free. A component that dies is re-seeded from the worst-fitted position
with a zero row of S, which leaves the product W S, and so the objective, as it was.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch
from torch import Tensor

from auditor.kernels.factorization.column_energy import Energy, check_range, energy, inner_product, sample_columns
from auditor.kernels.factorization.coordinate_descent import multiply, sweep
from auditor.kernels.factorization.starts import nndsvda, random_start

MU_EPS = 1e-9
COARSE = 96  # positions per component in the smallest sample of the coarse-to-fine start
COARSE_STEPS = 60
COARSE_TOL = 1e-3
ANSWER_PASSES = 5
CANCELLED = 1e-2  # share of |X|^2 below which |X|^2 - 2 <B, S> + <G, S S^T> has lost digits and the misfit is formed
MANY = 64  # components above which columns of X are the better start


class Status(str, Enum):
    """Why a solver stopped."""

    CONVERGED = "converged"
    STEP_LIMIT = "step limit"


@dataclass(frozen=True)
class Factorization:
    """X ~ W S with unit-norm columns of W, and how well it was reached."""

    W: Tensor  # (channels, rank)
    S: Tensor  # (rank, positions)
    status: Status
    n_iter: int
    objective: list[float]  # |X - W S|_F^2 at the start and after every iteration; never rises
    kkt: float  # scale-free optimality residual, 0 at a stationary point
    relative_error: float  # |X - W S|_F / |X|_F


@dataclass(frozen=True)
class State:
    """One iterate of a solver."""

    t: int
    W: Tensor
    S: Tensor
    objective: float
    B: Tensor  # W^T X, the costly product, stored to be used again


def _checked(X: Tensor, rank: int, signed: bool) -> Energy:
    if X.ndim != 2:
        raise ValueError(f"NMF: X must be (channels, positions), got shape {tuple(X.shape)}.")
    if not 1 <= rank <= min(X.shape):
        raise ValueError(
            f"NMF: rank must be between 1 and the smaller side of X, got rank {rank} for {X.shape[0]} x "
            f"{X.shape[1]} values; choose a smaller rank or give more positions."
        )
    measured = energy(X)
    check_range(measured, "NMF: X", signed=signed)
    return measured


def _objective(x2: float, B: Tensor, G: Tensor, S: Tensor, SS: Tensor) -> float:
    """Return |X - W S|^2 = |X|^2 - 2 <W^T X, S> + <W^T W, S S^T>, summed in float64."""
    return max(x2 - 2 * inner_product(B, S) + inner_product(G, SS), 0.0)


def _unit_columns(W: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    norms = _norms(W)
    return W / norms, S * norms[:, None]


def _reseed(X: Tensor, W: Tensor, S: Tensor, B: Tensor, G: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Give every dead component the residual of one badly fitted position, with a zero row of S."""
    dead = ((W.abs().amax(0) == 0) | (S.amax(1) == 0)).nonzero()[:, 0]
    if dead.numel() == 0:
        return W, S
    misfit = (X * X).sum(0) - 2 * (B * S).sum(0) + (S * (G @ S)).sum(0)
    worst = misfit.topk(dead.numel()).indices
    residual = X[:, worst] - W @ S[:, worst]
    residual = residual if signed else residual.clamp_min(0)
    W, S = W.clone(), S.clone()
    W[:, dead] = residual / residual.norm(dim=0).clamp_min(torch.finfo(X.dtype).tiny)
    S[dead] = 0
    return W, S


def free_basis(XSt: Tensor, SS: Tensor) -> Tensor:
    """Return argmin_W |X - W S| = X S^T (S S^T)^+ for the semi-NMF."""
    inverse: Tensor = torch.linalg.pinv(SS.double(), hermitian=True)
    return (XSt.double() @ inverse).to(XSt.dtype)


def hals(
    X: Tensor, W: Tensor, S: Tensor, x2: float, *, B: Tensor | None = None, signed: bool = False, inner: int = 3
) -> Iterator[State]:
    """Yield extrapolated HALS iterates [AngGillis2019] of |X - W S|^2, |X|^2 = ``x2``; B is W^T X if at hand.

    Each step updates W and then S by ``inner`` coordinate passes per matrix product, W and S both pushed on by
    ``beta`` times their last move. A step that would raise the objective is taken again without the push.
    """
    B = W.T @ X if B is None else B
    objective = _objective(x2, B, W.T @ W, S, S @ S.T)
    yield State(0, W, S, objective, B)
    accepted = start = last = _unit_columns(W, S)  # the pair yielded, with S pushed on, and before W was pushed on
    beta, beta_limit = 0.5, 1.0
    for t in itertools.count(1):
        for (W, S), push in ((start, beta), (accepted, 0.0)):
            SS, XSt = S @ S.T, X @ S.T
            if signed:
                W_next = torch.where(SS.diagonal() > 0, free_basis(XSt, SS), W)  # a new seed has no scores yet
            else:
                W_next = sweep(W.T.contiguous(), XSt.T.contiguous(), SS, inner).T
            norms = _norms(W_next)
            W_next = W_next / norms
            W = _pushed(W_next, last[0] / norms, push, free=signed)
            B, G = W.T @ X, W.T @ W
            S = sweep(S * norms[:, None], B, G, inner)
            value = _objective(x2, B, G, S, S @ S.T)
            if value <= objective:
                break
            beta, beta_limit = beta / 2, beta
        objective = value
        yield State(t, W, S, value, B)
        beta_limit = min(1.0, 1.05 * beta_limit)
        beta = min(beta_limit, 1.1 * beta)
        start, last, accepted = (W, _pushed(S, accepted[1] * norms[:, None], push)), (W_next, S), (W, S)
        W_seed, S_seed = _reseed(X, W, S, B, G, signed)
        if W_seed is not W:
            accepted = start = last = W_seed, S_seed


def _norms(W: Tensor) -> Tensor:
    norms = W.norm(dim=0)
    return torch.where(norms > 0, norms, torch.ones_like(norms))


def _pushed(new: Tensor, old: Tensor, push: float, free: bool = False) -> Tensor:
    if push == 0:
        return new
    moved = torch.lerp(old, new, 1 + push)
    return moved if free else moved.clamp_min_(0)


def multiplicative(
    X: Tensor, W: Tensor, S: Tensor, x2: float, *, B: Tensor | None = None, signed: bool = False
) -> Iterator[State]:
    """Yield multiplicative-update iterates, W first. With ``signed`` W is the least-squares basis."""
    SS, B = S @ S.T, W.T @ X if B is None else B
    yield State(0, W, S, _objective(x2, B, W.T @ W, S, SS), B)
    for t in itertools.count(1):
        XSt = X @ S.T
        W = free_basis(XSt, SS) if signed else multiply(W.T, XSt.T, SS, MU_EPS).T
        B, G = W.T @ X, W.T @ W
        if signed:
            rise = B.clamp_min(0) + (-G).clamp_min(0) @ S
            fall = (-B).clamp_min(0) + G.clamp_min(0) @ S
            S = S * (rise / (fall + MU_EPS)).sqrt()
        else:
            S = multiply(S, B, G, MU_EPS)
        SS = S @ S.T
        yield State(t, W, S, _objective(x2, B, G, S, SS), B)


def kkt_residual(X: Tensor, W: Tensor, S: Tensor, *, B: Tensor | None = None, signed: bool = False) -> float:
    """Return the largest |min(factor, gradient)|, each factor in the scale where the other one has unit rows.

    In that scale factor and gradient have the same unit, so the residual is divided by the largest entry of the
    factor and does not change when X is scaled or weight moves between W and S. A free W counts with |gradient|. ``B``
    is W^T X where it is at hand.
    """
    W1, S1 = _unit_columns(W, S)
    grad_S = (W1.T @ W1) @ S1 - (W.T @ X if B is None else B) / _norms(W)[:, None]
    worst = float(torch.minimum(S1, grad_S).abs().amax() / S1.amax().clamp_min(1e-30))
    S2t, W2t = _unit_columns(S.T, W.T)
    grad_W = (S2t.T @ S2t) @ W2t - (X @ S2t).T
    side = grad_W.abs() if signed else torch.minimum(W2t, grad_W).abs()
    return max(worst, float(side.amax() / W2t.abs().amax().clamp_min(1e-30)))


def factorize(
    X: Tensor,
    rank: int,
    *,
    seed: int = 0,
    init: Literal["auto", "nndsvda", "columns", "random"] = "auto",
    solver: Literal["hals", "mu"] = "hals",
    max_iter: int = 200,
    tol: float = 1e-4,
    W0: Tensor | None = None,
    S0: Tensor | None = None,
    signed: bool = False,
    target_error: float = 0.0,
    on_step: Callable[[int, float], None] | None = None,
) -> Factorization:
    """Factorize X (channels, positions) into W (channels, rank) and S (rank, positions) with S >= 0.

    W >= 0 too, unless ``signed`` (semi-NMF). ``init="auto"`` is NNDSVDa up to rank 64 and energetic columns of X above,
    where they start lower for less work; NNDSVDa and random starts are first fitted to samples of the positions when
    there are many. Stops once ten iterations would lower the objective by less than ``tol`` of its value, or at a
    relative error of ``target_error``. ``W0`` and ``S0`` start warm; one of them alone is completed.

    Example
    -------
    >>> X = torch.outer(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 0.0, 1.0, 2.0]))
    >>> factorize(X, rank=1).relative_error < 1e-3
    True
    """
    X = X.detach() if X.dtype == torch.float64 else X.detach().float()
    measured = _checked(X, rank, signed)
    W, S, B = _start(X, rank, measured, seed, init, W0, S0, signed)
    solve = hals if solver == "hals" else multiplicative
    floor = max(10 * torch.finfo(X.dtype).eps, target_error) ** 2 * measured.total
    states = solve(X, W, S, measured.total, B=B, signed=signed)
    status, best, history = _iterate(states, floor, max_iter, tol, on_step)
    kkt = kkt_residual(X, best.W, best.S, B=best.B, signed=signed)
    W, S = _unit_columns(best.W, best.S)
    W, S = W.contiguous(), S.contiguous()
    misfit = best.objective
    if misfit < CANCELLED * measured.total:
        misfit = energy(X - W @ S).total
    error = math.sqrt(misfit / measured.total) if measured.total > 0 else 0.0
    return Factorization(W, S, status, len(history) - 1, history, kkt, error)


def _iterate(
    states: Iterator[State],
    floor: float,
    max_iter: int,
    tol: float,
    on_step: Callable[[int, float], None] | None = None,
) -> tuple[Status, State, list[float]]:
    best = next(states)
    history = [best.objective]
    if best.objective <= floor:
        return Status.CONVERGED, best, history
    for state in itertools.islice(states, max_iter):
        if state.objective > history[-1]:  # only rounding can do this: the floor of the number format is reached
            return Status.CONVERGED, best, history
        gain, best = history[-1] - state.objective, state
        history.append(state.objective)
        if on_step is not None:
            on_step(state.t, state.objective)
        if gain <= tol / 10 * state.objective or state.objective <= floor:
            return Status.CONVERGED, best, history
    return Status.STEP_LIMIT, best, history


def _start(
    X: Tensor, rank: int, measured: Energy, seed: int, init: str, W0: Tensor | None, S0: Tensor | None, signed: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return W, S and, where the start has formed it, W^T X."""
    for name, start, shape in (("W0", W0, (X.shape[0], rank)), ("S0", S0, (rank, X.shape[1]))):
        if start is not None and tuple(start.shape) != shape:
            raise ValueError(f"NMF: {name} must have shape {shape}, got {tuple(start.shape)}.")
        if start is not None and not (signed and name == "W0") and float(start.min()) < 0:
            raise ValueError(f"NMF: {name} must be non-negative, got a smallest value of {float(start.min()):.4g}.")
    generator = torch.Generator().manual_seed(seed)
    if W0 is not None:
        W = W0.detach().to(X)
        return (W, S0.detach().to(X), None) if S0 is not None else (W, *_answer(X, W))
    if S0 is not None:
        S = S0.detach().to(X)
        return random_start(X, rank, generator, signed=signed)[0], S, None
    return _coarse_to_fine(X, rank, measured, generator, init, signed)


def _answer(X: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
    """Return a few coordinate passes towards argmin_{S >= 0} |X - W S|^2, and W^T X."""
    B, G = W.T @ X, W.T @ W
    S = (B / G.diagonal().clamp_min(torch.finfo(X.dtype).tiny)[:, None]).clamp_min(0)
    return sweep(S, B, G, ANSWER_PASSES), B


def _coarse_to_fine(
    X: Tensor, rank: int, measured: Energy, generator: torch.Generator, init: str, signed: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a start for all positions, fitted on growing samples of them: W needs far fewer positions than S has."""
    if init == "columns" or (init == "auto" and rank > MANY and not signed):
        W = sample_columns(X, measured.columns, rank, generator)
        W = (W if signed else W.clamp_min(0)) / _norms(W)
        return W, *_answer(X, W)
    begin = random_start if init == "random" else nndsvda
    sizes = [size for size in (COARSE * rank * 4**level for level in range(12)) if size <= X.shape[1] // 3]
    if not sizes:
        return *begin(X, rank, generator, signed=signed), None
    for level, size in enumerate(sizes):
        part = sample_columns(X, measured.columns, size, generator)
        W, S, B = (*begin(part, rank, generator, signed=signed), None) if level == 0 else (W, *_answer(part, W))
        states = hals(part, W, S, energy(part).total, B=B, signed=signed)
        W = _iterate(states, 0.0, COARSE_STEPS, COARSE_TOL)[1].W
    return W, *_answer(X, W)
