import hashlib
from pathlib import Path

import numpy as np
import pytest
from sklearn.tree import DecisionTreeRegressor

from auditor.kernels.trees import split_search
from auditor.kernels.trees import grower as tree_grower
from auditor.kernels.trees.tiny_nodes import subset_gains
from auditor.kernels.trees.tree import Tree, TreeLimits, fit_tree
from auditor.kernels.trees.grower import TreeGrower
from auditor.kernels.trees.reference import fit_tree_reference


def drawn(n, n_features, k, bits, seed=0, informative=5):
    """Codes of which a few decide, with softmax targets: no two splits tie unless they part the rows alike."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**bits, (n, n_features)).astype(np.uint8)
    codes[:, ::3] = np.maximum(codes[:, ::3].astype(int) - 2 ** (bits - 1), 0)  # many zeros, as behind a ReLU
    w = rng.normal(size=(min(informative, n_features), k))
    logits = codes[:, : len(w)] / 2**bits @ w * 4 + rng.normal(0, 0.4, (n, k))
    p = np.exp(logits - logits.max(1, keepdims=True))
    return codes, p / p.sum(1, keepdims=True)


def assert_same_tree(a: Tree, b: Tree):
    for name in ("feature", "threshold", "left", "right", "rows"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    np.testing.assert_allclose(a.value, b.value, rtol=0, atol=1e-12)  # means of the same rows, summed in another order
    np.testing.assert_allclose(a.gain, b.gain, rtol=1e-9, atol=1e-9)


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
    found = fit_tree(codes, y, limits, bits=bits)
    assert_same_tree(found, fit_tree_reference(codes, y, limits, bits=bits))
    plain = fit_tree(codes, y, TreeLimits(7, leaf_rows=2), bits=bits)
    assert not np.array_equal(found.feature, plain.feature)


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


def test_constant_features_and_constant_targets_give_one_leaf():
    codes, y = drawn(50, 6, 3, 4)
    alone = fit_tree(np.full_like(codes, 7), y)
    assert alone.n_nodes == 1
    np.testing.assert_allclose(alone.value[0], y.mean(0))
    assert alone.depth == 0
    assert fit_tree(codes, np.full((50, 3), 1 / 3)).n_nodes == 1


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e9])
@pytest.mark.parametrize("shift", [0.0, 1e3])
def test_units_of_the_targets_do_not_matter(scale, shift):
    codes, y = drawn(700, 30, 6, 4)
    a, b = fit_tree(codes, y, TreeLimits(6)), fit_tree(codes, (y + shift) * scale, TreeLimits(6))
    np.testing.assert_array_equal(a.feature, b.feature)
    np.testing.assert_array_equal(a.threshold, b.threshold)


def test_leaf_means_of_probabilities_are_probabilities():
    codes, y = drawn(900, 30, 12, 4)
    p = fit_tree(codes, y, TreeLimits(8)).predict(codes)
    assert p.min() >= 0
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-6)


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


def test_fresh_fits_subtract_siblings_too(monkeypatch):
    codes, y = drawn(1000, 40, 20, 4)
    plain = fit_tree(codes, y, TreeLimits(9))
    modes = []
    searched = tree_grower.search
    monkeypatch.setattr(tree_grower, "search", lambda *args: (modes.extend(args[9]), searched(*args)))
    monkeypatch.setattr(tree_grower.TreeGrower, "_least", lambda self: 8)
    assert_same_tree(fit_tree(codes, y, TreeLimits(9)), plain)
    assert modes.count(split_search.SUBTRACTED) > 20


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


def test_the_path_ends_in_the_applied_leaf():
    codes, y = drawn(300, 20, 4, 4)
    tree = fit_tree(codes, y)
    leaves = tree.apply(codes)
    for row in (0, 17, 299):
        assert tree.path(codes[row])[-1] == leaves[row]
    assert (tree.feature[leaves] == -1).all()
    np.testing.assert_array_equal(
        np.bincount(leaves, minlength=tree.n_nodes)[tree.feature < 0], tree.rows[tree.feature < 0]
    )


@pytest.mark.parametrize(
    ("codes", "y", "sentence"),
    [
        (np.full((3, 2), 16, np.uint8), np.ones((3, 1)), r"codes of 4 bits must lie in 0\.\.15, got 16\.\.16"),
        (np.full((3, 2), -1, np.int64), np.ones((3, 1)), r"got -1\.\.-1"),
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


def test_limits_and_bits_are_checked():
    with pytest.raises(ValueError, match="depth and leaf_rows must be at least 1"):
        TreeLimits(depth=0)
    with pytest.raises(ValueError, match=r"bits must lie in 1\.\.8, got 9"):
        TreeGrower(3, 1, bits=9)


def test_the_compiled_search_was_built_on_these_sources():
    """A cached compilation is renewed when its own file changes, not when a file it calls does: so it names them."""
    folder = Path(split_search.__file__).parent
    source = b"".join((folder / name).read_bytes() for name in ("lanes.py", "subset_search.py"))
    assert hashlib.sha256(source).hexdigest()[:12] == split_search.BUILT_ON, "update BUILT_ON in split_search.py"
