"""Splits of tiny nodes: the gain of every subset of the rows in one table, then one look-up per feature and row.

With m rows there are only 2^m ways to split them, however many features ask. The table needs dot products of the
targets only, so the number of outputs does not matter, and it is float64: what it says needs no second look.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from auditor.kernels.trees.histogram_simd import LANES, rows_not_above

MOST_SUBSET_ROWS = 12


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def subset_gains(y: Any, rows: Any, mean: Any, share: Any) -> Any:
    """Return the gain of sending each subset of ``rows`` left, indexed by the subset's bits; -1 where not allowed.

    ``share`` holds, by the subset's size, what its squared length is multiplied with, or -1.
    """
    m, k = rows.shape[0], y.shape[1]
    gram = np.empty((m, m))
    for i in range(m):
        for j in range(i + 1):
            dot = 0.0
            for c in range(k):
                dot += (y[rows[i], c] - mean[c]) * (y[rows[j], c] - mean[c])
            gram[i, j] = gram[j, i] = dot
    everyone = (1 << m) - 1
    gains = np.full(everyone + 1, -1.0)
    dots = np.zeros(m)  # of the current subset's sum with each row
    length, size, subset = 0.0, 0, 0
    for step in range(1, 1 << (m - 1)):  # the last row stays right: a subset and its complement gain the same
        row, rest = 0, step
        while rest & 1 == 0:  # Gray code: one row comes or goes
            rest >>= 1
            row += 1
        sign = -1.0 if subset >> row & 1 else 1.0
        subset ^= 1 << row
        length += 2.0 * sign * dots[row] + gram[row, row]
        size += 1 if sign > 0 else -1
        for j in range(m):
            dots[j] += sign * gram[row, j]
        if share[size] >= 0.0:
            gains[subset] = gains[everyone - subset] = max(length, 0.0) * share[size]
    return gains


@njit(nogil=True, cache=True)
def best_by_subsets(codes: Any, gains: Any, even: float) -> tuple[float, int, int]:
    """Return the best (gain, feature, threshold) for ``codes`` (tile, row, feature of the tile) by a table of gains."""
    n_tiles, m, _ = codes.shape
    left = np.empty(LANES, np.uint16)
    best = np.empty(LANES)
    gain, feature = -np.inf, -1
    for tile in range(n_tiles):
        best[:] = -1.0
        for j in range(m):
            rows_not_above(codes, tile * m * LANES, m, j, left)
            for q in range(LANES):
                best[q] = max(best[q], gains[left[q]])
        for q in range(LANES):
            if best[q] >= 0.0 and best[q] > gain + even:
                gain, feature = best[q], tile * LANES + q
    if feature < 0:
        return -np.inf, -1, -1
    threshold: Any = 256
    for j in range(m):  # the lowest of the feature's thresholds that reach its gain
        code = np.int64(codes[feature // LANES, j, feature % LANES])
        subset: int = 0
        above: Any = 256
        for i in range(m):
            other = np.int64(codes[feature // LANES, i, feature % LANES])
            if other <= code:
                subset |= 1 << i
            else:
                above = other if other < above else above
        if gains[subset] >= 0.0 and gains[subset] >= gain - even:
            threshold = min(threshold, (code + above) // 2)
    return gain, feature, threshold
