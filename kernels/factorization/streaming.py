"""NMF of more positions than memory holds:  map(shard) -> Statistics,  reduce by +,  step(W, statistics).

Between shards only  X S^T  (channels, rank),  S S^T  (rank, rank)  and three sums are kept, so shards may come one
after the other or from many machines. With S the exact projection of each shard on W, one epoch is one step of
alternating minimisation and the objective never rises; a free basis (semi-NMF) steps by least squares. The start is a
bounded sample of the columns, drawn by energy with keys hashed from the column's running number, so it does not depend
on how the positions were cut into shards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from auditor.kernels.factorization.column_energy import check_range, energy
from auditor.kernels.factorization.coordinate_descent import sweep
from auditor.kernels.factorization.nmf import Status, factorize, free_basis
from auditor.kernels.factorization.projection import Basis, prepare, project

SAMPLE = 128  # columns kept per component for the start
W_PASSES = 20
Shards = Callable[[], Iterable[Tensor]]


@dataclass(frozen=True)
class Statistics:
    """All that a basis update needs to know of the positions."""

    XSt: Tensor  # (channels, rank) float64
    SS: Tensor  # (rank, rank) float64
    energy: float  # |X|^2
    misfit: float  # |X - W S|^2
    positions: int

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(
            self.XSt + other.XSt,
            self.SS + other.SS,
            self.energy + other.energy,
            self.misfit + other.misfit,
            self.positions + other.positions,
        )


@dataclass(frozen=True)
class Sample:
    """Columns with the smallest keys so far, their energies and the energy and number of all columns so far."""

    columns: Tensor
    keys: Tensor
    energies: Tensor
    total: float
    n_drawn_from: int


@dataclass(frozen=True)
class StreamState:
    """One epoch: the basis that went in, and the statistics of all shards at it."""

    t: int
    W: Tensor
    statistics: Statistics


@dataclass(frozen=True)
class StreamFactorization:
    """A basis fitted to a stream, and how well it was reached."""

    W: Tensor
    status: Status
    n_iter: int
    objective: list[float]
    kkt: float
    relative_error: float
    positions: int


def statistics(X: Tensor, W: Tensor, basis: Basis | None = None) -> Statistics:
    """Map one shard X (channels, positions) to its statistics at W; ``basis`` is W prepared, if it is at hand."""
    S = project(X, basis or W).to(X.dtype)
    Sd = S.double()
    misfit = energy(X - W.to(X.dtype) @ S).total
    return Statistics((X @ S.T).double(), Sd @ Sd.T, energy(X).total, misfit, X.shape[1])


def basis_step(W: Tensor, sums: Statistics, *, signed: bool = False) -> Tensor:
    """Return the basis after coordinate passes on the reduced statistics; an unused component stays as it is.

    With ``signed`` W is free and the least-squares basis of the statistics.
    """
    if signed:
        return torch.where(sums.SS.diagonal() > 0, free_basis(sums.XSt, sums.SS), W)
    return sweep(W.T.contiguous(), sums.XSt.T.contiguous(), sums.SS, W_PASSES).T.contiguous()


def basis_kkt(W: Tensor, sums: Statistics, *, signed: bool = False) -> float:
    """Return max |min(W, gradient)| over max W, in the scale where S has unit rows; S itself is optimal.

    A free W counts with |gradient|.
    """
    scale = sums.SS.diagonal().clamp_min(1e-300).sqrt()
    gradient = (W @ sums.SS - sums.XSt) / scale
    W = W * scale
    side = gradient.abs() if signed else torch.minimum(W, gradient).abs()
    return float(side.max() / W.abs().max().clamp_min(1e-300))


def alternating(shards: Shards, W: Tensor, *, signed: bool = False) -> Iterator[StreamState]:
    """Yield one state per pass over the shards."""
    for t in itertools.count():
        sums, basis = None, prepare(W)
        for X in shards():
            part = statistics(X, W, basis)
            sums = part if sums is None else sums + part
        if sums is None:
            raise ValueError("NMF stream: no shard came; give at least one batch of positions.")
        yield StreamState(t, W, sums)
        W = basis_step(W, sums, signed=signed)


def _hashed_exponential(start: int, n: int, seed: int) -> Tensor:
    """Return n exponential draws that depend only on the seed and on each column's running number."""
    with np.errstate(over="ignore"):
        z = np.arange(start, start + n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z += np.uint64(seed) * np.uint64(0xD1B54A32D192ED03) + np.uint64(0x632BE59BD9B4E019)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return torch.from_numpy(-np.log1p(-((z >> np.uint64(11)).astype(np.float64) / 2.0**53)))


def draw_sample(shards: Shards, size: int, seed: int, *, signed: bool = False) -> Sample:
    """Return up to ``size`` columns of the stream, drawn by energy without replacement."""
    sample = None
    for X in shards():
        look = energy(X)
        check_range(look, "NMF stream: activations", signed=signed)
        start = 0 if sample is None else sample.n_drawn_from
        keys = _hashed_exponential(start, X.shape[1], seed) / look.columns.cpu().clamp_min(1e-300)
        columns, energies, total = X, look.columns.cpu(), look.total
        if sample is not None:
            columns, total = torch.cat([sample.columns, X], dim=1), total + sample.total
            keys, energies = torch.cat([sample.keys, keys]), torch.cat([sample.energies, energies])
        index = keys.topk(min(size, keys.numel()), largest=False).indices.sort().values
        sample = Sample(columns[:, index], keys[index], energies[index], total, start + X.shape[1])
    if sample is None:
        raise ValueError("NMF stream: no shard came; give at least one batch of positions.")
    return sample


def factorize_stream(
    shards: Shards,
    rank: int,
    *,
    seed: int = 0,
    max_iter: int = 30,
    tol: float = 1e-4,
    W0: Tensor | None = None,
    signed: bool = False,
    on_step: Callable[[int, float], None] | None = None,
) -> StreamFactorization:
    """Fit a basis to a stream: ``shards()`` starts a pass and yields (channels, positions) tensors, the same each time.

    Peak memory is one shard, a sample of 128 columns per component and the statistics, whatever the number of shards.
    The sharding changes the basis by rounding only (1e-4 relative in float32, 1e-9 in float64). ``signed`` activations
    get a free basis (semi-NMF).

    Example
    -------
    >>> X = torch.rand(6, 40, generator=torch.Generator().manual_seed(0))
    >>> fit = factorize_stream(lambda: [X[:, :25], X[:, 25:]], rank=2)
    >>> fit.positions, tuple(fit.W.shape)
    (40, (6, 2))
    """
    W = W0.double() if W0 is not None else _stream_start(shards, rank, seed, signed)
    status, best = Status.STEP_LIMIT, None
    history: list[float] = []
    for state in itertools.islice(alternating(shards, W, signed=signed), max_iter + 1):
        objective = state.statistics.misfit
        if history and objective > history[-1]:
            status = Status.CONVERGED
            break
        best = state
        history.append(objective)
        if on_step is not None and state.t > 0:
            on_step(state.t, objective)
        if objective == 0 or (len(history) > 1 and history[-2] - objective <= tol / 10 * objective):
            status = Status.CONVERGED
            break
    assert best is not None
    sums = best.statistics
    error = math.sqrt(sums.misfit / sums.energy) if sums.energy > 0 else 0.0
    norms = best.W.norm(dim=0)
    W = best.W / torch.where(norms > 0, norms, torch.ones_like(norms))
    return StreamFactorization(
        W.float(), status, len(history) - 1, history, basis_kkt(best.W, sums, signed=signed), error, sums.positions
    )


def _stream_start(shards: Shards, rank: int, seed: int, signed: bool) -> Tensor:
    drawn = draw_sample(shards, SAMPLE * rank, seed, signed=signed)
    if not 1 <= rank <= min(drawn.columns.shape):
        raise ValueError(
            f"NMF stream: rank must be between 1 and the smaller side of the data, got rank {rank} for "
            f"{drawn.columns.shape[0]} channels x {drawn.n_drawn_from} positions."
        )
    chance = drawn.keys.numel() * drawn.energies / max(drawn.total, 1e-300)
    weight = chance.clamp_min(1e-300).clamp_max(1).rsqrt() if drawn.n_drawn_from > drawn.keys.numel() else torch.ones(1)
    weight = torch.where(drawn.energies > 0, weight.double(), torch.zeros(1, dtype=torch.float64))
    return factorize(drawn.columns.double() * weight, rank, seed=seed, tol=1e-3, signed=signed).W
