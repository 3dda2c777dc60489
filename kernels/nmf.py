"""Non-negative and semi-non-negative matrix factorization  X ~ W S  by HALS or multiplicative updates.

HALS: Cichocki & Phan 2009, with several inner passes per matrix product as in Gillis & Glineur 2012; multiplicative
updates: Lee & Seung 2001, and Ding, Li & Jordan 2010 when W is free. A component that dies is re-seeded from the
worst-fitted position with a zero row of S, which leaves the product W S, and so the objective, as it was.
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

from auditor.kernels.coordinate import sweep
from auditor.kernels.nndsvd import nndsvda, random_start

MU_EPS = 1e-9


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


def _check(X: Tensor, rank: int, signed: bool) -> None:
    if X.ndim != 2:
        raise ValueError(f"NMF: X must be (channels, positions), got shape {tuple(X.shape)}.")
    if not 1 <= rank <= min(X.shape):
        raise ValueError(
            f"NMF: rank must be between 1 and the smaller side of X, got rank {rank} for {X.shape[0]} x "
            f"{X.shape[1]} values; choose a smaller rank or give more positions."
        )
    low, high = (float(v) for v in X.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("NMF: X must be finite, got NaN or infinite values; look at the layer's activations first.")
    if low < 0 and not signed:
        raise ValueError(
            f"NMF: X must be non-negative, got a smallest value of {low:.4g}; "
            "choose a layer after a ReLU, or signed=True."
        )


def _objective(x2: float, B: Tensor, G: Tensor, S: Tensor, SS: Tensor) -> float:
    """Return |X - W S|^2 = |X|^2 - 2 <W^T X, S> + <W^T W, S S^T>, summed in float64."""
    cross = torch.sum(B * S, dim=1, dtype=torch.float64).sum()
    return max(x2 - 2 * float(cross) + float((G.double() * SS.double()).sum()), 0.0)


def _unit_columns(W: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    norms = W.norm(dim=0)
    safe = torch.where(norms > 0, norms, torch.ones_like(norms))
    return W / safe, S * safe[:, None]


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


def _free_basis(XSt: Tensor, SS: Tensor) -> Tensor:
    """Return argmin_W |X - W S| = X S^T (S S^T)^+ for the semi-NMF."""
    inverse: Tensor = torch.linalg.pinv(SS.double(), hermitian=True)
    return (XSt.double() @ inverse).to(XSt.dtype)


def hals(X: Tensor, W: Tensor, S: Tensor, *, signed: bool = False, inner: int = 3) -> Iterator[State]:
    """Yield HALS iterates; each updates W and then S with ``inner`` coordinate passes per matrix product."""
    x2 = float(torch.sum(X * X, dim=1, dtype=torch.float64).sum())
    SS = S @ S.T
    yield State(0, W, S, _objective(x2, W.T @ X, W.T @ W, S, SS))
    for t in itertools.count(1):
        XSt = X @ S.T
        W = _free_basis(XSt, SS) if signed else sweep(W.T.contiguous(), XSt.T.contiguous(), SS, inner).T
        W, S = _unit_columns(W, S)
        B, G = W.T @ X, W.T @ W
        S = sweep(S, B, G, inner)
        SS = S @ S.T
        yield State(t, W, S, _objective(x2, B, G, S, SS))
        W, S = _reseed(X, W, S, B, G, signed)
        SS = S @ S.T


def multiplicative(X: Tensor, W: Tensor, S: Tensor, *, signed: bool = False) -> Iterator[State]:
    """Yield multiplicative-update iterates, W first. With ``signed`` W is the least-squares basis."""
    x2 = float(torch.sum(X * X, dim=1, dtype=torch.float64).sum())
    SS = S @ S.T
    yield State(0, W, S, _objective(x2, W.T @ X, W.T @ W, S, SS))
    for t in itertools.count(1):
        XSt = X @ S.T
        W = _free_basis(XSt, SS) if signed else W * XSt / (W @ SS + MU_EPS)
        B, G = W.T @ X, W.T @ W
        if signed:
            rise = B.clamp_min(0) + (-G).clamp_min(0) @ S
            fall = (-B).clamp_min(0) + G.clamp_min(0) @ S
            S = S * (rise / (fall + MU_EPS)).sqrt()
        else:
            S = S * B / (G @ S + MU_EPS)
        SS = S @ S.T
        yield State(t, W, S, _objective(x2, B, G, S, SS))


def kkt_residual(X: Tensor, W: Tensor, S: Tensor, *, signed: bool = False) -> float:
    """Return the largest |min(factor, gradient)|, each factor in the scale where the other one has unit rows.

    In that scale factor and gradient have the same unit, so the residual is divided by the largest entry of the
    factor and does not change when X is scaled or weight moves between W and S. A free W counts with |gradient|.
    """
    W1, S1 = _unit_columns(W, S)
    grad_S = (W1.T @ W1) @ S1 - W1.T @ X
    worst = float(torch.minimum(S1, grad_S).abs().amax() / S1.amax().clamp_min(1e-30))
    S2t, W2t = _unit_columns(S.T, W.T)
    grad_W = (S2t.T @ S2t) @ W2t - S2t.T @ X.T
    side = grad_W.abs() if signed else torch.minimum(W2t, grad_W).abs()
    return max(worst, float(side.amax() / W2t.abs().amax().clamp_min(1e-30)))


def factorize(
    X: Tensor,
    rank: int,
    *,
    seed: int = 0,
    init: Literal["nndsvda", "random"] = "nndsvda",
    solver: Literal["hals", "mu"] = "hals",
    max_iter: int = 200,
    tol: float = 1e-4,
    W0: Tensor | None = None,
    S0: Tensor | None = None,
    signed: bool = False,
    on_step: Callable[[int, float], None] | None = None,
) -> Factorization:
    """Factorize X (channels, positions) into W (channels, rank) and S (rank, positions) with S >= 0.

    W >= 0 too, unless ``signed`` (semi-NMF). Stops once an iteration lowers the objective by less than ``tol`` of its
    value. ``W0`` and ``S0`` start warm; with only one of them given the other comes from ``init``.

    Example
    -------
    >>> X = torch.outer(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 0.0, 1.0, 2.0]))
    >>> factorize(X, rank=1).relative_error < 1e-3
    True
    """
    _check(X, rank, signed)
    X = X.detach() if X.dtype == torch.float64 else X.detach().float()
    W, S = _start(X, rank, seed, init, W0, S0, signed)
    states = hals(X, W, S, signed=signed) if solver == "hals" else multiplicative(X, W, S, signed=signed)
    best = next(states)
    history, status, n_iter = [best.objective], Status.STEP_LIMIT, 0
    x2 = float(torch.sum(X * X, dim=1, dtype=torch.float64).sum())
    floor = (10 * torch.finfo(X.dtype).eps) ** 2 * x2
    for state in itertools.islice(states, max_iter):
        n_iter = state.t
        if state.objective > history[-1]:  # only rounding can do this: the floor of the number format is reached
            status = Status.CONVERGED
            break
        gain, best = history[-1] - state.objective, state
        history.append(state.objective)
        if on_step is not None:
            on_step(state.t, state.objective)
        if gain <= tol * state.objective or state.objective <= floor:
            status = Status.CONVERGED
            break
    W, S = _unit_columns(best.W, best.S)
    W, S = W.contiguous(), S.contiguous()
    error = float((X - W @ S).norm() / X.norm()) if x2 > 0 else 0.0
    return Factorization(W, S, status, n_iter, history, kkt_residual(X, W, S, signed=signed), error)


def _start(
    X: Tensor, rank: int, seed: int, init: str, W0: Tensor | None, S0: Tensor | None, signed: bool
) -> tuple[Tensor, Tensor]:
    for name, given, wanted in (("W0", W0, (X.shape[0], rank)), ("S0", S0, (rank, X.shape[1]))):
        if given is not None and tuple(given.shape) != wanted:
            raise ValueError(f"NMF: {name} must have shape {wanted}, got {tuple(given.shape)}.")
        if given is not None and not (signed and name == "W0") and float(given.min()) < 0:
            raise ValueError(f"NMF: {name} must be non-negative, got a smallest value of {float(given.min()):.4g}.")
    if W0 is None or S0 is None:
        generator = torch.Generator().manual_seed(seed)
        W, S = (nndsvda if init == "nndsvda" else random_start)(X, rank, generator, signed=signed)
    W, S = (W if W0 is None else W0.to(X)), (S if S0 is None else S0.to(X))
    return W.detach(), S.detach()
