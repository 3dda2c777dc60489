"""Codes and targets drawn for tests of the tree kernel, and nodes of them as the grower would lay them out."""

import numpy as np

from auditor.kernels.trees.histogram_simd import LANES, aligned
from auditor.kernels.trees.node_targets import LOCAL, TOP, Nodes, NodeTargets, Targets
from auditor.kernels.trees.tree import Tree


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


def targets_of(y):
    """The targets and their fixed-point form, with the step for a node of all rows."""
    n, k = y.shape
    step = n * (y.max() - y.min()) / 2 / TOP
    fixed = aligned((n, -(-(k + 1) // LANES) * LANES), np.int32)
    fixed[:, 0] = 1
    fixed[:, 1 : k + 1] = np.rint((y - (y.max() + y.min()) / 2) / step)
    return Targets(y, fixed, step)


def nodes_of(groups, modes):
    """Nodes with the given rows each, one after the other."""
    stop = np.cumsum([len(rows) for rows in groups])
    rows = np.concatenate([np.asarray(rows, np.int32) for rows in groups])
    return Nodes(rows, stop - [len(rows) for rows in groups], stop, np.array(modes, np.int64))


def room_for(nodes, targets):
    """Arrays for :func:`prepare` to fill, full of numbers that must not stay."""
    n, (_, k), lanes = len(nodes.start), targets.y.shape, targets.fixed.shape[1]
    widths = np.where(nodes.mode == LOCAL, nodes.stop - nodes.start, 0) * lanes
    return NodeTargets(
        mean=np.full((n, k), 7.0),
        energy=np.full(n, 7.0),
        fixed_mean=np.full((n, lanes), 7.0),
        step=np.full(n, 7.0),
        tail=np.full(n, 7.0),
        lanes=np.full(n, 7),
        local=aligned(max(int(widths.sum()), LANES), np.int32, fill=7),
        local_at=np.cumsum(widths) - widths,
    )
