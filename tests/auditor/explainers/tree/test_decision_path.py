"""Paths and boxes of a tree, against every code there is; the tree as JSON."""

import itertools
import json

import numpy as np
import pytest

from auditor.errors import ArtifactError
from auditor.explainers.tree.decision_path import Boxes, decisions, tree_from_json, tree_to_json
from auditor.kernels.trees.tree import TreeLimits, fit_tree

EVERY = np.array(list(itertools.product(range(4), repeat=3)), dtype=np.uint8)  # all two-bit codes of three features


def test_the_nearest_alternative_is_the_nearest():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 4, (60, 3)).astype(np.uint8)
    y = np.eye(3)[(codes[:, 0] > 1).astype(int) + (codes[:, 1] > 2)]
    tree = fit_tree(codes, y, TreeLimits(4), bits=2)
    boxes = Boxes.of(tree)
    every = np.stack(np.meshgrid(*[np.arange(4)] * 3), -1).reshape(-1, 3).astype(np.uint8)
    predicted = tree.predict(every).argmax(1)
    for row in codes[:20]:
        own_class = tree.predict(row[None]).argmax()
        true = np.abs(every.astype(int) - row).sum(1)[predicted != own_class].min()
        assert boxes.changes(tree, row, 1)[0].cost == true


def test_json_keeps_the_tree_to_the_last_bit():
    rng = np.random.default_rng(0)
    codes, y = rng.integers(0, 16, (80, 9)).astype(np.uint8), rng.dirichlet(np.ones(3), 80)
    tree = fit_tree(codes, y)
    back = tree_from_json(json.loads(json.dumps(tree_to_json(tree, ("a", "b", "c"), {}))))
    for name in ("feature", "threshold", "left", "right", "value", "rows", "gain"):
        np.testing.assert_array_equal(getattr(back, name), getattr(tree, name))
    steps, leaf = decisions(tree, codes[0], 1)
    assert tree.value[0, 1] + sum(s.contribution for s in steps) == pytest.approx(tree.value[leaf, 1], abs=1e-12)


@pytest.fixture(scope="module")
def grown():
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 4, (80, 3)).astype(np.uint8)
    y = np.eye(3)[(codes[:, 0] > 1).astype(int) + (codes[:, 1] > 2)]
    return fit_tree(codes, y, TreeLimits(4), bits=2), codes


@pytest.mark.parametrize("target", [0, 2])
def test_decisions_follow_the_rules_and_add_up_to_the_leafs_value(grown, target):
    tree, codes = grown
    for row in codes[:30]:
        path, leaf = decisions(tree, row, target)
        node, value = 0, float(tree.value[0, target])
        for step in path:
            assert (step.node, step.feature, step.threshold) == (node, tree.feature[node], tree.threshold[node])
            assert step.code == row[step.feature]
            assert step.goes_left == (step.code <= step.threshold)
            node = int(tree.left[node] if step.goes_left else tree.right[node])
            value += step.contribution
            sign = "<=" if step.goes_left else ">"
            assert step.rule("f") == f"f {sign} {step.threshold} (is {step.code})"
        assert node == leaf
        assert tree.feature[leaf] < 0
        assert value == pytest.approx(float(tree.value[leaf, target]), abs=1e-12)


def test_boxes_hold_exactly_the_codes_that_reach_their_leaf(grown):
    tree, _ = grown
    boxes = Boxes.of(tree)
    every = np.stack(np.meshgrid(*[np.arange(4)] * 3), -1).reshape(-1, 3).astype(np.uint8)
    leaves = tree.apply(every)
    for row, leaf in zip(every, leaves, strict=True):
        codes = row[boxes.features].astype(int)
        inside = ((boxes.low <= codes) & (codes <= boxes.high)).all(1)
        assert boxes.leaves[inside].tolist() == [leaf]
    assert sorted(boxes.leaves) == list(boxes.leaves) == sorted(np.flatnonzero(tree.feature < 0))


def test_alternatives_are_sorted_by_steps_and_never_of_the_same_class(grown):
    tree, codes = grown
    boxes = Boxes.of(tree)
    for row in codes[:20]:
        predicted = int(tree.value[tree.path(row)[-1]].argmax())
        changes = boxes.changes(tree, row, 10)
        assert [c.cost for c in changes] == sorted(c.cost for c in changes)
        assert all(c.target != predicted and c.cost == sum(abs(w - k) for _, k, w in c.features) > 0 for c in changes)
        assert len(boxes.changes(tree, row, 1)) == 1
        assert boxes.changes(tree, row, 0) == []


def small_tree(seed, depth=4):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 4, (60, 3)).astype(np.uint8)
    classes = (codes[:, 0] > 1).astype(int) + (codes[:, 1] > 2) * (codes[:, 2] != 1)
    return fit_tree(codes, np.eye(3)[classes], TreeLimits(depth, leaf_rows=1), bits=2)


def single_leaf():
    return fit_tree(EVERY, np.tile([0.25, 0.75], (64, 1)), bits=2)


@pytest.mark.parametrize("seed", range(3))
def test_changes_are_ranked_by_steps_then_features_then_leaf(seed):
    tree = small_tree(seed)
    boxes, leaf_of = Boxes.of(tree), tree.apply(EVERY)
    for row in EVERY[::5]:
        predicted = tree.predict(row[None])[0].argmax()
        expected = []
        for leaf in np.unique(leaf_of):  # try all codes of every leaf
            if tree.value[leaf].argmax() != predicted:
                moves = np.abs(EVERY[leaf_of == leaf].astype(int) - row)
                nearest = moves[moves.sum(1).argmin()]
                expected.append((int(nearest.sum()), int((nearest > 0).sum()), int(leaf)))
        changes = boxes.changes(tree, row, 100)
        assert [(c.cost, len(c.features), c.leaf) for c in changes] == sorted(expected)
        assert boxes.changes(tree, row, 2) == changes[:2]
        for change in changes:
            moved = row.copy()
            for feature, code, target in change.features:
                assert row[feature] == code != target
                moved[feature] = target
            assert tree.path(moved)[-1] == change.leaf
            assert change.target == tree.value[change.leaf].argmax() != predicted
            assert change.value == tree.value[change.leaf].max()


def test_a_tree_of_one_leaf_decides_nothing_and_has_no_alternative():
    tree = single_leaf()
    assert tree.n_nodes == 1
    assert decisions(tree, EVERY[7], 1) == ([], 0)
    boxes = Boxes.of(tree)
    assert boxes.leaves.tolist() == [0]
    assert boxes.changes(tree, EVERY[7], 3) == []


def test_json_names_the_features_that_are_used():
    tree = small_tree(0)
    used = [int(f) for f in tree.features_used]
    document = tree_to_json(tree, ("a", "b", "c"), {used[0]: "loop", 99: "never asked"})
    assert document["labels"] == {str(f): "loop" if f == used[0] else f"feature {f}" for f in used}
    assert document["class_names"] == ["a", "b", "c"]
    back = tree_from_json(json.loads(json.dumps(document)))
    assert (back.n_features, back.bits) == (3, 2)
    np.testing.assert_array_equal(back.apply(EVERY), tree.apply(EVERY))
    assert tree_from_json(tree_to_json(single_leaf(), ("a", "b"), {})).path(EVERY[0]) == [0]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("change", ["circle", "self", "outside", "shared", "orphan", "feature", "short", "empty"])
def test_a_stored_tree_that_is_no_tree_is_refused(grown, change):
    """The hole: a child that is its own ancestor was followed without end."""
    document = tree_to_json(grown[0], ("a", "b", "c"), {})
    inner = [node for node, feature in enumerate(document["feature"]) if feature >= 0]
    last = inner[-1]
    if change == "circle":
        document["left"][last] = 0
    elif change == "self":
        document["left"][last] = last
    elif change == "outside":
        document["right"][last] = 10_000
    elif change == "shared":
        document["right"][last] = document["left"][last]
    elif change == "orphan":
        document["feature"][last] = -1
    elif change == "feature":
        document["feature"][0] = 10_000
    elif change == "short":
        document["left"].pop()
    else:
        document |= {name: [] for name in ("feature", "threshold", "left", "right", "rows", "value", "gain")}
    with pytest.raises(ArtifactError, match=r"tree\.json"):
        tree_from_json(document)
