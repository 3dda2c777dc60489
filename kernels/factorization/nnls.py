"""Non-negative least squares on Gram data:  min_{s >= 0}  s^T G s - 2 b^T s,  one column after the other.

The active-set method [LawsonHanson1974] in the form of [BroDeJong1997], started from coordinate passes, so the
answer is exact to rounding and not a limit. G has a unit diagonal; a dead component is a row of the identity and has
b = 0.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

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


@numba.njit(nogil=True, cache=True, fastmath={"contract"})
def _descend(G: NDArray[Any], b: NDArray[Any], s: NDArray[Any], g: NDArray[Any]) -> None:
    """Run coordinate passes on one column from s = 0, keeping g = G s - b; mostly this finds the support."""
    rank = G.shape[0]
    for k in range(rank):
        s[k], g[k] = 0.0, -b[k]
    for _ in range(PASSES):
        for k in range(rank):
            step = max(-g[k] / G[k, k], -s[k])
            if step != 0.0:
                s[k] += step
                for j in range(rank):
                    g[j] += step * G[k, j]


@numba.njit(inline="always")
def _move_towards(s: NDArray[Any], z: NDArray[Any], idx: NDArray[Any], n: int) -> int:
    """Move s[idx] towards z until the first entry reaches zero; return that entry's number, -1 when z is reached."""
    alpha, blocking = 1.0, -1
    for i in range(n):
        if z[i] <= 0:
            step = s[idx[i]] / (s[idx[i]] - z[i]) if s[idx[i]] > z[i] else 0.0
            if step < alpha or blocking < 0:
                alpha, blocking = min(step, alpha), i
    for i in range(n):
        s[idx[i]] += alpha * (z[i] - s[idx[i]])
    return blocking


@numba.njit(nogil=True, cache=True)
def _finish(
    G: NDArray[Any],
    b: NDArray[Any],
    s: NDArray[Any],
    L: NDArray[Any],
    z: NDArray[Any],
    idx: NDArray[Any],
    passive: NDArray[Any],
    barred: NDArray[Any],
) -> None:
    """Take s >= 0 to the minimiser by the active-set method; its support is the first guess."""
    rank, scale = G.shape[0], 0.0
    for k in range(rank):
        scale = max(scale, abs(b[k]))
        passive[k], barred[k] = s[k] > 0, False
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
            blocking = _move_towards(s, z, idx, n)
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


@numba.njit(nogil=True, cache=True)
def solve_columns(G: NDArray[Any], B: NDArray[Any], S: NDArray[Any], scale: NDArray[Any], lo: int, hi: int) -> bool:
    """Fill columns lo..hi of S with  scale * (minimiser for that column of B);  False when B is not finite."""
    rank = G.shape[0]
    L, z, s, b, g = np.empty((rank, rank)), np.empty(rank), np.empty(rank), np.empty(rank), np.empty(rank)
    idx, passive, barred = np.empty(rank, np.int64), np.empty(rank, np.bool_), np.empty(rank, np.bool_)
    for p in range(lo, hi):
        for k in range(rank):
            b[k] = B[k, p]
            if not math.isfinite(b[k]):
                return False
        _descend(G, b, s, g)
        _finish(G, b, s, L, z, idx, passive, barred)
        for k in range(rank):
            S[k, p] = s[k] * scale[k]
    return True


@numba.njit(nogil=True, cache=True)
def finish_lanes(
    G: NDArray[Any], tile_b: NDArray[Any], tile_s: NDArray[Any], unsettled: NDArray[Any], n_lanes: int
) -> bool:
    """Take the ``unsettled`` lanes of a tile (rank rows of len(unsettled) lanes, flat) to their minimisers."""
    rank, width = G.shape[0], unsettled.shape[0]
    L, z, s, b = np.empty((rank, rank)), np.empty(rank), np.empty(rank), np.empty(rank)
    idx, passive, barred = np.empty(rank, np.int64), np.empty(rank, np.bool_), np.empty(rank, np.bool_)
    for p in range(n_lanes):
        if unsettled[p]:
            for k in range(rank):
                b[k], s[k] = tile_b[k * width + p], tile_s[k * width + p]
                if not math.isfinite(b[k]):
                    return False
            _finish(G, b, s, L, z, idx, passive, barred)
            for k in range(rank):
                tile_s[k * width + p] = s[k]
    return True
