"""Non-negative projection on a fixed basis:  argmin_{S >= 0} |X - W S|_F^2 + l2 |S|_F^2,  one column per position.

The Gram matrix is formed once. Each position then runs the active-set method of Lawson & Hanson 1974 on Gram data
(Bro & de Jong 1997), started from a few coordinate passes, so the answer is exact to rounding and not a limit.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from auditor.kernels.coordinate import DEAD, over_blocks, sweep

CHUNK = 4096  # positions whose float64 copy is alive at once
PASSES = 4  # coordinate passes before the active-set method: most supports are right by then


@numba.njit(nogil=True, cache=True)
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
def _active_set(G: NDArray[Any], B: NDArray[Any], S: NDArray[Any], floor: float, lo: int, hi: int) -> None:
    """Finish columns lo..hi of S, given as any feasible start, to the minimiser of s^T G s - 2 b^T s, s >= 0."""
    rank = G.shape[0]
    L, z, s = np.empty((rank, rank)), np.empty(rank), np.empty(rank)
    idx, passive, barred = np.empty(rank, np.int64), np.empty(rank, np.bool_), np.empty(rank, np.bool_)
    for p in range(lo, hi):
        b = B[:, p].copy()
        scale = 0.0
        for k in range(rank):
            s[k] = S[k, p] if G[k, k] > floor else 0.0
            passive[k], barred[k] = s[k] > 0, G[k, k] <= floor
            scale = max(scale, abs(b[k]))
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
                    for j in range(rank):
                        pull -= G[k, j] * s[j]
                    if pull > best:
                        best, enter = pull, k
            if enter < 0:
                break
            passive[enter] = True
        for k in range(rank):
            S[k, p] = s[k]


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
    Wd = W.detach().double()
    G = Wd.T @ Wd
    G.diagonal().add_(l2)
    X = X.detach()
    parts = [_project_chunk(X[:, lo : lo + CHUNK], Wd, G) for lo in range(0, X.shape[1], CHUNK)]
    out = torch.cat(parts, dim=1) if parts else torch.zeros(W.shape[1], 0, device=X.device)
    if not bool(torch.isfinite(out).all()):
        raise ValueError("project: X and W must be finite, got NaN or infinite values.")
    return out.to(dtype)


def _project_chunk(X: Tensor, Wd: Tensor, G: Tensor) -> Tensor:
    B = Wd.T @ X.double()
    if not bool(torch.isfinite(B).all()):
        return torch.full_like(B, torch.nan)
    start = (B / G.diagonal().clamp_min(1e-300)[:, None]).clamp_min(0)
    if X.device.type != "cpu":
        return project_by_passes(start, B, G)
    S = sweep(start, B, G, n_sweeps=PASSES)
    floor = float(G.diagonal().max()) * DEAD
    g, b, s = G.numpy(), B.contiguous().numpy(), S.numpy()
    over_blocks(lambda lo, hi: _active_set(g, b, s, floor, lo, hi), X.shape[1], block=256)
    return S


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
