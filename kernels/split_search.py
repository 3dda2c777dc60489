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

from auditor.kernels.lanes import LANES, add_lanes, advance_and_square

TILE = 16  # features per tile: their 4-bit histograms of one group of lanes fill half of the first-level cache
LOCAL, GROWN, SUBTRACTED = 0, 1, 2  # how a node comes to its histogram
TOP = 2.0**30  # no fixed-point sum leaves (-TOP, TOP)
TAIL_SHARE = 2e-3  # energy that coordinates of a small node may leave out
MOST_COORDINATES = 63
EVEN = 1e-12  # gains closer than this share of the node's energy are a tie: lowest feature, then lowest threshold


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


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def exact_split(
    codes: Any, f: int, rows: Any, a: int, b: int, y: Any, mean: Any, leaf_rows: int, even: float, sums: Any, counts: Any
) -> tuple[float, int]:
    """Return the best gain of feature ``f`` on ``rows[a:b]`` in float64, and its threshold (-1 when it cannot split)."""
    k = y.shape[1]
    n_codes = counts.shape[0]
    counts[:] = 0
    tile, lane = f // TILE, f % TILE
    for j in range(a, b):
        code = codes[tile, rows[j], lane]
        if counts[code] == 0:
            for c in range(k):
                sums[code, c] = 0.0
        counts[code] += 1
        for c in range(k):
            sums[code, c] += y[rows[j], c] - mean[c]
    best, threshold = -np.inf, -1
    n, n_left, before = b - a, 0, -1
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
        gain = -np.inf
        if leaf_rows <= n_left and n_left <= n - leaf_rows:
            gain = length * n / (float(n_left) * (n - n_left))
    return best, threshold


@njit(nogil=True, cache=True)
def _compact(codes: Any, tile: int, rows: Any, a: int, b: int, ranks: Any, seen: Any, used: Any) -> None:
    """Replace codes by their rank among the codes that occur in the node, feature by feature."""
    n_codes = seen.shape[1]
    seen[:, :] = 0
    for j in range(a, b):
        for q in range(TILE):
            seen[q, codes[tile, rows[j], q]] = 1
    for q in range(TILE):
        rank = 0
        for code in range(n_codes):
            if seen[q, code]:
                seen[q, code] = rank
                rank += 1
        used[q] = rank
    for j in range(a, b):
        for q in range(TILE):
            ranks[j - a, q] = seen[q, codes[tile, rows[j], q]]


@njit(nogil=True, cache=True)
def search(
    first_tile: int,
    last_tile: int,
    n_codes: int,
    codes: Any,
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
    hist: Any,
    run: Any,
    gain: Any,
    feature: Any,
    threshold: Any,
) -> None:
    """Find, for every wanted node, the best split among the features of tiles ``first_tile..last_tile``.

    Histograms of GROWN nodes take rows ``grown_from..stop`` into ``pool``; SUBTRACTED ones are parent - sibling.
    """
    k = y.shape[1]
    full = fixed.shape[1]
    flat = fixed.reshape(-1)
    size = TILE * n_codes * LANES
    best = np.empty((last_tile - first_tile) * TILE)
    second = np.empty((last_tile - first_tile) * TILE)
    length = np.empty((TILE, n_codes))
    lefts = np.empty((TILE, n_codes), np.int64)
    used = np.empty(TILE, np.int64)
    seen = np.empty((TILE, n_codes), np.int64)
    sums = np.empty((n_codes + 1, k))
    counts = np.empty(n_codes, np.int64)
    keys = np.empty(64)
    for node in range(start.shape[0]):
        a, b = start[node], stop[node]
        m = b - a
        width = lanes[node]
        groups = width // LANES
        compact = mode[node] == LOCAL and n_codes > 16 and m < n_codes
        ranks = np.empty((m if compact else 1, TILE), np.uint8)
        for tile in range(first_tile, last_tile):
            used[:] = n_codes
            if compact:
                _compact(codes, tile, rows, a, b, ranks, seen, used)
            for group in range(groups):
                h = hist
                base = 0
                if mode[node] == LOCAL:
                    if compact:
                        for q in range(TILE):
                            h[q * n_codes * LANES : (q * n_codes + used[q]) * LANES] = 0
                        for j in range(m):
                            at = local_at[node] + j * width + group * LANES
                            for q in range(TILE):
                                add_lanes(h, (q * n_codes + np.int64(ranks[j, q])) * LANES, local, at)
                    else:
                        h[:size] = 0
                        for j in range(m):
                            at = local_at[node] + j * width + group * LANES
                            r = rows[a + j]
                            for q in range(TILE):
                                add_lanes(h, (q * n_codes + np.int64(codes[tile, r, q])) * LANES, local, at)
                else:
                    h = pool
                    offset = (tile * groups + group) * size
                    base = block[node] * block_size + offset
                    if mode[node] == GROWN:
                        if fresh[node]:
                            h[base : base + size] = 0
                        for j in range(grown_from[node], b):
                            r = rows[j]
                            at = np.int64(r) * full + group * LANES
                            for q in range(TILE):
                                add_lanes(h, base + (q * n_codes + np.int64(codes[tile, r, q])) * LANES, flat, at)
                    else:
                        whole = parent[node] * block_size + offset
                        other = sibling[node] * block_size + offset
                        for j in range(size):
                            h[base + j] = h[whole + j] - h[other + j]
                if not wanted[node]:
                    continue
                for q in range(TILE):
                    run[:] = 0
                    n_left = 0
                    for bin_ in range(used[q] - 1):
                        at = base + (q * n_codes + bin_) * LANES
                        if group == 0:
                            n_left += h[at]
                            lefts[q, bin_] = n_left
                            length[q, bin_] = 0.0
                        if bin_ > 0 and lefts[q, bin_] == lefts[q, bin_ - 1]:
                            length[q, bin_] = -1.0  # an empty code is no threshold of its own
                            continue
                        length[q, bin_] += advance_and_square(
                            h, at, run, 0, fixed_mean, node * full + group * LANES, float(lefts[q, bin_])
                        )
            if not wanted[node]:
                continue
            for q in range(TILE):
                one, two = -1.0, -1.0
                for bin_ in range(used[q] - 1):
                    n_left = lefts[q, bin_]
                    if length[q, bin_] < 0.0 or n_left < max(leaf_rows, 1) or m - n_left < max(leaf_rows, 1):
                        continue
                    g = length[q, bin_] * m / (float(n_left) * (m - n_left))
                    if g > one:
                        one, two = g, one
                    elif g > two:
                        two = g
                best[(tile - first_tile) * TILE + q] = one
                second[(tile - first_tile) * TILE + q] = two
        gain[node], feature[node], threshold[node] = -np.inf, -1, -1
        if not wanted[node]:
            continue
        lead = best.max()
        if lead < 0.0:
            continue
        s2 = step[node] * step[node]
        eps = step[node] * np.sqrt(float(width) * m) * (1 + 1e-6)
        floor = max(np.sqrt(lead * s2) - eps, 0.0)
        need = max(np.sqrt(max(floor * floor * (1 - 1e-9) - tail[node], 0.0)) - eps, 0.0)
        need = need * need / s2
        even = EVEN * energy[node]
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
            g, t = exact_split(
                codes, first_tile * TILE + f, rows, a, b, y, mean[node], max(leaf_rows, 1), even, sums, counts
            )
            if t >= 0 and g > gain[node] + even:
                gain[node], feature[node], threshold[node] = g, first_tile * TILE + f, t
