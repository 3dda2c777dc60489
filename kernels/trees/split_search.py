"""The best split of every node of a level: fixed-point histograms propose, exact sums in float64 decide.

For a node with rows ``i`` of centred targets ``d_i = y_i - mean`` a split into L and R gains

    g = |sum_L d|^2 * n / (n_L n_R)          (the drop of the summed squared error)

so all a feature needs is one histogram of ``d`` over its code values. The histograms are 32-bit integers: targets are
rounded once to multiples of a step ``s`` chosen so that no sum can overflow. Integer sums are exact in any order,
hence sibling subtraction and appended rows leave no trace. What rounding can do to a gain is known beforehand: with
``E = sum_L (e_i - mean e)``, ``|e_i| <= s/2`` per output,

    |sqrt(g) - sqrt(g_fixed)|  <=  |E| sqrt(n / (n_L n_R))  <=  s sqrt(outputs * n)  =: eps

so every split that may be the best one is found by comparing with ``eps``, and only those few features are summed
again in float64. Small nodes with many outputs first turn their targets into coordinates along a few of their own
rows (pivoted Gram-Schmidt); the energy left out, ``tail``, bounds what any split could gain from it.

Lane 0 of every histogram bin counts rows; its "mean" is 1, so it adds nothing to the squared length.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from auditor.kernels.trees.histogram_simd import LANES, add_lanes, add_squared_gaps, count_and_square
from auditor.kernels.trees.node_targets import LOCAL
from auditor.kernels.trees.tiny_nodes import MOST_SUBSET_ROWS, best_by_subsets, subset_gains

TILE = 16  # features per tile: their 4-bit histograms of one group of lanes fill half of the first-level cache
GROWN, SUBTRACTED = 1, 2  # how a node comes to its histogram, if it is not LOCAL
# sha256 of lanes.py and subset_search.py: a change there must renew the compiled cache of this file
BUILT_ON = "89803cb25ea8"
EVEN = 1e-12  # gains closer than this share of the node's energy are a tie: lowest feature, then lowest threshold


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def exact_split(
    column: Any, rows: Any, y: Any, mean: Any, share: Any, even: float, sums: Any, counts: Any
) -> tuple[float, int]:
    """Return the best gain, in float64, of a feature whose codes are ``column``, and its threshold (-1 for none)."""
    k = y.shape[1]
    n_codes = counts.shape[0]
    counts[:] = 0
    for j in range(rows.shape[0]):
        code = column[j]
        if counts[code] == 0:
            for c in range(k):
                sums[code, c] = 0.0
        counts[code] += 1
        for c in range(k):
            sums[code, c] += y[rows[j], c] - mean[c]
    best, threshold = -np.inf, -1
    n_left, before = 0, -1
    run = sums[n_codes]
    run[:] = 0.0
    gain = -np.inf
    for code in range(n_codes):
        if counts[code] == 0:
            continue
        if before >= 0 and gain > best + even:
            best, threshold = gain, (before + code) // 2  # scikit-learn's midpoint, on integers
        before = code
        n_left += counts[code]
        length = 0.0
        for c in range(k):
            run[c] += sums[code, c]
            length += run[c] * run[c]
        gain = length * share[n_left] if share[n_left] >= 0.0 else -np.inf
    return best, threshold


@njit(nogil=True, cache=True)
def _gather(plain: Any, rows: Any, first_tile: int, near: Any) -> None:
    """Copy the codes of a small node's rows side by side, (tile, row, feature of the tile)."""
    for j in range(rows.shape[0]):
        for tile in range(near.shape[0]):
            for q in range(TILE):
                near[tile, j, q] = plain[rows[j], (first_tile + tile) * TILE + q]


@njit(nogil=True, cache=True)
def _compact(codes: Any, seen: Any, used: Any) -> None:
    """Replace the codes (row, feature) of a tile by their rank among those that occur, feature by feature."""
    seen[:, :] = 0
    for j in range(codes.shape[0]):
        for q in range(TILE):
            seen[q, codes[j, q]] = 1
    for q in range(TILE):
        rank = 0
        for code in range(seen.shape[1]):
            if seen[q, code]:
                seen[q, code] = rank
                rank += 1
        used[q] = rank
    for j in range(codes.shape[0]):
        for q in range(TILE):
            codes[j, q] = seen[q, codes[j, q]]


@njit(nogil=True, cache=True)
def _add_rows(
    h: Any, base: int, n_codes: int, codes: Any, tile: int, rows: Any, a: int, b: int, y: Any, at: int
) -> None:
    """Add rows ``a..b`` of fixed-point targets ``y`` (their lanes from ``at`` on) to the histograms of a tile."""
    width = y.shape[1]
    flat = y.reshape(-1)
    for j in range(a, b):
        r = np.int64(rows[j])
        for q in range(TILE):
            add_lanes(h, base + (q * n_codes + np.int64(codes[tile, r, q])) * LANES, flat, r * width + at)


@njit(nogil=True, cache=True)
def _add_local(h: Any, n_codes: int, codes: Any, y: Any, at: int, width: int) -> None:
    """Add all rows of ``codes`` (row, feature of the tile); their targets lie one after the other in ``y``."""
    for j in range(codes.shape[0]):
        for q in range(TILE):
            add_lanes(h, (q * n_codes + np.int64(codes[j, q])) * LANES, y, at + j * width)


@njit(nogil=True, cache=True)
def _top_two(used: Any, lefts: Any, length: Any, share: Any, best: Any, second: Any, at: int) -> None:
    """Keep the two largest gains of each feature of a tile."""
    for q in range(TILE):
        one, two, before = -1.0, -1.0, 0.0
        for bin_ in range(used[q] - 1):
            g = length[q, bin_] * share[np.int64(lefts[q, bin_])]
            g = g if lefts[q, bin_] != before else -1.0  # an empty code repeats the threshold before it
            before = lefts[q, bin_]
            two = max(two, min(one, g))
            one = max(one, g)
        best[at + q], second[at + q] = one, two


@njit(nogil=True, cache=True)
def search(
    first_tile: int,
    last_tile: int,
    n_codes: int,
    codes: Any,
    plain: Any,
    rows: Any,
    start: Any,
    grown_from: Any,
    stop: Any,
    mode: Any,
    fresh: Any,
    wanted: Any,
    block: Any,
    parent: Any,
    sibling: Any,
    y: Any,
    fixed: Any,
    local: Any,
    local_at: Any,
    lanes: Any,
    pool: Any,
    block_size: int,
    mean: Any,
    energy: Any,
    fixed_mean: Any,
    step: Any,
    tail: Any,
    leaf_rows: int,
    balance: float,
    hist: Any,
    gain: Any,
    feature: Any,
    threshold: Any,
) -> None:
    """Find, for every wanted node, the best split among the features of tiles ``first_tile..last_tile``.

    Histograms of GROWN nodes take rows ``grown_from..stop`` into ``pool``; SUBTRACTED ones are parent - sibling, where
    the sibling is the node before, so that its part of the tile is still in the cache.
    """
    full = fixed.shape[1]
    size = TILE * n_codes * LANES
    n_features = (last_tile - first_tile) * TILE
    best, second = np.empty((2, n_features)), np.empty((2, n_features))
    lefts, length = np.empty((TILE, n_codes)), np.empty((TILE, n_codes))
    used = np.empty(TILE, np.int64)
    seen = np.empty((TILE, n_codes), np.int64)
    sums, counts = np.empty((n_codes + 1, y.shape[1])), np.empty(n_codes, np.int64)
    shares = (np.empty(0), np.empty(0))
    node = 0
    while node < start.shape[0]:
        m = stop[node] - start[node]
        gain[node], feature[node], threshold[node] = -np.inf, -1, -1
        near = np.empty((last_tile - first_tile, m if mode[node] == LOCAL else 0, TILE), np.uint8)
        if mode[node] == LOCAL:
            _gather(plain, rows[start[node] : stop[node]], first_tile, near)
        if mode[node] == LOCAL and m <= MOST_SUBSET_ROWS:
            if wanted[node]:
                gains = subset_gains(y, rows[start[node] : stop[node]], mean[node], _shares(m, leaf_rows, balance))
                gain[node], f, threshold[node] = best_by_subsets(near, gains, EVEN * energy[node])
                feature[node] = f + first_tile * TILE if f >= 0 else -1
            node += 1
            continue
        after = node + 1
        if after < start.shape[0] and mode[after] == SUBTRACTED:
            after += 1
        other_m = stop[after - 1] - start[after - 1]
        shares = (_shares(m, leaf_rows, balance), _shares(other_m, leaf_rows, balance))
        for tile in range(first_tile, last_tile):
            for i in range(node, after):
                b = stop[i]
                used[:] = n_codes
                if mode[i] == LOCAL and n_codes > 16 and m < n_codes:
                    tight = near[tile - first_tile].copy()
                    _compact(tight, seen, used)
                else:
                    tight = near[tile - first_tile]
                for group in range(lanes[i] // LANES):
                    h, base = hist, 0
                    if mode[i] == LOCAL:
                        at = local_at[i] + group * LANES
                        for q in range(TILE):
                            h[q * n_codes * LANES : (q * n_codes + used[q]) * LANES] = 0
                        _add_local(h, n_codes, tight, local, at, lanes[i])
                    else:
                        h = pool
                        offset = (tile * (full // LANES) + group) * size
                        base = block[i] * block_size + offset
                        if mode[i] == GROWN:
                            if fresh[i]:
                                h[base : base + size] = 0
                            _add_rows(h, base, n_codes, codes, tile, rows, grown_from[i], b, fixed, group * LANES)
                        else:
                            whole = parent[i] * block_size + offset
                            other = sibling[i] * block_size + offset
                            for j in range(size):
                                h[base + j] = h[whole + j] - h[other + j]
                    if wanted[i]:
                        means = i * full + group * LANES
                        for q in range(TILE):
                            at = base + q * n_codes * LANES
                            if group == 0:
                                count_and_square(h, at, used[q] - 1, lefts[q], fixed_mean, means, length[q])
                            else:
                                add_squared_gaps(h, at, used[q] - 1, lefts[q], fixed_mean, means, length[q])
                if wanted[i]:
                    at = (tile - first_tile) * TILE
                    _top_two(used, lefts, length, shares[i - node], best[i - node], second[i - node], at)
        for i in range(node, after):
            gain[i], feature[i], threshold[i] = -np.inf, -1, -1
            if not wanted[i]:
                continue
            need = _least_gain(best[i - node].max(), step[i], lanes[i], stop[i] - start[i], tail[i])
            gain[i], feature[i], threshold[i] = _decide(
                best[i - node],
                second[i - node],
                need,
                first_tile * TILE,
                codes,
                near,
                rows[start[i] : stop[i]],
                y,
                mean[i],
                shares[i - node],
                EVEN * energy[i],
                sums,
                counts,
            )
        node = after


@njit(nogil=True, cache=True)
def _shares(m: int, leaf_rows: int, balance: float) -> Any:
    """Return  n / (n_L n_R) * (4 n_L n_R / n^2)^balance  for every n_L, and -1 where a side would be too small."""
    share = np.full(m + 1, -1.0)
    for n_left in range(leaf_rows, m - leaf_rows + 1):
        even = 4.0 * n_left * (m - n_left) / (float(m) * m)  # at most 1, so every bound on gains holds with it, too
        share[n_left] = m / (float(n_left) * (m - n_left)) * (even**balance if balance > 0.0 else 1.0)
    return share


@njit(nogil=True, cache=True)
def _least_gain(lead: float, step: float, width: int, m: int, tail: float) -> float:
    """Return the fixed-point gain from which a split may be the best one in truth, when ``lead`` is the largest."""
    if lead < 0.0:
        return np.inf
    eps = np.sqrt(float(width) * m) * (1 + 1e-6)
    surely = max(np.sqrt(lead) - eps, 0.0) ** 2 * (1 - 1e-9) - tail / step / step
    return float(max(np.sqrt(max(surely, 0.0)) - eps, 0.0) ** 2)


@njit(nogil=True, cache=True)
def _decide(
    best: Any,
    second: Any,
    need: float,
    first: int,
    codes: Any,
    near: Any,
    rows: Any,
    y: Any,
    mean: Any,
    share: Any,
    even: float,
    sums: Any,
    counts: Any,
) -> tuple[float, int, int]:
    """Sum the features that may hold the best split again in float64, and return the winner."""
    gain, feature, threshold = -np.inf, -1, -1
    keys = np.empty(64)
    column = np.empty(rows.shape[0], np.uint8)
    n_keys = 0
    for f in range(best.shape[0]):
        if best[f] < need or best[f] < 0.0:
            continue
        known = False
        for j in range(n_keys):
            known = known or keys[j] == best[f]
        if known and second[f] < need:
            continue  # equal in every bit of the fixed-point sums: a tie that the lower feature has won
        if not known and n_keys < keys.shape[0]:
            keys[n_keys] = best[f]
            n_keys += 1
        for j in range(rows.shape[0]):
            column[j] = (
                near[f // TILE, j, f % TILE]
                if near.shape[1]
                else codes[(first + f) // TILE, rows[j], (first + f) % TILE]
            )
        g, t = exact_split(column, rows, y, mean, share, even, sums, counts)
        if t >= 0 and g > gain + even:
            gain, feature, threshold = g, first + f, t
    return gain, feature, threshold
