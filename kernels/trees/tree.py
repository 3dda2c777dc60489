"""Multi-output regression trees on integer codes: the tree itself, its limits, and prediction.

A node sends a row left when ``codes[feature] <= threshold``; thresholds are integers, so nothing depends on rounding.
Leaves hold the mean of their rows' targets: for targets that are probabilities, a probability vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Codes = NDArray[np.uint8]
Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """Where a tree stops growing; the names' meanings are scikit-learn's (``min_gain``: ``min_impurity_decrease``).

    ``balance`` multiplies a split's gain with ``(4 n_L n_R / n^2)^balance``. Squared error rates cutting one of k
    classes off like halving them (both gain n/k), so a shallow tree would spend its depth on a chain; a little balance
    decides for halves, as information gain does. 0, the default, is plain CART.
    """

    depth: int = 8
    leaf_rows: int = 1
    split_rows: int = 2
    min_gain: float = 0.0
    balance: float = 0.0

    def __post_init__(self) -> None:
        if self.depth < 1 or self.leaf_rows < 1 or self.split_rows < 2 or not min(self.min_gain, self.balance) >= 0:
            raise ValueError(
                f"TreeLimits: depth and leaf_rows must be at least 1, split_rows 2, min_gain and balance 0, got {self}."
            )


@dataclass(frozen=True, slots=True)
class Tree:
    """A fitted tree as arrays over its nodes, the root first, every parent before its children.

    ``feature`` and ``threshold`` are -1 at leaves, as are ``left`` and ``right``; ``value`` is (nodes, outputs), the
    mean target of the node's rows; ``rows`` counts them; ``gain`` is the drop of summed squared error by its split
    (times the limits' balance).
    """

    n_features: int
    bits: int
    feature: Ints
    threshold: Ints
    left: Ints
    right: Ints
    value: Floats
    rows: Ints
    gain: Floats

    @property
    def n_nodes(self) -> int:
        """Inner nodes and leaves."""
        return len(self.feature)

    @property
    def n_leaves(self) -> int:
        """Nodes without children."""
        return int((self.feature < 0).sum())

    @property
    def depth(self) -> int:
        """Decisions on the longest path; 0 for a tree that is one leaf."""
        level = np.zeros(self.n_nodes, dtype=np.int64)
        for node in np.flatnonzero(self.feature >= 0):
            level[[self.left[node], self.right[node]]] = level[node] + 1
        return int(level.max())

    @property
    def features_used(self) -> Ints:
        """The features that some node splits on, ascending."""
        return np.unique(self.feature[self.feature >= 0])

    def apply(self, codes: Codes) -> Ints:
        """Return the leaf (a node's index) that each row of ``codes``, (rows, features) integers, falls into."""
        leaves: Ints = _descend(self._checked(codes), self.feature, self.threshold, self.left, self.right)
        return leaves

    def predict(self, codes: Codes) -> Floats:
        """Return the mean target of each row's leaf, (rows, outputs).

        >>> stump = fit_tree(np.array([[0], [1]], np.uint8), np.array([[1.0, 0.0], [0.0, 1.0]]), bits=1 + 1)
        >>> stump.predict(np.array([[3], [0]], np.uint8)).tolist()
        [[0.0, 1.0], [1.0, 0.0]]
        """
        return self.value[self.apply(codes)]

    def path(self, row: Codes) -> list[int]:
        """Return the nodes that one row of codes passes, from the root to its leaf."""
        row = self._checked(np.asarray(row)[None])[0]
        nodes = [0]
        while self.feature[nodes[-1]] >= 0:
            node = nodes[-1]
            goes_left = row[self.feature[node]] <= self.threshold[node]
            nodes.append(int(self.left[node] if goes_left else self.right[node]))
        return nodes

    def _checked(self, codes: Codes) -> Codes:
        return checked_codes(codes, self.bits, self.n_features, "Tree.predict")


def checked_codes(codes: Any, bits: int, n_features: int | None, where: str) -> Codes:
    """Return ``codes`` as contiguous uint8, or say in one sentence what is wrong with them."""
    codes = np.asarray(codes)
    if codes.ndim != 2 or (n_features is not None and codes.shape[1] != n_features) or codes.shape[1] == 0:
        expected = f"(rows, {n_features if n_features is not None else 'features'})"
        raise ValueError(f"{where}: codes must be {expected}, got {codes.shape}. Pass one row of codes per image.")
    if codes.dtype.kind not in "ui":
        raise ValueError(f"{where}: codes must be integers, got {codes.dtype}. Quantise the features first.")
    if codes.size and (int(codes.max()) >= 2**bits or int(codes.min()) < 0):
        raise ValueError(
            f"{where}: codes of {bits} bits must lie in 0..{2**bits - 1}, got {int(codes.min())}..{int(codes.max())}. "
            "Raise bits, or quantise with the ranges of this model."
        )
    return np.ascontiguousarray(codes, dtype=np.uint8)


def checked_targets(targets: Any, n_rows: int, n_outputs: int | None, where: str) -> Floats:
    """Return ``targets`` as contiguous float64 (rows, outputs), or say in one sentence what is wrong with them."""
    y = np.ascontiguousarray(targets, dtype=np.float64)
    if y.ndim != 2 or len(y) != n_rows or y.shape[1] == 0 or (n_outputs is not None and y.shape[1] != n_outputs):
        expected = f"({n_rows}, {n_outputs if n_outputs is not None else 'outputs'})"
        raise ValueError(f"{where}: targets must be {expected} like the codes, got {y.shape}. Pass one row per image.")
    if not np.isfinite(y).all():
        bad = int((~np.isfinite(y)).any(axis=1).sum())
        raise ValueError(f"{where}: targets must be finite, got NaN or infinity in {bad} of {n_rows} rows. Drop them.")
    return y


def fit_tree(
    codes: Codes, targets: Floats, limits: TreeLimits | None = None, *, bits: int = 4, threads: int | None = None
) -> Tree:
    """Fit the least-squares CART tree of ``targets`` (rows, outputs) on ``codes`` (rows, features), exactly.

    Equal to scikit-learn's ``DecisionTreeRegressor`` on the same codes up to ties; a tie goes to the lowest feature,
    then to the lowest threshold. The result does not depend on ``threads`` (default: all cores of this process).
    """
    from auditor.kernels.trees.grower import TreeGrower  # the grower makes trees, so it imports this module

    codes = checked_codes(codes, bits, None, "fit_tree")
    y = checked_targets(targets, len(codes), None, "fit_tree")
    if not len(codes):
        raise ValueError("fit_tree: codes must have at least one row, got none. Pass the codes of some images.")
    grower = TreeGrower(
        codes.shape[1], y.shape[1], limits, bits=bits, expected_rows=len(codes), threads=threads, keep=False
    )
    return grower.append(codes, y)


@njit(nogil=True, cache=True)
def _descend(codes: Any, feature: Any, threshold: Any, left: Any, right: Any) -> Any:
    leaf = np.empty(codes.shape[0], np.int32)
    for i in range(codes.shape[0]):
        node = 0
        while feature[node] >= 0:
            node = left[node] if codes[i, feature[node]] <= threshold[node] else right[node]
        leaf[i] = node
    return leaf
