"""The plain reference against squared errors of every cut, and by hand."""

import itertools

import numpy as np
import pytest

from auditor.kernels.trees.reference import best_split, fit_tree_reference
from auditor.kernels.trees.tree import TreeLimits


def squared_error(y):
    return ((y - y.mean(0)) ** 2).sum()


def every_cut(codes, y, leaf_rows, balance):
    """(gain, feature, threshold) of every cut between codes that occur."""
    n = len(y)
    for f in range(codes.shape[1]):
        values = sorted(set(codes[:, f].tolist()))
        for low, high in itertools.pairwise(values):
            left = codes[:, f] <= low
            a, b = left.sum(), n - left.sum()
            if min(a, b) >= leaf_rows:
                drop = squared_error(y) - squared_error(y[left]) - squared_error(y[~left])
                yield drop * (4 * a * b / n**2) ** balance, f, (low + high) // 2


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("leaf_rows", "balance"), [(1, 0.0), (3, 0.0), (1, 0.7)])
def test_the_best_split_drops_the_squared_error_most(seed, leaf_rows, balance):
    rng = np.random.default_rng(seed)
    codes, y = rng.integers(0, 16, (17, 5)).astype(np.uint8), rng.normal(size=(17, 3))
    gain, feature, threshold = best_split(codes, y, TreeLimits(leaf_rows=leaf_rows, balance=balance))
    want = max(every_cut(codes, y, leaf_rows, balance), key=lambda cut: cut[0])
    assert gain == pytest.approx(want[0], rel=1e-9)
    assert (feature, threshold) == want[1:]


def test_nothing_to_split():
    codes, y = np.array([[0], [1], [2], [3]], np.uint8), np.array([[0.0], [0.0], [1.0], [1.0]])
    assert best_split(codes, np.ones((4, 2)), TreeLimits()) is None
    assert best_split(np.zeros((4, 3), np.uint8), y, TreeLimits()) is None
    assert best_split(codes, y, TreeLimits(split_rows=5)) is None
    assert best_split(codes, y, TreeLimits(split_rows=4)) is not None
    assert best_split(codes, y, TreeLimits(leaf_rows=3)) is None
    assert best_split(codes, y, TreeLimits(leaf_rows=2)) == (1.0, 0, 1)


def test_a_tie_goes_to_the_lowest_feature_then_threshold():
    codes = np.array([[0, 0], [5, 5], [6, 6], [9, 9]], np.uint8)
    assert best_split(codes, np.eye(4), TreeLimits())[1:] == (0, 2)


def test_a_tree_by_hand():
    codes = np.array([[0, 1], [0, 1], [7, 0], [7, 3], [7, 3]], np.uint8)
    y = np.array([[0.0], [0.0], [4.0], [6.0], [6.0]])
    tree = fit_tree_reference(codes, y, TreeLimits(2))
    assert tree.feature.tolist() == [0, -1, 1, -1, -1]
    assert tree.threshold.tolist() == [3, -1, 1, -1, -1]
    assert tree.left.tolist() == [1, -1, 3, -1, -1]
    assert tree.right.tolist() == [2, -1, 4, -1, -1]
    assert tree.rows.tolist() == [5, 2, 3, 1, 2]
    np.testing.assert_allclose(tree.value[:, 0], [3.2, 0, 16 / 3, 4, 6])
    np.testing.assert_allclose(tree.gain, [squared_error(y) - 8 / 3, 0, 8 / 3, 0, 0])
    assert (tree.n_features, tree.bits) == (2, 4)
    assert fit_tree_reference(codes, y, TreeLimits(1)).n_nodes == 3
    assert fit_tree_reference(codes, y, TreeLimits(2, min_gain=0.5)).n_nodes == 5  # 8/3 of 5 rows is above 0.5
    assert fit_tree_reference(codes, y, TreeLimits(2, min_gain=0.55)).n_nodes == 3


def test_both_sides_of_a_cut_need_their_rows():
    codes = np.arange(8, dtype=np.uint8)[:, None]
    for alone, threshold in ((7, 5), (0, 1)):
        y = (np.arange(8) == alone)[:, None] * 10.0
        assert best_split(codes, y, TreeLimits())[2] == (6 if alone == 7 else 0)
        assert best_split(codes, y, TreeLimits(leaf_rows=2))[2] == threshold


def test_a_tree_of_one_leaf():
    tree = fit_tree_reference(np.zeros((3, 2), np.uint8), np.arange(3.0)[:, None])
    columns = (tree.feature, tree.threshold, tree.left, tree.right, tree.gain, tree.rows, tree.value[:, 0])
    assert [column.tolist() for column in columns] == [[-1], [-1], [-1], [-1], [0.0], [3], [1.0]]
    wide = fit_tree_reference(np.arange(9, dtype=np.uint8)[:, None], np.arange(9.0)[:, None], TreeLimits(4))
    assert wide.depth == 4
