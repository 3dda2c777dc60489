"""Coupled factorization: blocks X_b (rows_b, examples) share one latent F (rank, examples),  X_b ~ P_b F.

    J = sum_b |X_b - P_b F|^2 + l_b |P_b|^2  +  l_F |F|^2                               (base; Frobenius, no 1/2)
        + l_group sum_g sum_i |F[i, g]|_2                                               (few factors per group)
        + l_tv sum_ik sqrt((F_i,k+1 - F_ik)^2 + 1e-6)  +  l_ortho tr(F^T (1 1^T - I) F) (smooth, not co-active)

with P_b >= 0 except for signed blocks, F >= 0 [CoupledNMF]. Choices of ours: the
order of a sweep is all P_b, then F; groups are columns with one label; TV runs along the order of the examples and
enters through a half-quadratic majoriser, whose gradient is split into non-negative parts, so F cannot turn negative;
``scale_rows`` gives the rows of F mean one ([CoupledNMF]: sum one, which is the same with other units for the lambdas);
a factor that dies is frozen. Blocks come already scaled by their weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from auditor.kernels.factorization.coordinate_descent import sweep
from auditor.kernels.factorization.coupled_columns import (
    TINY,
    CoupledColumns,
    Latent,
    Penalties,
    Spread,
    grams,
    here,
    tv_parts,
)
from auditor.kernels.factorization.nmf import Status
from auditor.kernels.factorization.projection import project
from auditor.kernels.factorization.starts import nndsvda


@dataclass(frozen=True)
class CoupledState:
    """One sweep of a solver; its F can be read until the sweep after the next."""

    t: int
    P: list[Tensor]
    latent: Latent
    objective: float

    @property
    def F(self) -> Tensor:
        """The shared latent (rank, examples)."""
        return self.latent.read(self.t)


@dataclass(frozen=True)
class Coupling:
    """Fitted factors and how well they were reached."""

    P: list[Tensor]  # (rows_b, rank) each
    F: Tensor  # (rank, examples)
    status: Status
    n_iter: int
    objective: list[float]
    kkt: float
    relative_errors: list[float]  # per block
    dead: list[int] = field(default_factory=list)  # factors that no example uses


def objective(
    X: Sequence[Tensor], P: Sequence[Tensor], F: Tensor, penalties: Penalties, energies: list[float]
) -> float:
    """Return J from Gram matrices; ``energies`` are |X_b|^2."""
    B, H = grams(X, P)
    Fd = F.double()
    FF = Fd @ Fd.T
    value = penalties.of_latent(F)
    for b, h, p, l2, x2 in zip(B, H, P, penalties.basis, energies, strict=True):
        misfit = x2 - 2 * float((b.double() * Fd).sum()) + float((h.double() * FF).sum())
        value += max(misfit, 0.0) + l2 * float(p.double().square().sum())
    return value


def _basis_step(XFt: Tensor, P: Tensor, FF: Tensor, l2: float, signed: bool, solver: str) -> Tensor:
    """Return the next basis from the sums X F^T and F F^T, float64."""
    eye = torch.eye(FF.shape[0], dtype=FF.dtype, device=FF.device)
    if signed:
        inverse: Tensor = torch.linalg.pinv(FF + l2 * eye, hermitian=True)
        return (XFt @ inverse).to(P.dtype)
    gram, XFt = (FF + l2 * eye).to(P.dtype), XFt.to(P.dtype)
    if solver == "mu":
        return P * XFt / (P @ gram).clamp_min(TINY)
    return sweep(P.T.contiguous(), XFt.T.contiguous(), gram).T.contiguous()


def sweeps(
    X: Sequence[Tensor],
    P: Sequence[Tensor],
    F: Tensor,
    penalties: Penalties,
    *,
    signed: Sequence[bool],
    solver: Literal["hals", "mu"] = "hals",
    normalise: Literal["none", "common", "per-block"] = "none",
    scale_rows: bool = False,
    spread: Spread = here,
) -> Generator[CoupledState, None, None]:
    """Yield the factors after every sweep. J falls as long as nothing is rescaled against its penalties.

    ``spread`` says where parts of the columns live: each keeps its columns of X and F, and gives sums.
    """
    energies = [float(x.double().square().sum()) for x in X]
    P = list(P)
    columns, parts = Latent.parts(X, F, penalties, signed, solver)
    with spread(CoupledColumns, parts) as crew:
        latent = Latent(crew, columns, penalties)
        latent.measure(0, P)
        yield CoupledState(0, P, latent, latent.value(_own_grams(P), P, energies))
        for t in itertools.count(1):
            FF = latent.FF
            P = [
                _basis_step(latent.XFt(b), p, FF, l2, s, solver)
                for b, (p, l2, s) in enumerate(zip(P, penalties.basis, signed, strict=True))
            ]
            latent.step(t, P)
            if normalise != "none" or scale_rows:
                P, factor = _rescaled(P, latent.row_means, normalise, scale_rows)
                latent.scale(t, P, factor)
            yield CoupledState(t, P, latent, latent.value(_own_grams(P), P, energies))


def _own_grams(P: Sequence[Tensor]) -> list[Tensor]:
    return [p.T @ p for p in P]


def _rescaled(P: list[Tensor], row_means: Tensor, normalise: str, scale_rows: bool) -> tuple[list[Tensor], Tensor]:
    """Return the bases, and by what the rows of F are multiplied."""

    def safe(s: Tensor) -> Tensor:
        return torch.where(s > 0, s, torch.ones_like(s))

    if scale_rows:  # rows of F get mean one, their weight moves to the bases
        r = safe(row_means.to(P[0]))
        return [p * r for p in P], 1 / r
    if normalise == "common":  # one scale per factor: the norm of its stacked column
        s = safe(torch.stack([p.square().sum(0) for p in P]).sum(0).sqrt())
        return [p / s for p in P], s
    # as in [CoupledNMF]; nothing can make up for it in F
    return [p / safe(p.norm(dim=0)) for p in P], torch.ones_like(P[0][0])


def start(
    X: Sequence[Tensor], rank: int, seed: int, init: Literal["random", "nndsvda"], signed: Sequence[bool]
) -> tuple[list[Tensor], Tensor]:
    """Return positive factors to start from: |normal| * sqrt(mean / rank), or NNDSVDa of the stacked blocks."""
    generator = torch.Generator().manual_seed(seed)
    if init == "nndsvda":
        W, F = nndsvda(torch.cat([x.abs() for x in X]), rank, generator)
        return [part.contiguous() for part in torch.split(W, [x.shape[0] for x in X])], F
    P = []
    for x in X:
        scale = math.sqrt(float(x.abs().mean()) / rank)
        P.append(torch.randn(x.shape[0], rank, generator=generator, dtype=torch.float64).abs().to(x) * scale)
    scale = math.sqrt(sum(float(x.abs().mean()) for x in X) / len(X) / rank)
    F = torch.randn(rank, X[0].shape[1], generator=generator, dtype=torch.float64).abs().to(X[0]) * scale
    return P, F


def _balanced(P: list[Tensor], F: Tensor, penalties: Penalties) -> tuple[list[Tensor], Tensor]:
    """Return P F unchanged, its scale shared between P and F so that the L2 terms are smallest.

    Every minimiser has this balance. Without it the first sweeps only move scale around, and how they do so depends on
    the lambdas: runs from a common start would part there.
    """
    basis = torch.stack([l2 * p.square().sum(0) for l2, p in zip(penalties.basis, P, strict=True)]).sum(0)
    latent = penalties.latent * F.square().sum(1)
    if not (bool((basis > 0).all()) and bool((latent > 0).all())):
        return P, F
    s = (latent / basis) ** 0.25
    return [p * s for p in P], F / s[:, None]


def check_blocks(X: Sequence[Tensor], names: Sequence[str], rank: int, signed: Sequence[bool]) -> None:
    """Raise one sentence for a block that is empty, of another length, not finite, or negative where it must not be."""
    if not X:
        raise ValueError("coupled: at least one block is needed, got none.")
    n = X[0].shape[1]
    for x, name, free in zip(X, names, signed, strict=True):
        if x.numel() == 0:
            raise ValueError(f"coupled: block {name!r} is empty ({x.shape[0]} x {x.shape[1]}); leave it out.")
        if x.shape[1] != n:
            raise ValueError(
                f"coupled: block {name!r} has {x.shape[1]} examples, the first one {n}; give the same ones."
            )
        low, high = (float(v) for v in x.aminmax())
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError(
                f"coupled: block {name!r} has NaN or infinite values; correct the model or the data first."
            )
        if low < 0 and not free:
            raise ValueError(
                f"coupled: block {name!r} must be non-negative, got a smallest value of {low:.4g}; declare it signed."
            )
    rows = sum(x.shape[0] for x in X)
    if not 1 <= rank <= min(rows, n):
        raise ValueError(f"coupled: rank must be 1 to {min(rows, n)} for {rows} rows and {n} examples, got {rank}.")


def couple(
    X: Sequence[Tensor],
    rank: int,
    *,
    names: Sequence[str] | None = None,
    signed: Sequence[bool] | None = None,
    penalties: Penalties | None = None,
    solver: Literal["hals", "mu"] = "hals",
    normalise: Literal["none", "common", "per-block"] = "none",
    scale_rows: bool = False,
    init: Literal["random", "nndsvda"] = "random",
    seed: int = 0,
    P0: Sequence[Tensor] | None = None,
    F0: Tensor | None = None,
    max_iter: int = 300,
    tol: float = 1e-4,
    on_step: Callable[[int, float], None] | None = None,
    spread: Spread = here,
) -> Coupling:
    """Factorize blocks of the same examples with one shared F. Stops when ten sweeps gain less than ``tol`` of J.

    Example
    -------
    >>> f = torch.tensor([[1.0, 2.0, 0.5]])
    >>> fit = couple([torch.tensor([[1.0], [3.0]]) @ f, torch.tensor([[2.0]]) @ f], 1, penalties=Penalties((0, 0), 0))
    >>> max(fit.relative_errors) < 1e-3
    True
    """
    signed = tuple(signed) if signed is not None else (False,) * len(X)
    check_blocks(X, names or [str(i) for i in range(len(X))], rank, signed)
    penalties = penalties or Penalties((1e-4,) * len(X))
    P, F = _balanced(*start(X, rank, seed, init, signed), penalties)
    P, F = (list(P0) if P0 is not None else P), (F0 if F0 is not None else F)
    states = sweeps(
        X, P, F, penalties, signed=signed, solver=solver, normalise=normalise, scale_rows=scale_rows, spread=spread
    )
    best = next(states)
    history, status = [best.objective], Status.STEP_LIMIT
    monotone = normalise == "none" and not scale_rows
    for state in itertools.islice(states, max_iter):
        if monotone and state.objective > history[-1]:  # only rounding can do this
            status = Status.CONVERGED
            break
        best = state
        history.append(state.objective)
        if on_step is not None:
            on_step(state.t, state.objective)
        if len(history) > 10 and abs(history[-11] - history[-1]) <= tol * history[-1]:
            status = Status.CONVERGED
            break
    F = best.F
    states.close()  # the parts go
    errors = [
        float((x - p @ F).norm() / x.norm()) if float(x.norm()) > 0 else 0.0 for x, p in zip(X, best.P, strict=True)
    ]
    dead = (F.amax(1) == 0).nonzero()[:, 0].tolist()
    kkt = kkt_residual(X, best.P, F, penalties, signed)
    return Coupling(best.P, F, status, len(history) - 1, history, kkt, errors, dead)


def kkt_residual(
    X: Sequence[Tensor], P: Sequence[Tensor], F: Tensor, penalties: Penalties, signed: Sequence[bool]
) -> float:
    """Return max |min(factor, gradient)| over all factors, each relative to its largest entry or gradient part.

    The group norm has no gradient at a zero row and is left out of F's side when it is used.
    """
    B, H = grams(X, P)
    FF = F @ F.T
    worst = 0.0
    if not penalties.group:
        grad = torch.stack(H).sum(0) @ F - torch.stack(B).sum(0) + penalties.latent * F
        grad = grad + penalties.ortho * (F.sum(0) - F)
        if penalties.tv:
            plus, minus = tv_parts(F)
            grad = grad + penalties.tv / 2 * (plus - minus)
        scale = torch.stack(B).sum(0).abs().max().clamp_min(TINY)
        worst = float(torch.minimum(F / F.max().clamp_min(TINY), grad / scale).abs().max())
    for x, p, l2, free in zip(X, P, penalties.basis, signed, strict=True):
        XFt = x @ F.T
        grad = (p @ FF + l2 * p - XFt) / XFt.abs().max().clamp_min(TINY)
        side = grad.abs() if free else torch.minimum(p / p.max().clamp_min(TINY), grad).abs()
        worst = max(worst, float(side.max()))
    return worst


def project_coupled(X: Sequence[Tensor | None], P: Sequence[Tensor], latent: float) -> Tensor:
    """Return  argmin_{F >= 0} sum_b |X_b - P_b F|^2 + latent |F|^2  over the blocks that are there.

    A block that is None is left out with its basis; at least one must be there.
    """
    present = [(x, p) for x, p in zip(X, P, strict=True) if x is not None]
    if not present:
        raise ValueError("coupled: all blocks are missing; give pixels or the activations of at least one layer.")
    return project(torch.cat([x for x, _ in present]), torch.cat([p for _, p in present]), l2=latent)
