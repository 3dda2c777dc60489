"""Columns of a coupled factorization: some examples with their part of F, which stays where they are.

A sweep is one question to all parts: given the bases P_b, they move their columns of F and return sums over them
(`Sums`), from which the next bases follow. Sums are added in float64 in the order of the parts, so a sweep gives the
same whoever holds which part. Columns of one group are in one part; where total variation couples neighbours, a part is
given the columns beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from auditor.kernels.factorization.coordinate_descent import DEAD, sweep

TV_EPS = 1e-6
TINY = 1e-30
PART = 512  # examples of a part, more where a group has more


@dataclass(frozen=True)
class Penalties:
    """Weights of the terms of J; ``basis`` holds one per block. ``groups`` are labels of the examples, or none."""

    basis: tuple[float, ...]
    latent: float = 1.0
    group: float = 0.0
    tv: float = 0.0
    ortho: float = 0.0
    groups: Tensor | None = None  # (examples,) integer labels

    def of_latent(self, F: Tensor) -> float:
        """Return the terms of J that see F alone."""
        value = self.latent * float(F.double().square().sum())
        if self.group:
            value += self.group * group_norm(F, self.groups)
        if self.tv:
            value += self.tv * float(_tv_steps(F).double().sum())
        if self.ortho:
            value += self.ortho * co_activation(F)
        return value


def co_activation(F: Tensor) -> float:
    """Return tr(F^T (1 1^T - I) F) = sum over examples of sum_{i != j} F_i F_j."""
    F = F.double()
    return float(F.sum(0).square().sum() - F.square().sum())


def group_norm(F: Tensor, groups: Tensor | None) -> float:
    """Return sum_g sum_i |F[i, g]|_2; without labels all examples are one group."""
    return sum(float(F[:, members].double().norm(dim=1).sum()) for members in members_of(F.shape[1], groups))


def shrink_group(v: Tensor, threshold: float) -> Tensor:
    """Return the prox of  threshold * |.|_2  on the non-negative orthant, along the last axis: clip, then shrink."""
    y: Tensor = v.clamp_min(0)
    keep: Tensor = (1 - threshold / y.norm(dim=-1, keepdim=True).clamp_min(TINY)).clamp_min(0)
    return y * keep


def members_of(n: int, groups: Tensor | None) -> list[Tensor]:
    """Return the columns of every group; without labels all are one."""
    if groups is None:
        return [torch.arange(n)]
    return [(groups == label).nonzero()[:, 0] for label in sorted(set(groups.tolist()))]


def _tv_steps(F: Tensor) -> Tensor:
    return (F.diff(dim=1).square() + TV_EPS).sqrt()


def tv_parts(F: Tensor, before: Tensor | None = None, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (plus, minus), both >= 0, with plus - minus the gradient of the smoothed TV; steps frozen.

    ``before`` and ``after`` are columns beside those of F, where F is only a part.
    """
    columns = [c for c in (before, F, after) if c is not None]
    first = 0 if before is None else 1
    whole = torch.cat(columns, 1)
    weight = 1 / _tv_steps(whole)
    zero = torch.zeros_like(F[:, :1])
    of_left, of_right = torch.cat([zero, weight], 1), torch.cat([weight, zero], 1)
    left, right = torch.cat([zero, whole[:, :-1]], 1), torch.cat([whole[:, 1:], zero], 1)
    plus, minus = whole * (of_left + of_right), left * of_left + right * of_right
    inner = slice(first, first + F.shape[1])
    return plus[:, inner], minus[:, inner]


@dataclass(frozen=True)
class Sums:
    """What one part adds: X_b F^T and <P_b^T X_b, F> per block, F F^T, row sums, penalties, columns at its ends."""

    XFt: tuple[Tensor, ...]
    cross: tuple[float, ...]
    FF: Tensor
    rows: Tensor
    penalty: float
    first: Tensor
    last: Tensor


@dataclass(frozen=True)
class PartOfColumns:
    """What a part is made of: its columns of every block and of F, and what all parts share."""

    X: tuple[Tensor, ...]
    F: Tensor
    penalties: Penalties
    signed: tuple[bool, ...]
    solver: str


class CoupledColumns:
    """One part; the last two states of its F are kept, by their number."""

    def __init__(self, part: PartOfColumns) -> None:
        self.part = part
        self.F: dict[int, Tensor] = {0: part.F}

    def step(self, t: int, P: Sequence[Tensor], before: Tensor | None = None, after: Tensor | None = None) -> Sums:
        """Move F from state t - 1 to t for these bases, between the neighbours' columns; return the sums of it."""
        part, F = self.part, self.F[t - 1]
        B, H = grams(part.X, P)
        F = latent_step(F, B, H, part.signed, part.penalties, part.solver, (before, after))
        self._keep(t, F)
        return self._sums(F, B)

    def sums(self, t: int, P: Sequence[Tensor]) -> Sums:
        """Return the sums of state t."""
        return self._sums(self.F[t], grams(self.part.X, P)[0])

    def scaled(self, t: int, P: Sequence[Tensor], factor: Tensor) -> Sums:
        """Multiply the rows of state t by factors and return its sums for these bases."""
        self.F[t] = self.F[t] * factor[:, None]
        return self.sums(t, P)

    def latent(self, t: int) -> Tensor:
        """Return the columns of F of state t."""
        return self.F[t]

    def _keep(self, t: int, F: Tensor) -> None:
        self.F = {t - 1: self.F[t - 1], t: F}

    def _sums(self, F: Tensor, B: list[Tensor]) -> Sums:
        Fd = F.double()
        return Sums(
            tuple((x @ F.T).double() for x in self.part.X),
            tuple(float((b.double() * Fd).sum()) for b in B),
            Fd @ Fd.T,
            Fd.sum(1),
            self.part.penalties.of_latent(F),
            F[:, :1].clone(),
            F[:, -1:].clone(),
        )


class Crew(Protocol):
    """Parts that live somewhere."""

    def ask(self, method: str, *arguments: Any, each: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Call a method of every part with the arguments, and with its own of ``each`` behind them."""


Spread = Callable[[Callable[[Any], Any], Sequence[Any]], AbstractContextManager[Crew]]


class _Here:
    def __init__(self, members: list[Any]) -> None:
        self.members = members

    def ask(self, method: str, *arguments: Any, each: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Ask one after the other."""
        rows = each if each is not None else [()] * len(self.members)
        return [getattr(m, method)(*arguments, *row) for m, row in zip(self.members, rows, strict=True)]


@contextmanager
def here(make: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Crew]:
    """Give parts that live in this process."""
    yield _Here([make(item) for item in items])


def cut(n: int, groups: Tensor | None, is_grouped: bool) -> list[Tensor]:
    """Return the columns of every part: runs of neighbours, or whole groups.

    >>> [len(part) for part in cut(1200, None, False)]
    [512, 512, 176]
    """
    if not is_grouped:
        return list(torch.split(torch.arange(n), PART))
    parts: list[list[Tensor]] = [[]]
    for members in members_of(n, groups):
        if sum(map(len, parts[-1])) >= PART:
            parts.append([])
        parts[-1].append(members.cpu())
    return [torch.cat(part).sort().values for part in parts]


@dataclass
class Latent:
    """F in parts: asked for steps and sums, put together only when somebody reads it."""

    crew: Crew
    columns: list[Tensor]
    penalties: Penalties
    now: list[Sums] = field(default_factory=list)

    @classmethod
    def parts(
        cls, X: Sequence[Tensor], F: Tensor, penalties: Penalties, signed: Sequence[bool], solver: str
    ) -> tuple[list[Tensor], list[PartOfColumns]]:
        """Return columns and contents of every part."""
        columns = cut(F.shape[1], penalties.groups, bool(penalties.group))
        return columns, [
            PartOfColumns(
                tuple(x[:, rows].contiguous() for x in X) if len(columns) > 1 else tuple(X),
                F[:, rows].contiguous() if len(columns) > 1 else F,
                penalties
                if penalties.groups is None
                else replace(penalties, groups=penalties.groups[rows.to(penalties.groups.device)]),
                tuple(signed),
                solver,
            )
            for rows in columns
        ]

    def step(self, t: int, P: Sequence[Tensor]) -> None:
        """Move to state t."""
        neighbours: list[tuple[Any, ...]] | None = None
        if self.penalties.tv:
            ends = [None, *(s.last for s in self.now[:-1])], [*(s.first for s in self.now[1:]), None]
            neighbours = list(zip(*ends, strict=True))
        self.now = self.crew.ask("step", t, list(P), each=neighbours)

    def measure(self, t: int, P: Sequence[Tensor]) -> None:
        """Take the sums of state t."""
        self.now = self.crew.ask("sums", t, list(P))

    def scale(self, t: int, P: Sequence[Tensor], factor: Tensor) -> None:
        """Multiply the rows of state t."""
        self.now = self.crew.ask("scaled", t, list(P), factor)

    def read(self, t: int) -> Tensor:
        """Return F of state t, one of the last two."""
        parts = self.crew.ask("latent", t)
        F: Tensor = torch.cat(parts, 1)
        return F[:, torch.cat(self.columns).argsort()] if len(parts) > 1 else F

    @property
    def FF(self) -> Tensor:
        """F F^T, float64."""
        return added([s.FF for s in self.now])

    @property
    def row_means(self) -> Tensor:
        """Mean of every row of F, float64."""
        return added([s.rows for s in self.now]) / sum(map(len, self.columns))

    def XFt(self, b: int) -> Tensor:
        """Return X_b F^T, float64."""
        return added([s.XFt[b] for s in self.now])

    def value(self, H: Sequence[Tensor], P: Sequence[Tensor], energies: Sequence[float]) -> float:
        """Return J; ``energies`` are |X_b|^2."""
        FF, penalties = self.FF, self.penalties
        value = sum(s.penalty for s in self.now)
        if penalties.tv:
            for left, right in zip(self.now[:-1], self.now[1:], strict=True):
                value += penalties.tv * float(_tv_steps(torch.cat([left.last, right.first], 1)).double().sum())
        for b, (h, p, l2, x2) in enumerate(zip(H, P, penalties.basis, energies, strict=True)):
            cross = sum(s.cross[b] for s in self.now)
            misfit = x2 - 2 * cross + float((h.double() * FF).sum())
            value += max(misfit, 0.0) + l2 * float(p.double().square().sum())
        return value


def added(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum, from the first to the last."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def grams(X: Sequence[Tensor], P: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return P_b^T X_b and P_b^T P_b."""
    return [p.T @ x for p, x in zip(P, X, strict=True)], [p.T @ p for p in P]


def latent_step(
    F: Tensor,
    B: list[Tensor],
    H: list[Tensor],
    signed: Sequence[bool],
    penalties: Penalties,
    solver: str,
    beside: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Return F after one step for these bases, given by P^T X and P^T P; ``beside`` are the columns next to it."""
    b, h = torch.stack(B).sum(0), torch.stack(H).sum(0)
    eye = torch.eye(h.shape[0], dtype=h.dtype, device=h.device)
    if penalties.group:
        return _group_step(F, b, h + penalties.latent * eye + penalties.ortho * (1 - eye), penalties)
    if solver == "hals" and not penalties.tv:
        return sweep(F, b, h + penalties.latent * eye + penalties.ortho * (1 - eye))
    num, den, exponent = b, h @ F, 1.0
    if any(signed):
        rise = [g.clamp_min(0) + (-k).clamp_min(0) @ F for g, k in zip(B, H, strict=True)]
        fall = [(-g).clamp_min(0) + k.clamp_min(0) @ F for g, k in zip(B, H, strict=True)]
        num, den, exponent = torch.stack(rise).sum(0), torch.stack(fall).sum(0), 0.5
    if penalties.tv:
        plus, minus = tv_parts(F, *beside)
        num, den = num + penalties.tv / 2 * minus, den + penalties.tv / 2 * plus
    den = den + penalties.latent * F + penalties.ortho * (F.sum(0) - F)
    return F * (num / den.clamp_min(TINY)) ** exponent


def _group_step(F: Tensor, b: Tensor, h: Tensor, penalties: Penalties) -> Tensor:
    """Minimise J exactly over each row of each group in turn (proximal HALS)."""
    F = F.clone()
    floor = float(h.diagonal().max()) * DEAD
    for members in members_of(F.shape[1], penalties.groups):
        part, target = F[:, members], b[:, members]
        for i in range(F.shape[0]):
            if h[i, i] > floor:
                v = part[i] + (target[i] - h[i] @ part) / h[i, i]
                part[i] = shrink_group(v, penalties.group / (2 * float(h[i, i])))
        F[:, members] = part
    return F
