"""Non-negative projection on a fixed basis:  argmin_{S >= 0} |X - W S|_F^2 + l2 |S|_F^2,  one column per position.

The Gram matrix is formed once. Each position then runs the active-set method of Lawson & Hanson 1974 on Gram data
(Bro & de Jong 1997), started from a few coordinate passes, so the answer is exact to rounding and not a limit.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from auditor.kernels.coordinate import DEAD, over_blocks, sweep

CHUNK = 4096  # positions whose float64 copy is alive at once
WELL_CONDITIONED = 1e-2  # smallest Cholesky pivot above which single precision keeps the answer to 1e-5
PASSES = 4  # coordinate passes before the active-set method: most supports are right by then


@numba.njit(nogil=True, cache=True, fastmath={"contract", "reassoc"})
def _solve_passive(
    G: NDArray[Any], b: NDArray[Any], idx: NDArray[Any], n: int, L: NDArray[Any], z: NDArray[Any]
) -> bool:
    """Solve G[idx, idx] z = b[idx] by Cholesky; False when the block is singular."""
    for i in range(n):
        for j in range(i + 1):
            total = G[idx[i], idx[j]]
            for m in range(j):
                total -= L[i, m] * L[j, m]
            if i == j:
                if total <= 1e-13 * G[idx[i], idx[i]]:
                    return False
                L[i, i] = math.sqrt(total)
            else:
                L[i, j] = total / L[j, j]
    for i in range(n):
        total = b[idx[i]]
        for m in range(i):
            total -= L[i, m] * z[m]
        z[i] = total / L[i, i]
    for i in range(n - 1, -1, -1):
        total = z[i]
        for m in range(i + 1, n):
            total -= L[m, i] * z[m]
        z[i] = total / L[i, i]
    return True


@numba.njit(nogil=True, cache=True)
def _smallest_pivot(G: NDArray[Any], floor: float) -> float:
    """Return the smallest pivot of the Cholesky factor of G, each as a share of its diagonal entry; dead rows aside."""
    rank = G.shape[0]
    L = np.zeros((rank, rank))
    smallest = 1.0
    for i in range(rank):
        for j in range(i + 1):
            total = G[i, j]
            for m in range(j):
                total -= L[i, m] * L[j, m]
            if i == j and G[i, i] > floor:
                if total <= 0:
                    return 0.0
                smallest = min(smallest, total / G[i, i])
                L[i, i] = math.sqrt(total)
            elif i != j and L[j, j] > 0:
                L[i, j] = total / L[j, j]
    return smallest


@numba.njit(nogil=True, cache=True, fastmath={"contract"})
def _descend(G: NDArray[Any], b: NDArray[Any], s: NDArray[Any], g: NDArray[Any], floor: float) -> None:
    """Run coordinate passes on one column from s = 0, keeping g = G s - b; mostly this finds the support."""
    rank = G.shape[0]
    for k in range(rank):
        s[k], g[k] = 0.0, -b[k]
    for _ in range(PASSES):
        for k in range(rank):
            if G[k, k] > floor:
                step = max(-g[k] / G[k, k], -s[k])
                if step != 0.0:
                    s[k] += step
                    for j in range(rank):
                        g[j] += step * G[k, j]


@numba.njit(nogil=True, cache=True)
def _active_set(G: NDArray[Any], B: NDArray[Any], S: NDArray[Any], floor: float, lo: int, hi: int) -> bool:
    """Fill columns lo..hi of S with the minimisers of s^T G s - 2 b^T s, s >= 0; False when B is not finite."""
    rank = G.shape[0]
    L, z, s, b, g = np.empty((rank, rank)), np.empty(rank), np.empty(rank), np.empty(rank), np.empty(rank)
    idx, passive, barred = np.empty(rank, np.int64), np.empty(rank, np.bool_), np.empty(rank, np.bool_)
    for p in range(lo, hi):
        scale = 0.0
        for k in range(rank):
            b[k] = B[k, p]
            if not math.isfinite(b[k]):
                return False
            scale = max(scale, abs(b[k]))
        _descend(G, b, s, g, floor)
        for k in range(rank):
            passive[k], barred[k] = s[k] > 0, G[k, k] <= floor
        for _ in range(10 * rank + 10):
            while True:  # inner loop: solve on the passive set, walking back to the border while it leaves it
                n = 0
                for k in range(rank):
                    if passive[k]:
                        idx[n] = k
                        n += 1
                if n == 0 or not _solve_passive(G, b, idx, n, L, z):
                    if n == 0:
                        break
                    weakest = idx[0]  # singular block: drop its weakest member, it is a copy of the others
                    for i in range(1, n):
                        if s[idx[i]] < s[weakest]:
                            weakest = idx[i]
                    passive[weakest], barred[weakest], s[weakest] = False, True, 0.0
                    continue
                alpha, blocking = 1.0, -1
                for i in range(n):
                    if z[i] <= 0:
                        step = s[idx[i]] / (s[idx[i]] - z[i]) if s[idx[i]] > z[i] else 0.0
                        if step < alpha or blocking < 0:
                            alpha, blocking = min(step, alpha), i
                for i in range(n):
                    s[idx[i]] += alpha * (z[i] - s[idx[i]])
                if blocking < 0:
                    break
                for i in range(n):
                    if i == blocking or s[idx[i]] <= 0:
                        passive[idx[i]], s[idx[i]] = False, 0.0
            best, enter = 1e-12 * scale, -1
            for k in range(rank):
                if not passive[k] and not barred[k]:
                    pull = b[k]
                    for i in range(n):  # idx still holds the passive set
                        pull -= G[k, idx[i]] * s[idx[i]]
                    if pull > best:
                        best, enter = pull, k
            if enter < 0:
                break
            passive[enter] = True
        for k in range(rank):
            S[k, p] = s[k]
    return True


def project(X: Tensor, W: Tensor, *, l2: float = 0.0) -> Tensor:
    """Return S (rank, positions) = argmin_{S >= 0} |X - W S|^2 + l2 |S|^2 for X (channels, positions).

    W (channels, rank) may have any sign. Where its columns are dependent the minimiser is not unique and one is
    returned; a zero column gets zeros.

    Example
    -------
    >>> project(torch.tensor([[2.0], [-1.0]]), torch.eye(2))
    tensor([[2.],
            [0.]])
    """
    if X.ndim != 2 or W.ndim != 2 or X.shape[0] != W.shape[0]:
        raise ValueError(
            "project: X must be (channels, positions) and W (channels, rank), "
            f"got {tuple(X.shape)} and {tuple(W.shape)}."
        )
    if l2 < 0:
        raise ValueError(f"project: l2 must not be negative, got {l2}.")
    dtype = X.dtype if X.dtype == torch.float64 else torch.float32
    X, Wd = X.detach(), W.detach().double()
    G = Wd.T @ Wd
    if l2:
        G.diagonal().add_(l2)
    if X.device.type != "cpu":
        B = Wd.T @ X.double()
        return project_by_passes((B / G.diagonal().clamp_min(1e-300)[:, None]).clamp_min(0), B, G).to(dtype)
    out = torch.empty(W.shape[1], X.shape[1], dtype=dtype)
    g, s = G.numpy(), out.numpy()
    floor = float(g.diagonal().max(initial=0.0)) * DEAD
    # The product is the larger part of the work: single precision will do where the basis is well conditioned.
    exact = dtype == torch.float64 or _smallest_pivot(g, floor) < WELL_CONDITIONED
    left = Wd.T if exact else W.detach().to(dtype).T
    step = CHUNK if exact else max(1, X.shape[1])
    for start in range(0, X.shape[1], step):
        b = (left @ X[:, start : start + step].to(left.dtype)).numpy()
        done = over_blocks(partial(_active_set, g, b, s[:, start : start + step], floor), b.shape[1])
        if not all(done):
            raise ValueError("project: X and W must be finite, got NaN or infinite values.")
    return out


def project_by_passes(S: Tensor, B: Tensor, G: Tensor, *, tol: float = 1e-9, max_rounds: int = 400) -> Tensor:
    """Return the same minimiser by coordinate passes alone, 25 at a time: the form for devices without branches.

    Each column stops mattering once a round moves nothing by more than ``tol`` of the largest entry.
    """
    S = torch.where((G.diagonal() > G.diagonal().max() * DEAD)[:, None], S, torch.zeros_like(S))
    for _ in range(max_rounds):
        before, S = S, sweep(S, B, G, n_sweeps=25)
        if float((S - before).abs().max()) <= tol * float(S.abs().max()):
            break
    return S
