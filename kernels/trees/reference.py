"""The tree kernel's plain truth: every feature, every threshold, sums of float64 targets, one node after the other."""

from __future__ import annotations

import itertools

import numpy as np

from auditor.kernels.trees.tree import Codes, Floats, Ints, Tree, TreeLimits

_EVEN = 1e-12
_PURE = float(np.finfo(np.float64).eps)


def fit_tree_reference(codes: Codes, targets: Floats, limits: TreeLimits | None = None, *, bits: int = 4) -> Tree:
    """Fit as :func:`auditor.kernels.trees.tree.fit_tree` does, slowly: O(nodes * features * codes * rows * outputs)."""
    limits = limits if limits is not None else TreeLimits()
    n, k = targets.shape
    members: list[Ints] = [np.arange(n, dtype=np.int32)]
    level, feature, threshold, left, right, gain = [0], [-1], [-1], [-1], [-1], [0.0]
    for node, rows in enumerate(members):  # grows while it is read: breadth first
        split = best_split(codes[rows], targets[rows], limits) if level[node] < limits.depth else None
        if split is None or split[0] + _PURE * n < limits.min_gain * n * k:
            continue
        gain[node], feature[node], threshold[node] = split
        goes_left = codes[rows, feature[node]] <= threshold[node]
        left[node], right[node] = len(members), len(members) + 1
        members += [rows[goes_left], rows[~goes_left]]
        level += [level[node] + 1] * 2
        for column, empty in ((feature, -1), (threshold, -1), (left, -1), (right, -1)):
            column += [empty] * 2
        gain += [0.0] * 2
    value = np.array([targets[rows].mean(axis=0) for rows in members])
    count = np.array([len(rows) for rows in members], dtype=np.int32)
    f, t, a, b = (np.array(column, dtype=np.int32) for column in (feature, threshold, left, right))
    return Tree(codes.shape[1], bits, f, t, a, b, value, count, np.array(gain))


def best_split(codes: Codes, targets: Floats, limits: TreeLimits) -> tuple[float, int, int] | None:
    """Return the (gain, feature, threshold) that lowers the summed squared error most, or None where nothing can split.

    A tie (gains within 1e-12 of the summed squared error) goes to the lowest feature, then to the lowest threshold.
    """
    n, k = targets.shape
    d = targets - targets.mean(axis=0)
    energy = float((d * d).sum())
    if n < max(limits.split_rows, 2 * limits.leaf_rows) or energy <= _PURE * n * k:
        return None
    best: tuple[float, int, int] | None = None
    for f in range(codes.shape[1]):
        present = np.unique(codes[:, f]).astype(int)
        for low, high in itertools.pairwise(present):
            below = codes[:, f] <= low
            n_left = int(below.sum())
            if min(n_left, n - n_left) < limits.leaf_rows:
                continue
            s = d[below].sum(axis=0)
            even = 4 * n_left * (n - n_left) / n**2
            g = float(s @ s) * n / (n_left * (n - n_left)) * even**limits.balance
            if best is None or g > best[0] + _EVEN * energy:
                best = (g, f, int(low + high) // 2)
    return best
