"""The table of all subsets against every split written out; its look-up against the plain reference."""

import numpy as np
import pytest

from auditor.kernels.trees.reference import best_split
from auditor.kernels.trees.split_search import TILE
from auditor.kernels.trees.tiny_nodes import MOST_SUBSET_ROWS, best_by_subsets, subset_gains
from auditor.kernels.trees.tree import TreeLimits


def test_the_subset_table_is_the_gain_of_every_split():
    rng = np.random.default_rng(0)
    y = rng.normal(size=(5, 3))
    share = np.array([-1, -1, 5 / 6, 5 / 6, -1, -1])
    gains = subset_gains(y, np.arange(5, dtype=np.int32), y.mean(0), share)
    for subset in range(32):
        left = np.array([subset >> i & 1 for i in range(5)], bool)
        if 2 <= left.sum() <= 3:
            true = sum(len(part) * ((part.mean(0) - y.mean(0)) ** 2).sum() for part in (y[left], y[~left]))
            assert gains[subset] == pytest.approx(true, rel=1e-12)
        else:
            assert gains[subset] == -1


def shares(m, leaf_rows):
    return np.array([m / (n * (m - n)) if leaf_rows <= n <= m - leaf_rows else -1.0 for n in range(m + 1)])


def in_tiles(codes):
    """(tile, row, feature of the tile), as the search gathers them."""
    n, n_features = codes.shape
    return np.ascontiguousarray(codes.reshape(n, n_features // TILE, TILE).transpose(1, 0, 2))


@pytest.mark.parametrize("m", [2, 3, 5, MOST_SUBSET_ROWS])
@pytest.mark.parametrize("leaf_rows", [1, 2])
@pytest.mark.parametrize(("top", "k"), [(2, 1), (16, 3), (256, 20)])
def test_look_up_equals_the_plain_reference(m, leaf_rows, top, k):
    for seed in range(4):
        rng = np.random.default_rng(seed)
        codes, y = rng.integers(0, top, (m, 2 * TILE)).astype(np.uint8), rng.normal(size=(m, k))
        d = y - y.mean(0)
        want = best_split(codes, y, TreeLimits(leaf_rows=leaf_rows))
        gains = subset_gains(y, np.arange(m, dtype=np.int32), y.mean(0), shares(m, leaf_rows))
        got = best_by_subsets(in_tiles(codes), gains, 1e-12 * (d * d).sum())
        if want is None:
            assert got == (-np.inf, -1, -1)
        else:
            assert got[0] == pytest.approx(want[0], rel=1e-9)
            assert got[1:] == want[1:]


def test_ties_go_to_the_lowest_feature_and_threshold():
    codes = np.zeros((4, TILE), np.uint8)
    codes[:, 3] = [0, 2, 9, 11]
    codes[:, 5] = [0, 2, 9, 11]
    y = np.eye(4)  # every cut gains the same
    gains = subset_gains(y, np.arange(4, dtype=np.int32), y.mean(0), shares(4, 1))
    assert best_by_subsets(in_tiles(codes), gains, 1e-12) == (pytest.approx(1.0), 3, 1)
    assert best_by_subsets(in_tiles(codes), gains, 0.0)[1] == 3


def test_gains_within_the_tolerance_are_a_tie_and_beyond_it_are_not():
    codes = np.zeros((2, TILE), np.uint8)
    codes[:, 2], codes[:, 7] = [0, 1], [1, 0]
    gains = np.array([-1.0, 1.0, 1.5, -1.0])  # feature 2 sends row 0 left, feature 7 row 1
    assert best_by_subsets(in_tiles(codes), gains, 0.4) == (1.5, 7, 0)
    assert best_by_subsets(in_tiles(codes), gains, 0.5) == (1.0, 2, 0)
    codes = np.zeros((3, TILE), np.uint8)
    codes[:, 4] = [0, 4, 9]
    gains = np.full(8, -1.0)
    gains[0b001], gains[0b011] = 1.0, 1.5  # one feature: the lower threshold is as good within 0.5
    assert best_by_subsets(in_tiles(codes), gains, 0.5) == (1.5, 4, 2)
    assert best_by_subsets(in_tiles(codes), gains, 0.4) == (1.5, 4, 6)


def test_rows_are_taken_by_their_number_and_a_mean_may_be_any():
    rng = np.random.default_rng(0)
    y, rows, mean = rng.normal(size=(9, 2)), np.array([7, 2, 4], np.int32), rng.normal(size=2)
    gains = subset_gains(y, rows, mean, np.array([-1.0, 2.0, 3.0, -1.0]))
    d = y[rows] - mean
    assert gains[0] == gains[7] == -1
    for row in range(2):  # a subset of one or two without the last row; its complement has the same entry
        assert gains[1 << row] == pytest.approx(2 * (d[row] ** 2).sum())
    assert gains[0b011] == pytest.approx(3 * (d[:2].sum(0) ** 2).sum())
    assert gains[0b100] == gains[0b011]
