"""Growing: equal to the plain reference, whatever the threads, and equal to a fresh fit when rows are appended."""

import numpy as np
import pytest

from auditor.kernels.trees import grower as tree_grower
from auditor.kernels.trees import split_search
from auditor.kernels.trees.grower import TreeGrower
from auditor.kernels.trees.reference import fit_tree_reference
from auditor.kernels.trees.tree import TreeLimits, fit_tree
from tests.kernels.trees.drawn_codes import assert_same_tree, drawn

SHAPES = [  # rows, features, outputs, bits, depth
    (13, 17, 1, 2, 3),
    (90, 33, 3, 4, 6),
    (300, 16, 15, 4, 5),  # 15 outputs and the count fill the lanes
    (300, 16, 16, 4, 5),
    (250, 19, 70, 3, 7),  # coordinates of small nodes
    (400, 5, 40, 8, 9),  # 256 code values: small nodes rank their codes
    (120, 40, 2, 1, 4),
    (2, 1, 1, 4, 4),
]


@pytest.mark.parametrize(("n", "n_features", "k", "bits", "depth"), SHAPES)
@pytest.mark.parametrize("leaf_rows", [1, 4])
def test_equals_the_plain_reference(n, n_features, k, bits, depth, leaf_rows):
    codes, y = drawn(n, n_features, k, bits, seed=n)
    limits = TreeLimits(depth, leaf_rows=leaf_rows, split_rows=3 if leaf_rows == 1 else 2)
    assert_same_tree(fit_tree(codes, y, limits, bits=bits), fit_tree_reference(codes, y, limits, bits=bits))


@pytest.mark.parametrize(("n", "k", "bits"), [(300, 5, 4), (250, 40, 3)])
def test_balance_equals_the_plain_reference(n, k, bits):
    codes, y = drawn(n, 20, k, bits, seed=n)
    limits = TreeLimits(7, leaf_rows=2, balance=0.5)
    tree = fit_tree(codes, y, limits, bits=bits)
    assert_same_tree(tree, fit_tree_reference(codes, y, limits, bits=bits))
    plain = fit_tree(codes, y, TreeLimits(7, leaf_rows=2), bits=bits)
    assert not np.array_equal(tree.feature, plain.feature)


def test_balance_halves_where_squared_error_would_cut_off_one():
    codes = np.tile(np.arange(8, dtype=np.uint8)[:, None], (20, 1))
    y = np.tile(np.eye(8), (20, 1))
    assert fit_tree(codes, y, TreeLimits(3)).n_leaves < 8  # a chain
    even = fit_tree(codes, y, TreeLimits(3, balance=0.5))
    assert even.n_leaves == 8
    np.testing.assert_array_equal(even.predict(codes), y)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_the_tree(threads):
    codes, y = drawn(1500, 70, 10, 4)
    assert_same_tree(fit_tree(codes, y, threads=threads), fit_tree(codes, y, threads=1))


@pytest.mark.parametrize("copies", [[3, 9], [0, 20, 21]])
def test_a_tie_goes_to_the_lowest_feature(copies):
    codes, y = drawn(200, 24, 3, 4, informative=1)
    codes[:, copies] = codes[:, [0]]
    if 0 not in copies:
        codes[:, 0] = 5  # constant: cannot split
    tree = fit_tree(codes, y, TreeLimits(1), threads=2)
    assert tree.feature[0] == min(copies)


def test_one_hot_targets_tie_at_the_lowest_threshold():
    codes = np.array([[0], [1], [2], [3]], np.uint8)  # n rows of n classes: any cut leaves n - 2 of squared error
    for n in (3, 4):
        assert fit_tree(codes[:n], np.eye(n), TreeLimits(1)).threshold[0] == 0
    many = np.tile(codes, (40, 1))  # the same by histograms
    assert fit_tree(many, np.tile(np.eye(4), (40, 1)), TreeLimits(1)).threshold[0] == 0


def test_zero_gain_splits_are_taken_as_scikit_learn_takes_them():
    codes = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.uint8)
    y = np.array([[0.0], [1.0], [1.0], [0.0]])  # exclusive or: no first split gains anything
    tree = fit_tree(codes, y, TreeLimits(2))
    np.testing.assert_array_equal(tree.predict(codes), y)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e9])
@pytest.mark.parametrize("shift", [0.0, 1e3])
def test_units_of_the_targets_do_not_matter(scale, shift):
    codes, y = drawn(700, 30, 6, 4)
    a, b = fit_tree(codes, y, TreeLimits(6)), fit_tree(codes, (y + shift) * scale, TreeLimits(6))
    np.testing.assert_array_equal(a.feature, b.feature)
    np.testing.assert_array_equal(a.threshold, b.threshold)


@pytest.mark.parametrize(("k", "bits"), [(4, 4), (33, 3), (5, 8)])
@pytest.mark.parametrize("expected", [10, 2000])
@pytest.mark.parametrize("least", [8, None])
def test_appended_rows_give_the_tree_of_a_fresh_fit(k, bits, expected, least, monkeypatch):
    if least is not None:  # let small nodes keep histograms, so that every way to a histogram is walked
        monkeypatch.setattr(tree_grower.TreeGrower, "_least", lambda self: least)
    codes, y = drawn(1100, 21, k, bits)
    limits = TreeLimits(6, leaf_rows=2)
    grower = TreeGrower(21, k, limits, bits=bits, expected_rows=expected, span=(0, 1))
    first = 0
    for size in (1, 6, 200, 40, 40, 300, 13, 0, 500):
        last = first + size
        tree = grower.append(codes[first:last], y[first:last])
        assert_same_tree(tree, fit_tree(codes[:last], y[:last], limits, bits=bits))
        first = last
    assert first == 1100


def test_appended_targets_beyond_the_span_are_taken():
    codes, y = drawn(600, 12, 3, 4)
    y[300:] *= 7
    grower = TreeGrower(12, 3, bits=4, expected_rows=600, span=(0, 0.1))
    grower.append(codes[:300], y[:300])
    assert_same_tree(grower.append(codes[300:], y[300:]), fit_tree(codes, y))


def test_targets_a_million_times_larger_are_taken(monkeypatch):
    monkeypatch.setattr(tree_grower.TreeGrower, "_least", lambda self: 8)
    codes, y = drawn(200, 12, 3, 4)
    y[:, 0] *= 1e-6
    y[150:] *= 1e6
    grower = TreeGrower(12, 3, TreeLimits(3), bits=4, expected_rows=200, span=(0, 1))
    grower.append(codes[:150], y[:150])
    assert_same_tree(grower.append(codes[150:], y[150:]), fit_tree_reference(codes, y, TreeLimits(3)))


def test_min_gain_equals_the_plain_reference():
    codes, y = drawn(90, 9, 3, 4)
    leaves = set()
    for min_gain in (1e-4, 1e-3, 3e-3, 1e-2):
        tree = fit_tree(codes, y, TreeLimits(7, min_gain=min_gain))
        assert_same_tree(tree, fit_tree_reference(codes, y, TreeLimits(7, min_gain=min_gain)))
        leaves.add(tree.n_leaves)
    assert len(leaves) > 2


def test_fresh_fits_subtract_siblings_too(monkeypatch):
    codes, y = drawn(1000, 40, 20, 4)
    plain = fit_tree(codes, y, TreeLimits(9))
    modes = []
    searched = tree_grower.search
    monkeypatch.setattr(tree_grower, "search", lambda *args: (modes.extend(args[1].mode), searched(*args)))
    monkeypatch.setattr(tree_grower.TreeGrower, "_least", lambda self: 8)
    assert_same_tree(fit_tree(codes, y, TreeLimits(9)), plain)
    assert modes.count(split_search.SUBTRACTED) > 20


@pytest.mark.parametrize("bits", [0, 9])
def test_bits_are_checked(bits):
    with pytest.raises(ValueError, match=rf"bits must lie in 1\.\.8, got {bits}"):
        TreeGrower(3, 1, bits=bits)


def test_the_first_call_brings_a_row_and_rows_must_fit():
    grower = TreeGrower(3, 2)
    with pytest.raises(ValueError, match="the first call must bring at least one row"):
        grower.append(np.zeros((0, 3), np.uint8), np.zeros((0, 2)))
    with pytest.raises(ValueError, match=r"TreeGrower.append: codes must be \(rows, 3\)"):
        grower.append(np.zeros((2, 4), np.uint8), np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"targets must be \(2, 2\)"):
        grower.append(np.zeros((2, 3), np.uint8), np.zeros((2, 3)))


@pytest.mark.parametrize("keep", [False, True])
def test_blocks_of_histograms_are_all_given_back_or_in_use(keep, monkeypatch):
    monkeypatch.setattr(tree_grower.TreeGrower, "_least", lambda self: 8)
    codes, y = drawn(400, 12, 3, 4)
    grower = TreeGrower(12, 3, TreeLimits(5), expected_rows=400, span=(0, 1), keep=keep)
    for first in range(0, 400, 200 if keep else 400):
        last = first + (200 if keep else 400)
        grower.append(codes[first:last], y[first:last])
        in_use = [node.block for node in grower._root.below() if node.block >= 0] if keep else []
        assert sorted([*grower._free, *in_use]) == list(range(grower._n_blocks))
    assert grower._n_blocks > 4


def test_a_pool_too_small_for_all_histograms_changes_nothing(monkeypatch):
    monkeypatch.setattr(tree_grower.TreeGrower, "_least", lambda self: 8)
    codes, y = drawn(500, 12, 3, 4)
    whole = fit_tree(codes, y, TreeLimits(6))
    monkeypatch.setattr(tree_grower, "HISTOGRAM_BYTES", 3 * 4 * 16 * 16 * 16)
    assert_same_tree(fit_tree(codes, y, TreeLimits(6)), whole)
    assert TreeGrower(12, 3, TreeLimits(6), expected_rows=500)._n_blocks == 3
    monkeypatch.setattr(tree_grower, "HISTOGRAM_BYTES", 0)
    assert_same_tree(fit_tree(codes, y, TreeLimits(6)), whole)
