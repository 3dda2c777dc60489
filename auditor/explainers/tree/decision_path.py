"""Reading a tree: the path of an image as rules, what each decision added, and near leaves that say otherwise."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.errors import ArtifactError
from auditor.kernels.trees.tree import Tree

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Decision:
    """One inner node on a path: ``code <= threshold`` was asked, and what going on added to the target's value."""

    node: int
    feature: int
    threshold: int
    code: int
    goes_left: bool
    contribution: float

    def rule(self, label: str) -> str:
        """Return the decision as a sentence's part, e.g. ``feature 7 <= 3 (is 1)``."""
        return f"{label} {'<=' if self.goes_left else '>'} {self.threshold} (is {self.code})"


@dataclass(frozen=True, slots=True)
class Change:
    """A leaf of another class and what would have to change: per feature, its code now and the nearest that fits."""

    leaf: int
    target: int
    value: float
    cost: int  # code steps in all
    features: tuple[tuple[int, int, int], ...]  # feature, code, wanted code


def decisions(tree: Tree, row: Array, target: int) -> tuple[list[Decision], int]:
    """Return the decisions of one row of codes and its leaf; the root's value plus all contributions is the leaf's."""
    path = tree.path(row)
    steps = []
    for node, after in itertools.pairwise(path):
        added = float(tree.value[after, target] - tree.value[node, target])
        feature = int(tree.feature[node])
        steps.append(
            Decision(node, feature, int(tree.threshold[node]), int(row[feature]), after == tree.left[node], added)
        )
    return steps, path[-1]


@dataclass(frozen=True, slots=True)
class Boxes:
    """Every leaf as the box of codes that reach it: ``low <= code <= high`` per feature that the tree uses."""

    leaves: Array  # (leaves,) node index
    features: Array  # (used,) feature index
    low: Array  # (leaves, used)
    high: Array

    @classmethod
    def of(cls, tree: Tree) -> Boxes:
        """Walk the tree once."""
        features = tree.features_used
        column = {int(f): i for i, f in enumerate(features)}
        top = 2**tree.bits - 1
        leaves, low, high = [], [], []
        start = (np.zeros(len(features), dtype=int), np.full(len(features), top))
        stack = [(0, *start)]
        while stack:
            node, a, b = stack.pop()
            if tree.feature[node] < 0:
                leaves.append(node)
                low.append(a)
                high.append(b)
                continue
            i, t = column[int(tree.feature[node])], int(tree.threshold[node])
            below, above = b.copy(), a.copy()
            below[i], above[i] = min(b[i], t), max(a[i], t + 1)
            stack += [(int(tree.right[node]), above, b), (int(tree.left[node]), a, below)]
        order = np.argsort(leaves)
        return cls(np.array(leaves)[order], np.asarray(features), np.array(low)[order], np.array(high)[order])

    def changes(self, tree: Tree, row: Array, n: int) -> list[Change]:
        """Return the ``n`` nearest leaves whose class differs: fewest code steps, then fewest features, then index."""
        tree_class = int(tree.value[tree.path(row)[-1]].argmax())
        codes = row[self.features].astype(int)
        nearest = np.clip(codes, self.low, self.high)
        steps = np.abs(nearest - codes)
        classes = tree.value[self.leaves].argmax(1)
        other = np.flatnonzero(classes != tree_class)
        cost, count = steps.sum(1), (steps > 0).sum(1)
        ranked = other[np.lexsort((self.leaves[other], count[other], cost[other]))][:n]
        return [
            Change(
                int(self.leaves[i]),
                int(classes[i]),
                float(tree.value[self.leaves[i], classes[i]]),
                int(cost[i]),
                tuple((int(self.features[j]), int(codes[j]), int(nearest[i, j])) for j in np.flatnonzero(steps[i])),
            )
            for i in ranked
        ]


def tree_to_json(tree: Tree, class_names: tuple[str, ...], labels: dict[int, str]) -> dict[str, Any]:
    """Return a tree for ``tree.json``: arrays over nodes, with names, readable without this package."""
    return {
        "schema_version": 1,
        "rule": "a row goes left where codes[feature] <= threshold; feature -1 marks a leaf",
        "n_features": tree.n_features,
        "bits": tree.bits,
        "class_names": list(class_names),
        "labels": {str(int(f)): labels.get(int(f), f"feature {int(f)}") for f in tree.features_used},
        "feature": tree.feature.tolist(),
        "threshold": tree.threshold.tolist(),
        "left": tree.left.tolist(),
        "right": tree.right.tolist(),
        "rows": tree.rows.tolist(),
        "gain": tree.gain.tolist(),
        "value": tree.value.tolist(),
    }


def tree_from_json(document: dict[str, Any]) -> Tree:
    """Put a stored tree together again; the values come back to the last bit."""
    ints = {
        name: np.array(document[name], dtype=np.int32) for name in ("feature", "threshold", "left", "right", "rows")
    }
    tree = Tree(
        n_features=int(document["n_features"]),
        bits=int(document["bits"]),
        value=np.array(document["value"], dtype=np.float64),
        gain=np.array(document["gain"], dtype=np.float64),
        **ints,
    )
    _check_is_tree(tree)
    return tree


def _check_is_tree(tree: Tree) -> None:
    """Raise unless children come after their parents and inside the arrays: a circle would be walked without end."""
    n = len(tree.feature)
    arrays = (tree.threshold, tree.left, tree.right, tree.rows, tree.gain, tree.value)
    if n == 0 or any(len(a) != n for a in arrays) or tree.value.ndim != 2 or not 1 <= tree.bits <= 8:
        raise ArtifactError("tree.json: its arrays do not fit together; fit the tree again.")
    inner = np.flatnonzero(tree.feature >= 0)
    children = np.concatenate([tree.left[inner], tree.right[inner]])
    later = (tree.left[inner] > inner) & (tree.right[inner] > inner)
    is_tree = bool(later.all()) and bool((children < n).all()) and len(np.unique(children)) == len(children)
    if not is_tree or len(children) != n - 1 or bool((tree.feature >= tree.n_features).any()):
        raise ArtifactError("tree.json: its nodes form no tree; fit the tree again.")
