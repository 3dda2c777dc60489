"""The search of a level against the plain reference, for every way to a histogram; its steps against formulas."""

import hashlib
import math
from pathlib import Path

import numpy as np
import pytest

from auditor.kernels.trees import split_search
from auditor.kernels.trees.histogram_simd import LANES, aligned
from auditor.kernels.trees.node_targets import LOCAL, prepare
from auditor.kernels.trees.reference import best_split
from auditor.kernels.trees.split_search import (
    EVEN,
    GROWN,
    SUBTRACTED,
    TILE,
    Features,
    Histograms,
    Splits,
    _compact,
    _least_gain,
    _shares,
    exact_split,
    scratch,
    search,
)
from auditor.kernels.trees.tree import TreeLimits
from tests.kernels.trees.drawn_codes import drawn, nodes_of, room_for, targets_of


class Level:
    """A level of nodes with room for four histograms."""

    def __init__(self, codes, y, bits):
        n, n_features = codes.shape
        self.codes, self.targets, self.n_codes = codes, targets_of(y), 2**bits
        self.n_tiles = -(-n_features // TILE)
        self.plain = np.zeros((n, self.n_tiles * TILE), np.uint8)
        self.plain[:, :n_features] = codes
        self.tiles = np.ascontiguousarray(self.plain.reshape(n, self.n_tiles, TILE).transpose(1, 0, 2))
        self.block_size = self.n_tiles * TILE * self.n_codes * self.targets.fixed.shape[1]
        self.pool = aligned(4 * self.block_size, np.int32, fill=-5)

    def block(self, i):
        """A histogram as (feature, code, lane)."""
        lanes = self.targets.fixed.shape[1]
        whole = self.pool[i * self.block_size : (i + 1) * self.block_size]
        parts = whole.reshape(self.n_tiles, lanes // LANES, TILE, self.n_codes, LANES)
        return parts.transpose(0, 2, 3, 1, 4).reshape(self.n_tiles * TILE, self.n_codes, lanes)

    def search(self, groups, modes, limits=None, tiles=None, impure=None, blocks=None):
        """Return (gain, feature, threshold) per node; ``blocks``: block, parent, sibling, old rows, fresh per node."""
        limits, nodes = limits or TreeLimits(), nodes_of(groups, modes)
        first, last = tiles or (0, self.n_tiles)
        described = room_for(nodes, self.targets)
        prepare(0, len(groups), nodes, self.targets, described)
        block, parent, sibling, n_old, fresh = np.array(blocks or [(0, 0, 0, 0, 1)] * len(groups)).T.copy()
        splits = Splits(np.full(len(groups), 7.0), np.full(len(groups), 7), np.full(len(groups), 7))
        search(
            Features(first, last, self.n_codes, self.tiles, self.plain),
            nodes,
            np.ones(len(groups), np.bool_) if impure is None else np.array(impure),
            self.targets,
            described,
            Histograms(self.pool, self.block_size, block, parent, sibling, nodes.start + n_old, fresh),
            (limits.leaf_rows, limits.balance),
            scratch((last - first) * TILE, self.n_codes, self.targets.y.shape[1]),
            splits,
        )
        return list(zip(*(column.tolist() for column in splits), strict=True))

    def expected(self, rows, limits=None, tiles=None):
        first, last = tiles or (0, self.n_tiles)
        split = best_split(self.plain[rows, first * TILE : last * TILE], self.targets.y[rows], limits or TreeLimits())
        return (-math.inf, -1, -1) if split is None else (split[0], split[1] + first * TILE, split[2])


def same(got, want):
    assert got[1:] == want[1:]
    assert got[0] == pytest.approx(want[0], rel=1e-9)


CASES = [  # features, outputs, bits
    (5, 1, 2),
    (19, 3, 4),
    (16, 20, 4),  # two groups of lanes
    (7, 40, 8),  # codes of small nodes are ranked, targets become coordinates
]


@pytest.mark.parametrize(("n_features", "k", "bits"), CASES)
@pytest.mark.parametrize("limits", [TreeLimits(), TreeLimits(leaf_rows=4, balance=0.5)])
def test_every_mode_finds_the_split_of_the_reference(n_features, k, bits, limits):
    codes, y = drawn(130, n_features, k + 1, bits, seed=k)
    level, rows = Level(codes, y[:, :k].copy(), bits), np.random.default_rng(0).permutation(130)
    root = level.search([rows], [GROWN], limits)
    same(root[0], level.expected(rows, limits))
    small, large, medium, tiny = rows[:40], rows[40:], rows[90:], rows[5:14]
    groups = [medium, small, large, tiny]
    blocks = [(0, 0, 0, 0, 1), (1, 0, 0, 0, 1), (2, 0, 1, 0, 1), (0, 0, 0, 0, 1)]
    splits = level.search(groups, [LOCAL, GROWN, SUBTRACTED, LOCAL], limits, blocks=blocks)
    for got, part in zip(splits, groups, strict=True):
        same(got, level.expected(part, limits))


def test_histograms_are_the_plain_sums_and_grow_by_new_rows_only():
    codes, y = drawn(70, 19, 20, 3)
    level, rows = Level(codes, y, 3), np.random.default_rng(1).permutation(70)

    def plain(part):
        total = np.zeros((2 * TILE, 8, 32), np.int64)
        for row in part:
            for f in range(2 * TILE):
                total[f, level.plain[row, f]] += level.targets.fixed[row]
        return total

    level.search([rows[:50]], [GROWN], blocks=[(1, 0, 0, 0, 1)])
    np.testing.assert_array_equal(level.block(1), plain(rows[:50]))
    (got,) = level.search([rows], [GROWN], blocks=[(1, 0, 0, 50, 0)])
    np.testing.assert_array_equal(level.block(1), plain(rows))
    same(got, level.expected(rows))
    level.search([rows[:20], rows[20:]], [GROWN, SUBTRACTED], blocks=[(2, 0, 0, 0, 1), (3, 1, 2, 0, 1)])
    np.testing.assert_array_equal(level.block(2), plain(rows[:20]))
    np.testing.assert_array_equal(level.block(3), plain(rows[20:]))
    np.testing.assert_array_equal(level.block(1), plain(rows))
    assert (level.block(0) == -5).all()


def test_nodes_that_are_not_wanted_get_no_split_but_their_histogram():
    codes, y = drawn(90, 19, 3, 4)
    level, rows = Level(codes, y, 4), np.arange(90)
    groups, modes = [rows[:30], rows[30:60], rows[60:68]], [GROWN, LOCAL, LOCAL]
    splits = level.search(groups, modes, impure=[False, True, False])
    assert splits[0] == splits[2] == (-math.inf, -1, -1)
    same(splits[1], level.expected(groups[1]))
    assert level.block(0)[:, :, 0].sum() == 30 * 2 * TILE


@pytest.mark.parametrize("tiles", [(0, 1), (1, 3), (2, 3)])
def test_a_share_of_the_tiles_is_searched_alone(tiles):
    codes, y = drawn(80, 40, 3, 4, informative=30)
    codes = np.ascontiguousarray(codes[:, ::-1])  # the strongest ones last
    level, rows = Level(codes, y, 4), np.arange(80)
    groups, modes = [rows, rows[:30], rows[:9]], [GROWN, LOCAL, LOCAL]
    for got, part in zip(level.search(groups, modes, tiles=tiles), groups, strict=True):
        same(got, level.expected(part, tiles=tiles))


@pytest.mark.parametrize("mode", [LOCAL, GROWN])
def test_ties_go_to_the_lowest_feature_then_to_the_lowest_threshold(mode):
    codes, y = drawn(60, 20, 3, 4, informative=1)
    codes[:, 4] = codes[:, 18] = codes[:, 0]
    codes[:, 0] = 3
    (got,) = Level(codes, y, 4).search([np.arange(60)], [mode])
    assert got[1] == 4
    codes = np.tile(np.arange(4, dtype=np.uint8)[:, None], (10, 1))
    for scale in (1.0, 1e8):
        (got,) = Level(codes, scale * np.tile(np.eye(4), (10, 1)), 4).search([np.arange(40)], [mode])
        assert got[1:] == (0, 0)


@pytest.mark.parametrize("mode", [LOCAL, GROWN])
def test_nothing_splits_constant_codes(mode):
    y = np.random.default_rng(0).normal(size=(30, 2))
    assert Level(np.full((30, 3), 6, np.uint8), y, 4).search([np.arange(30)], [mode]) == [(-math.inf, -1, -1)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("leaf_rows", [1, 5])
def test_exact_split_is_the_reference_on_one_feature(seed, leaf_rows):
    rng = np.random.default_rng(seed)
    y, column = rng.normal(size=(40, 3)), rng.choice(np.array([1, 2, 6, 7, 15], np.uint8), 25)
    rows = rng.permutation(40)[:25].astype(np.int32)
    room = scratch(TILE, 16, 3)
    limits = TreeLimits(leaf_rows=leaf_rows)
    want = best_split(column[:, None], y[rows], limits)
    share = _shares(25, leaf_rows, 0.0)
    got = exact_split(column, rows, y, y[rows].mean(0), share, 1e-12, room.sums, room.counts)
    assert got[0] == pytest.approx(want[0], rel=1e-9)
    assert got[1] == want[2]
    alone = exact_split(column[:1], rows[:1], y, y[rows[0]], _shares(1, 1, 0.0), 1e-12, room.sums, room.counts)
    assert alone == (-math.inf, -1)


def test_exact_split_takes_a_later_threshold_only_beyond_the_tolerance():
    y, column = np.array([[2.0], [-0.5], [-1.5]]), np.array([0, 1, 2], np.uint8)
    room, rows = scratch(TILE, 16, 1), np.arange(3, dtype=np.int32)
    share = np.array([-1.0, 1.0, 2.0, -1.0])  # gains 4 and 4.5
    assert exact_split(column, rows, y, np.zeros(1), share, 0.4, room.sums, room.counts) == (4.5, 1)
    assert exact_split(column, rows, y, np.zeros(1), share, 0.5, room.sums, room.counts) == (4.0, 0)


@pytest.mark.parametrize(("m", "leaf_rows", "balance"), [(1, 1, 0.0), (5, 1, 0.0), (8, 3, 0.5), (9, 5, 0.0)])
def test_shares_are_the_formula(m, leaf_rows, balance):
    share = _shares(m, leaf_rows, balance)
    assert len(share) == m + 1
    for n in range(m + 1):
        if n < leaf_rows or m - n < leaf_rows:
            assert share[n] == -1
        else:
            assert share[n] == pytest.approx(m / (n * (m - n)) * (4 * n * (m - n) / m**2) ** balance)


def test_the_least_gain_is_two_roundings_and_a_tail_below_the_lead():
    assert _least_gain(-1.0, 1.0, 16, 10, 0.0) == math.inf
    eps = math.sqrt(16 * 10)
    assert _least_gain(1e6, 0.5, 16, 10, 0.0) == pytest.approx((1000 - 2 * eps) ** 2, rel=1e-5)
    left = math.sqrt((1000 - eps) ** 2 - 3e4 / 0.5**2)  # a tail of 3e4 in units of the step
    assert _least_gain(1e6, 0.5, 16, 10, 3e4) == pytest.approx((left - eps) ** 2, rel=1e-5)
    assert _least_gain(eps**2 * 1.5, 1.0, 16, 10, 0.0) == 0
    assert _least_gain(0.0, 1.0, 16, 10, 5.0) == 0


@pytest.mark.parametrize("n_codes", [4, 256])
def test_compact_codes_are_ranks_among_those_that_occur(n_codes):
    codes = np.random.default_rng(0).integers(0, n_codes, (6, TILE)).astype(np.uint8)
    before, room = codes.copy(), scratch(TILE, n_codes, 1)
    ranked = _compact(codes, room.ranks, room.used)
    for q in range(TILE):
        values, ranks = np.unique(codes[:, q], return_inverse=True)
        assert room.used[q] == len(values)
        np.testing.assert_array_equal(ranked[:, q], ranks)
    np.testing.assert_array_equal(codes, before)


def test_the_tolerance_of_ties_is_the_references():
    from auditor.kernels.trees import reference

    assert EVEN == reference._EVEN


def test_the_compiled_search_was_built_on_these_sources():
    """A cached compilation is renewed when its own file changes, not when a file it calls does: so it names them."""
    folder = Path(split_search.__file__).parent
    source = b"".join((folder / name).read_bytes() for name in ("histogram_simd.py", "tiny_nodes.py"))
    assert hashlib.sha256(source).hexdigest()[:12] == split_search.BUILT_ON, "update BUILT_ON in split_search.py"


@pytest.mark.parametrize("mode", [LOCAL, GROWN])
@pytest.mark.parametrize("bits", [2, 8])
def test_the_first_and_the_last_code_can_be_cut_off(mode, bits):
    top = 2**bits - 1
    codes = np.repeat(np.array([0, 1, top - 1, top], np.uint8), 5)[:, None]
    for alone, threshold in ((0, 0), (3, top - 1)):
        y = (np.repeat(np.arange(4), 5) == alone)[:, None] * [1.0, -2.0]
        (got,) = Level(codes, y, bits).search([np.arange(20)], [mode])
        assert got[1:] == (0, threshold)


def test_a_tiny_node_is_followed_by_any_other():
    codes, y = drawn(60, 19, 3, 4)
    level, rows = Level(codes, y, 4), np.arange(60)
    groups = [rows[:5], rows[5:9], rows[9:40], rows[40:47], rows[47:]]
    for got, part in zip(level.search(groups, [LOCAL] * 5), groups, strict=True):
        same(got, level.expected(part))


def test_the_memory_of_a_thread_holds_a_node_and_its_sibling():
    room = scratch(64, 16, 3)
    assert room.best.shape == room.second.shape == (2, 64)
    assert room.sums.shape == (17, 3)
