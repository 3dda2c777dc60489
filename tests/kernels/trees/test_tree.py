"""The tree and its limits: against scikit-learn, and prediction against the path of each row."""

import numpy as np
import pytest
from sklearn.tree import DecisionTreeRegressor

from auditor.kernels.trees.tree import TreeLimits, fit_tree
from tests.kernels.trees.drawn_codes import drawn


@pytest.mark.parametrize(
    ("n", "n_features", "k", "bits", "depth", "leaf_rows"),
    [(3000, 48, 10, 4, 8, 1), (1200, 40, 60, 4, 12, 2), (2500, 20, 3, 8, 6, 1), (700, 64, 5, 2, 10, 1)],
)
def test_equals_scikit_learn(n, n_features, k, bits, depth, leaf_rows):
    codes, y = drawn(n, n_features, k, bits, seed=3)
    tree = fit_tree(codes, y, TreeLimits(depth, leaf_rows=leaf_rows), bits=bits)
    peer = DecisionTreeRegressor(max_depth=depth, min_samples_leaf=leaf_rows, random_state=0).fit(codes, y)
    ours, theirs = ((tree.predict(codes) - y) ** 2).mean(), ((peer.predict(codes) - y) ** 2).mean()
    assert ours == pytest.approx(theirs, abs=1e-9)
    assert tree.n_leaves == peer.get_n_leaves()
    assert tree.depth == peer.get_depth()
    same = same_splits(tree, peer.tree_, codes)
    assert same == tree.n_nodes - tree.n_leaves


def same_splits(tree, peer, codes):
    """Walk both trees together; count the inner nodes that part their rows alike (a tie may name another feature)."""
    count, stack = 0, [(0, 0, np.arange(len(codes)))]
    while stack:
        a, b, rows = stack.pop()
        if tree.feature[a] < 0 or peer.children_left[b] < 0:
            assert tree.feature[a] < 0
            assert peer.children_left[b] < 0
            continue
        ours = codes[rows, tree.feature[a]] <= tree.threshold[a]
        theirs = codes[rows, peer.feature[b]] <= peer.threshold[b]
        if tree.feature[a] == peer.feature[b]:
            assert tree.threshold[a] == int(np.floor(peer.threshold[b]))
        if (ours == ~theirs).all():  # the same two sides, named the other way round
            stack += [
                (tree.left[a], peer.children_right[b], rows[ours]),
                (tree.right[a], peer.children_left[b], rows[~ours]),
            ]
            count += 1
            continue
        np.testing.assert_array_equal(ours, theirs)
        stack += [
            (tree.left[a], peer.children_left[b], rows[ours]),
            (tree.right[a], peer.children_right[b], rows[~ours]),
        ]
        count += 1
    return count


def test_min_gain_is_scikit_learns_impurity_decrease():
    codes, y = drawn(600, 20, 4, 4)
    tree = fit_tree(codes, y, TreeLimits(10, min_gain=2e-4))
    peer = DecisionTreeRegressor(max_depth=10, min_impurity_decrease=2e-4, random_state=0).fit(codes, y)
    assert 1 < tree.n_leaves == peer.get_n_leaves()
    np.testing.assert_allclose(tree.predict(codes), peer.predict(codes), atol=1e-12)


def test_thresholds_are_scikit_learns_midpoints_on_codes_never_seen():
    codes = np.array([[2], [2], [7], [7], [12], [12]], np.uint8)
    y = np.array([[0.0], [0.0], [1.0], [1.0], [5.0], [5.0]])
    tree, peer = fit_tree(codes, y), DecisionTreeRegressor().fit(codes, y)
    every = np.arange(16, dtype=np.uint8)[:, None]
    np.testing.assert_array_equal(tree.predict(every)[:, 0], peer.predict(every))


def test_constant_features_and_constant_targets_give_one_leaf():
    codes, y = drawn(50, 6, 3, 4)
    alone = fit_tree(np.full_like(codes, 7), y)
    assert alone.n_nodes == 1
    np.testing.assert_allclose(alone.value[0], y.mean(0))
    assert alone.depth == 0
    assert fit_tree(codes, np.full((50, 3), 1 / 3)).n_nodes == 1


def test_leaf_means_of_probabilities_are_probabilities():
    codes, y = drawn(900, 30, 12, 4)
    p = fit_tree(codes, y, TreeLimits(8)).predict(codes)
    assert p.min() >= 0
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-6)


def test_the_path_ends_in_the_applied_leaf():
    codes, y = drawn(300, 20, 4, 4)
    tree = fit_tree(codes, y)
    leaves = tree.apply(codes)
    for row in (0, 17, 299):
        assert tree.path(codes[row])[-1] == leaves[row]
    assert (tree.feature[leaves] == -1).all()
    assert tree.depth == max(len(tree.path(row)) for row in codes) - 1
    assert 0 in tree.features_used
    assert fit_tree(codes[:, :1], y, TreeLimits(3)).depth == 3  # the one feature is number 0
    np.testing.assert_array_equal(
        np.bincount(leaves, minlength=tree.n_nodes)[tree.feature < 0], tree.rows[tree.feature < 0]
    )


@pytest.mark.parametrize(
    ("codes", "y", "sentence"),
    [
        (np.full((3, 2), 16, np.uint8), np.ones((3, 1)), r"codes of 4 bits must lie in 0\.\.15, got 16\.\.16"),
        (np.full((3, 2), -1, np.int64), np.ones((3, 1)), r"got -1\.\.-1"),
        (np.array([[3, -1]]), np.ones((1, 1)), r"got -1\.\.3"),
        (np.zeros((3, 2), np.uint8), np.array([[1.0, np.inf], [1, 1], [1, 1]]), "NaN or infinity in 1 of 3 rows"),
        (np.zeros((3, 2)), np.ones((3, 1)), "codes must be integers, got float64"),
        (np.zeros(3, np.uint8), np.ones((3, 1)), r"codes must be \(rows, features\), got \(3,\)"),
        (np.zeros((3, 2), np.uint8), np.ones((2, 1)), r"targets must be \(3, outputs\)"),
        (np.zeros((3, 2), np.uint8), np.array([[1.0], [np.nan], [1.0]]), "NaN or infinity in 1 of 3 rows"),
        (np.zeros((0, 2), np.uint8), np.ones((0, 1)), "at least one row"),
    ],
)
def test_bad_input_is_one_sentence(codes, y, sentence):
    with pytest.raises(ValueError, match=sentence):
        fit_tree(codes, y)


def test_limits_are_checked():
    with pytest.raises(ValueError, match="depth and leaf_rows must be at least 1"):
        TreeLimits(depth=0)
