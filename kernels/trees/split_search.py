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

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from auditor.kernels.trees.histogram_simd import LANES, add_lanes, add_squared_gaps, aligned, count_and_square
from auditor.kernels.trees.node_targets import LOCAL, Nodes, NodeTargets, Targets
from auditor.kernels.trees.tiny_nodes import MOST_SUBSET_ROWS, best_by_subsets, subset_gains

TILE = 16  # features per tile: their 4-bit histograms of one group of lanes fill half of the first-level cache
GROWN, SUBTRACTED = 1, 2  # how a node comes to its histogram, if it is not LOCAL
# sha256 of histogram_simd.py and tiny_nodes.py: a change there must renew the compiled cache of this file
BUILT_ON = "e71ae64176dc"
EVEN = 1e-12  # gains closer than this share of the node's energy are a tie: lowest feature, then lowest threshold
MOST_KEYS = 64  # different gains of proposed features that are remembered to recognise ties


class Features(NamedTuple):
    """The features of tiles ``first_tile..last_tile``, the share of one thread; a tile is ``TILE`` neighbours."""

    first_tile: int
    last_tile: int
    n_codes: int
    codes: Any  # (tile, row, feature of the tile) uint8
    plain: Any  # the same as (row, feature)


class Histograms(NamedTuple):
    """The histograms that nodes keep: blocks of one pool, and how those of this level come about."""

    pool: Any  # flat int32
    block_size: int
    block: Any  # (nodes,) its block
    parent: Any  # (nodes,) block that a SUBTRACTED one is subtracted from
    sibling: Any  # (nodes,) block that is subtracted
    added_from: Any  # (nodes,) a GROWN one adds the node's rows from here on to its block
    fresh: Any  # (nodes,) 1 where the block is cleared before


class Splits(NamedTuple):
    """The best split of every node: gain -inf, feature and threshold -1 where there is none."""

    gain: Any
    feature: Any
    threshold: Any


class Scratch(NamedTuple):
    """Memory that one thread uses again for every node; ``best`` and ``second`` for a node and its sibling."""

    hist: Any  # flat int32 on a cache line: the histogram of a LOCAL node's tile
    best: Any  # (2, features) largest fixed-point gain of each feature
    second: Any  # (2, features) second largest one
    lefts: Any  # (TILE, codes) rows up to a code
    length: Any  # (TILE, codes) squared length of those rows' summed distance from the mean
    used: Any  # (TILE,) codes that each feature of the tile has
    ranks: Any  # (TILE, codes) rank of a code among those that occur
    sums: Any  # (codes + 1, outputs) float64
    counts: Any  # (codes,)


def scratch(n_features: int, n_codes: int, n_outputs: int) -> Scratch:
    """Return the memory that :func:`search` needs for so many features, a multiple of ``TILE``."""
    return Scratch(
        hist=aligned(TILE * n_codes * LANES, np.int32, fill=None),
        best=np.empty((2, n_features)),
        second=np.empty((2, n_features)),
        lefts=np.empty((TILE, n_codes)),
        length=np.empty((TILE, n_codes)),
        used=np.empty(TILE, np.int64),
        ranks=np.empty((TILE, n_codes), np.int64),
        sums=np.empty((n_codes + 1, n_outputs)),
        counts=np.empty(n_codes, np.int64),
    )


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def exact_split(
    column: Any, rows: Any, y: Any, mean: Any, share: Any, even: float, sums: Any, counts: Any
) -> tuple[float, int]:
    """Return the best gain, in float64, of a feature whose codes are ``column``, and its threshold (-1 for none)."""
    k = y.shape[1]
    n_codes = counts.shape[0]
    for code in range(n_codes):
        counts[code] = 0
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
    for c in range(k):
        run[c] = 0.0
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


@njit(inline="always")
def _gather(plain: Any, rows: Any, first_tile: int, near: Any) -> None:
    """Copy the codes of a small node's rows side by side, (tile, row, feature of the tile)."""
    for j in range(rows.shape[0]):
        for tile in range(near.shape[0]):
            for q in range(TILE):
                near[tile, j, q] = plain[rows[j], (first_tile + tile) * TILE + q]


@njit(nogil=True, cache=True)
def _compact(codes: Any, ranks: Any, used: Any) -> Any:
    """Return the codes (row, feature) of a tile as ranks among those that occur; ``used`` counts them by feature."""
    for q in range(TILE):
        for code in range(ranks.shape[1]):
            ranks[q, code] = 0
    for j in range(codes.shape[0]):
        for q in range(TILE):
            ranks[q, codes[j, q]] = 1
    for q in range(TILE):
        rank = 0
        for code in range(ranks.shape[1]):
            if ranks[q, code]:
                ranks[q, code] = rank
                rank += 1
        used[q] = rank
    ranked = np.empty(codes.shape, np.uint8)
    for j in range(codes.shape[0]):
        for q in range(TILE):
            ranked[j, q] = ranks[q, codes[j, q]]
    return ranked


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


@njit(inline="always")
def _add_local(h: Any, n_codes: int, codes: Any, y: Any, at: int, width: int) -> None:
    """Add all rows of ``codes`` (row, feature of the tile); their targets lie one after the other in ``y``."""
    for j in range(codes.shape[0]):
        for q in range(TILE):
            add_lanes(h, (q * n_codes + np.int64(codes[j, q])) * LANES, y, at + j * width)


@njit(inline="always")
def _top_two(room: Scratch, share: Any, best: Any, second: Any, at: int) -> None:
    """Set the two largest gains of each feature of a tile, whose first one is ``at``."""
    used, lefts, length = room.used, room.lefts, room.length
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
    features: Features,
    nodes: Nodes,
    impure: Any,
    targets: Targets,
    described: NodeTargets,
    histograms: Histograms,
    limits: tuple[int, float],
    room: Scratch,
    splits: Splits,
) -> None:
    """Find, for every impure node, the best split among ``features``; ``limits`` are leaf rows and balance.

    A tiny node is decided by a table of all its splits. For the others, histograms propose features tile by tile, and
    exact sums of those few decide. Histograms of GROWN nodes take further rows into their block of the pool; SUBTRACTED
    ones are parent - sibling, where the sibling is the node before, so that its part of the tile is still in the cache.
    """
    node: Any = np.int64(0)  # typed, or everything called with it is compiled twice
    while node < nodes.start.shape[0]:
        m = nodes.stop[node] - nodes.start[node]
        is_local = nodes.mode[node] == LOCAL
        near = np.empty((features.last_tile - features.first_tile, m if is_local else 0, TILE), np.uint8)
        if is_local:
            _gather(features.plain, nodes.rows[nodes.start[node] : nodes.stop[node]], features.first_tile, near)
        share = _shares(m, limits[0], limits[1])
        if is_local and m <= MOST_SUBSET_ROWS:
            _split_tiny(node, features, near, nodes, impure[node], targets.y, described, share, splits)
            node += 1
            continue
        after, other_share = node + 1, share
        if after < nodes.start.shape[0] and nodes.mode[after] == SUBTRACTED:
            other_share = _shares(nodes.stop[after] - nodes.start[after], limits[0], limits[1])
            after += 1
        for tile in range(features.first_tile, features.last_tile):
            for i in range(node, after):
                _propose(tile, i, features, near, nodes, impure[i], targets.fixed, described, histograms, room)
                if impure[i]:
                    at, of_pair = (tile - features.first_tile) * TILE, i - node
                    _top_two(room, share if i == node else other_share, room.best[of_pair], room.second[of_pair], at)
        for i in range(node, after):
            gain, feature, threshold = -np.inf, -1, -1
            if impure[i]:
                best, second = room.best[i - node], room.second[i - node]
                its_share = share if i == node else other_share
                gain, feature, threshold = _decide(
                    i, best, second, features, near, nodes, targets.y, described, its_share, room
                )
            splits.gain[i], splits.feature[i], splits.threshold[i] = gain, feature, threshold
        node = after


@njit(inline="always")
def _split_tiny(
    node: int,
    features: Features,
    near: Any,
    nodes: Nodes,
    is_impure: bool,
    y: Any,
    described: NodeTargets,
    share: Any,
    splits: Splits,
) -> None:
    """Decide a node of a few rows: the gain of each of its splits is in one table."""
    gain, feature, threshold = -np.inf, -1, -1
    if is_impure:
        gains = subset_gains(y, nodes.rows[nodes.start[node] : nodes.stop[node]], described.mean[node], share)
        gain, feature, threshold = best_by_subsets(near, gains, EVEN * described.energy[node])
        if feature >= 0:
            feature += features.first_tile * TILE
    splits.gain[node], splits.feature[node], splits.threshold[node] = gain, feature, threshold


@njit(inline="always")
def _propose(
    tile: int,
    i: int,
    features: Features,
    near: Any,
    nodes: Nodes,
    is_impure: bool,
    fixed: Any,
    described: NodeTargets,
    histograms: Histograms,
    room: Scratch,
) -> None:
    """Bring node ``i``'s histogram of a tile up to date; an impure node gets ``lefts`` and ``length`` of bins."""
    n_codes, lanes, width = features.n_codes, described.lanes[i], fixed.shape[1]
    is_local = nodes.mode[i] == LOCAL
    used, lefts, length, means = (
        room.used,
        room.lefts,
        room.length,
        described.fixed_mean,
    )  # out of the loop: each costs a count
    for q in range(TILE):
        used[q] = n_codes
    codes = near[tile - features.first_tile]
    if is_local and n_codes > 16 and codes.shape[0] < n_codes:
        codes = _compact(codes, room.ranks, used)
    for group in range(lanes // LANES):
        hist, base = room.hist, 0
        if is_local:
            for q in range(TILE):
                hist[q * n_codes * LANES : (q * n_codes + used[q]) * LANES] = 0
            _add_local(hist, n_codes, codes, described.local, described.local_at[i] + group * LANES, lanes)
        else:
            hist = histograms.pool
            offset = (tile * (width // LANES) + group) * TILE * n_codes * LANES
            base = histograms.block[i] * histograms.block_size + offset
            _update_block(i, tile, group * LANES, base, offset, features, nodes, fixed, histograms)
        if is_impure:
            for q in range(TILE):
                at = base + q * n_codes * LANES
                if group == 0:
                    count_and_square(hist, at, used[q] - 1, lefts[q], means, i * width, length[q])
                else:
                    add_squared_gaps(hist, at, used[q] - 1, lefts[q], means, i * width + group * LANES, length[q])


@njit(inline="always")
def _update_block(
    i: int,
    tile: int,
    lane: int,
    base: int,
    offset: int,
    features: Features,
    nodes: Nodes,
    fixed: Any,
    histograms: Histograms,
) -> None:
    """Bring one tile and group of lanes of a node's block up to date: add its new rows, or subtract its sibling."""
    pool, size = histograms.pool, TILE * features.n_codes * LANES
    if nodes.mode[i] == GROWN:
        if histograms.fresh[i]:
            pool[base : base + size] = 0
        first, last = histograms.added_from[i], nodes.stop[i]
        _add_rows(pool, base, features.n_codes, features.codes, tile, nodes.rows, first, last, fixed, lane)
    else:
        whole = histograms.parent[i] * histograms.block_size + offset
        other = histograms.sibling[i] * histograms.block_size + offset
        for j in range(size):
            pool[base + j] = pool[whole + j] - pool[other + j]


@njit(nogil=True, cache=True)
def _shares(m: int, leaf_rows: int, balance: float) -> Any:
    """Return  n / (n_L n_R) * (4 n_L n_R / n^2)^balance  for every n_L, and -1 where a side would be too small."""
    share = np.empty(m + 1)
    for n_left in range(m + 1):
        share[n_left] = -1.0
    for n_left in range(leaf_rows, m - leaf_rows + 1):
        even = 4.0 * n_left * (m - n_left) / (float(m) * m)  # at most 1, so every bound on gains holds with it, too
        share[n_left] = m / (float(n_left) * (m - n_left)) * (even**balance if balance > 0.0 else 1.0)
    return share


@njit(inline="always")
def _least_gain(lead: float, step: float, width: int, m: int, tail: float) -> float:
    """Return the fixed-point gain from which a split may be the best one in truth, when ``lead`` is the largest."""
    if lead < 0.0:
        return np.inf
    eps = np.sqrt(float(width) * m) * (1 + 1e-6)
    surely = max(np.sqrt(lead) - eps, 0.0) ** 2 * (1 - 1e-9) - tail / step / step
    return float(max(np.sqrt(max(surely, 0.0)) - eps, 0.0) ** 2)


@njit(inline="always")
def _decide(
    i: int,
    best: Any,
    second: Any,
    features: Features,
    near: Any,
    nodes: Nodes,
    y: Any,
    described: NodeTargets,
    share: Any,
    room: Scratch,
) -> tuple[float, int, int]:
    """Sum the features that may hold node ``i``'s best split again in float64, and return the winner."""
    rows, even = nodes.rows[nodes.start[i] : nodes.stop[i]], EVEN * described.energy[i]
    lead = -1.0
    for f in range(best.shape[0]):
        lead = max(lead, best[f])
    need = _least_gain(lead, described.step[i], described.lanes[i], rows.shape[0], described.tail[i])
    gain, feature, threshold = -np.inf, -1, -1
    keys = np.empty(MOST_KEYS)
    column = np.empty(rows.shape[0], np.uint8)
    n_keys = 0
    for f in range(best.shape[0]):
        if best[f] < need or best[f] < 0.0:
            continue
        is_tied = False
        for j in range(n_keys):
            is_tied = is_tied or keys[j] == best[f]
        if is_tied and second[f] < need:
            continue  # equal in every bit of the fixed-point sums: a tie that the lower feature has won
        if not is_tied and n_keys < MOST_KEYS:
            keys[n_keys] = best[f]
            n_keys += 1
        tile = f // TILE
        for j in range(rows.shape[0]):
            column[j] = (
                near[tile, j, f % TILE]
                if near.shape[1]
                else features.codes[features.first_tile + tile, rows[j], f % TILE]
            )
        g, t = exact_split(column, rows, y, described.mean[i], share, even, room.sums, room.counts)
        if t >= 0 and g > gain + even:
            gain, feature, threshold = g, features.first_tile * TILE + f, t
    return gain, feature, threshold
