"""Targets of a node for the split search: mean, energy, and its own fixed-point coordinates when it is small."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from auditor.kernels.trees.histogram_simd import LANES
from auditor.kernels.trees.tiny_nodes import MOST_SUBSET_ROWS

LOCAL = 0  # a node whose histograms are made from its own fixed-point targets and not kept
TOP = 2.0**30  # no fixed-point sum leaves (-TOP, TOP)
TAIL_SHARE = 2e-3  # energy that coordinates of a small node may leave out
MOST_COORDINATES = 63


@njit(nogil=True, cache=True)
def _coordinates(part: Any, coords: Any, norms: Any, energy: float) -> tuple[int, float]:
    """Pivoted Gram-Schmidt on the rows of ``part`` (overwritten); return the rank kept and the energy left out."""
    m, k = part.shape
    axis = np.empty(k)
    rank = 0
    left = energy
    while rank < min(MOST_COORDINATES, k, m):
        if left <= 1e-13 * energy or ((rank + 1) % LANES == 0 and left <= TAIL_SHARE * energy):
            break
        pivot = np.argmax(norms[:m])
        length = 0.0
        for c in range(k):
            length += part[pivot, c] * part[pivot, c]
        if length <= 0.0:
            break
        length = np.sqrt(length)
        for c in range(k):
            axis[c] = part[pivot, c] / length
        left = 0.0
        for i in range(m):
            dot = 0.0
            for c in range(k):
                dot += part[i, c] * axis[c]
            coords[i, rank] = dot
            rest = 0.0
            for c in range(k):
                part[i, c] -= dot * axis[c]
                rest += part[i, c] * part[i, c]
            norms[i] = rest
            left += rest
        rank += 1
    return rank, left


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def prepare(
    first: int,
    last: int,
    rows: Any,
    start: Any,
    stop: Any,
    mode: Any,
    y: Any,
    fixed: Any,
    fixed_step: float,
    local: Any,
    local_at: Any,
    lanes: Any,
    mean: Any,
    energy: Any,
    fixed_mean: Any,
    step: Any,
    tail: Any,
) -> None:
    """Describe nodes ``first..last``: mean, energy, and targets in fixed point (their own for LOCAL nodes)."""
    k = y.shape[1]
    full = fixed.shape[1]
    for node in range(first, last):
        a, b = start[node], stop[node]
        m = b - a
        mean[node, :] = 0.0
        for j in range(a, b):
            for c in range(k):
                mean[node, c] += y[rows[j], c]
        for c in range(k):
            mean[node, c] /= m
        total = 0.0
        for j in range(a, b):
            for c in range(k):
                d = y[rows[j], c] - mean[node, c]
                total += d * d
        energy[node] = total
        tail[node] = 0.0
        fixed_mean[node, :] = 0.0
        if mode[node] != LOCAL:
            lanes[node] = full
            step[node] = fixed_step
            sums = np.zeros(full, np.int64)
            for j in range(a, b):
                for c in range(full):
                    sums[c] += fixed[rows[j], c]
            for c in range(full):
                fixed_mean[node, c] = sums[c] / m
            continue
        if m <= MOST_SUBSET_ROWS:
            lanes[node] = 0
            continue
        part = np.empty((m, k))
        largest = 0.0
        norms = np.zeros(m)
        for j in range(m):
            for c in range(k):
                d = y[rows[a + j], c] - mean[node, c]
                part[j, c] = d
                norms[j] += d * d
        width = k
        if full > LANES and total > 0.0:
            coords = np.empty((m, MOST_COORDINATES))
            kept = part.copy()
            rank, left = _coordinates(part, coords, norms, total)
            if rank < MOST_COORDINATES or left <= TAIL_SHARE * total:
                part, width = coords, rank
                tail[node] = left + 1e-10 * total
            else:
                part = kept
        for j in range(m):
            for c in range(width):
                largest = max(largest, abs(part[j, c]))
        s = max(m * largest / TOP, 1e-300)
        groups = (width + 1 + LANES - 1) // LANES
        lanes[node] = groups * LANES
        step[node] = s
        at = local_at[node]
        sums = np.zeros(groups * LANES, np.int64)
        for j in range(m):
            here = at + j * groups * LANES
            local[here] = 1
            for c in range(width):
                q = np.int64(np.rint(part[j, c] / s))
                local[here + 1 + c] = q
                sums[1 + c] += q
            for c in range(width + 1, groups * LANES):
                local[here + c] = 0
        sums[0] = m
        for c in range(groups * LANES):
            fixed_mean[node, c] = sums[c] / m
