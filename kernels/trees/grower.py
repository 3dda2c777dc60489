"""Grow a tree level by level, and keep it equal to a fresh fit while rows are appended."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auditor.kernels.trees.histogram_simd import LANES, aligned
from auditor.kernels.trees.node_targets import LOCAL, TOP, Nodes, NodeTargets, Targets, prepare
from auditor.kernels.trees.split_search import (
    EVEN,
    GROWN,
    SUBTRACTED,
    TILE,
    Features,
    Histograms,
    Splits,
    scratch,
    search,
)
from auditor.kernels.trees.tree import Codes, Floats, Ints, Tree, TreeLimits, checked_codes, checked_targets

PURE = float(np.finfo(np.float64).eps)  # scikit-learn's: a node of smaller mean variance is a leaf
HISTOGRAM_BYTES = 1 << 30
NO_SPLIT = (-np.inf, -1, -1)


@dataclass(slots=True, eq=False)
class _Node:
    depth: int
    rows: Ints
    feature: int = -1
    threshold: int = -1
    gain: float = 0.0
    block: int = -1  # where its histogram lies, or -1
    mean: Any = None
    left: _Node | None = None
    right: _Node | None = None

    def below(self) -> Iterator[_Node]:
        yield self
        for child in (self.left, self.right):
            if child is not None:
                yield from child.below()


@dataclass(slots=True)
class _Task:
    """One node of a level that has new rows, and how its histogram comes about."""

    node: _Node
    mode: int = LOCAL
    fresh: bool = True
    n_old: int = 0  # rows[:n_old] were there before; they are in the histogram already unless it is fresh
    parent: int = -1
    sibling: int = -1
    frees: list[int] = field(default_factory=list)


class TreeGrower:
    """The tree of all rows appended so far, at the cost of what the new rows change.

    ``append`` returns the tree that :func:`fit_tree` would fit to all rows so far, with the same splits. Nodes keep
    their histograms; new rows are added to them, and only where a better split appears is the part below grown anew.
    ``span`` is the range of the targets (values beyond it are taken, at the cost of one regrowth), ``expected_rows``
    the number of rows expected in all (more are taken, at the cost of a regrowth each time the number doubles).
    """

    def __init__(
        self,
        n_features: int,
        n_outputs: int,
        limits: TreeLimits | None = None,
        *,
        bits: int = 4,
        expected_rows: int = 1024,
        span: tuple[float, float] | None = None,
        threads: int | None = None,
        keep: bool = True,
    ) -> None:
        if not 1 <= bits <= 8:
            raise ValueError(f"TreeGrower: bits must lie in 1..8, got {bits}. Codes are single bytes.")
        self.limits = limits if limits is not None else TreeLimits()
        self.bits, self.n_features, self.n_outputs = bits, n_features, n_outputs
        self.n_rows = 0
        self._keep = keep
        self._n_codes: int = 2**bits
        self._tiles = -(-n_features // TILE)
        self._lanes = -(-(n_outputs + 1) // LANES) * LANES
        # by default a thread gets eight tiles at least: below that waiting for each other costs more than it saves
        n_threads = threads or min(len(os.sched_getaffinity(0)), self._tiles // 8)
        self._threads = max(1, min(n_threads, self._tiles))
        self._span = span
        self._root: _Node | None = None
        self._block_size = self._tiles * TILE * self._n_codes * self._lanes
        self._codes: Any = None
        self._plain: Any = None
        self._y: Any = None
        self._n_blocks = 0
        self._reserve(max(expected_rows, 1))

    def append(self, codes: Codes, targets: Floats) -> Tree:
        """Take further rows, (rows, features) codes and (rows, outputs) targets, and return the tree of all rows."""
        codes = checked_codes(codes, self.bits, self.n_features, "TreeGrower.append")
        y = checked_targets(targets, len(codes), self.n_outputs, "TreeGrower.append")
        first, last = self.n_rows, self.n_rows + len(y)
        if len(y):
            stale = self._make_room(last, y)
            padded = np.zeros((len(y), self._tiles * TILE), dtype=np.uint8)
            padded[:, : self.n_features] = codes
            self._plain[first:last] = padded
            self._codes[:, first:last] = padded.reshape(len(y), self._tiles, TILE).transpose(1, 0, 2)
            self._y[first:last] = y
            self.n_rows = last
            self._round(0 if stale else first, last)
            if stale or self._root is None:
                self._root = None
                self._free = list(range(self._n_blocks))
                self._root = _Node(0, np.empty(0, dtype=np.int32))
                first = 0
            self._grow([self._grown(self._root, np.arange(first, last, dtype=np.int32))])
        if self._root is None:
            raise ValueError("TreeGrower.append: the first call must bring at least one row, got none.")
        return self._tree()

    # -- rows ---------------------------------------------------------------------------------------------------

    def _reserve(self, capacity: int) -> None:
        old = self.n_rows
        codes = aligned((self._tiles, capacity, TILE), np.uint8, fill=None)
        plain = aligned((capacity, self._tiles * TILE), np.uint8, fill=None)
        y = np.empty((capacity, self.n_outputs))
        if old:
            codes[:, :old], plain[:old], y[:old] = self._codes[:, :old], self._plain[:old], self._y[:old]
        self._codes, self._plain, self._y = codes, plain, y
        self._fixed = aligned((capacity, self._lanes), np.int32)
        self._capacity = capacity
        blocks = HISTOGRAM_BYTES // (4 * self._block_size)
        per_level = 2 + 2 * capacity // self._least()
        self._n_blocks = min(blocks, per_level * (self.limits.depth if self._keep else 1))
        self._pool = aligned(max(self._n_blocks, 1) * self._block_size, np.int32, fill=None)
        self._free = list(range(self._n_blocks))

    def _make_room(self, n_rows: int, y: Floats) -> bool:
        """Return whether the step of the fixed-point targets had to change, so that histograms must be made anew."""
        stale = self._root is None
        if n_rows > self._capacity:
            self._reserve(max(n_rows, 2 * self._capacity))
            stale = True
        low, high = float(y.min()), float(y.max())
        if self._span is None or low < self._span[0] or high > self._span[1]:
            before = self._span or (low, high)
            self._span = (min(low, before[0]), max(high, before[1]))
            stale = True
        return stale

    def _round(self, first: int, last: int) -> None:
        assert self._span is not None
        low, high = self._span
        self._step = max(self._capacity * (high - low) / 2 / TOP, 1e-300)
        self._fixed[first:last, 0] = 1
        middle = (low + high) / 2
        self._fixed[first:last, 1 : self.n_outputs + 1] = np.rint((self._y[first:last] - middle) / self._step)

    # -- growing ------------------------------------------------------------------------------------------------

    def _least(self) -> int:
        """Rows from which adding all of them up costs more than what a kept histogram costs (measured)."""
        return (24 if self._keep else 64) * self._n_codes

    def _worth_a_block(self, n_rows: int) -> bool:
        return n_rows >= self._least()

    def _can_split(self, node: _Node) -> bool:
        n = len(node.rows)
        return node.depth < self.limits.depth and n >= max(self.limits.split_rows, 2 * self.limits.leaf_rows)

    def _grow(self, tasks: list[_Task]) -> None:
        with _crew(self._threads) as share:
            while tasks:
                splits = self._best_splits(tasks, share)
                below: list[_Task] = []
                for task, (gain, feature, threshold) in zip(tasks, splits, strict=True):
                    below += self._descend(task, gain, feature, threshold)
                for task in tasks:
                    self._free += task.frees
                tasks = below

    def _best_splits(self, tasks: list[_Task], share: Callable[..., None]) -> list[tuple[float, int, int]]:
        nodes = self._nodes_of(tasks)
        targets = Targets(self._y, self._fixed, self._step)
        described = self._prepared(nodes, targets, share)
        for i, task in enumerate(tasks):
            task.node.mean = described.mean[i]
        n_rows = nodes.stop - nodes.start
        impure = described.energy > PURE * n_rows * self.n_outputs
        impure &= np.array([self._can_split(task.node) for task in tasks])
        busy = np.flatnonzero(impure | (nodes.mode != LOCAL))  # a pure node's histogram may still be a sibling's
        splits = [NO_SPLIT] * len(tasks)
        if len(busy):
            best = self._searched([tasks[i] for i in busy.tolist()], busy, nodes, impure, targets, described, share)
            for i, split in zip(busy.tolist(), best, strict=True):
                splits[i] = split
        floor = self.limits.min_gain * self.n_rows * self.n_outputs
        return [split if split[0] + PURE * self.n_rows >= floor else NO_SPLIT for split in splits]

    def _nodes_of(self, tasks: list[_Task]) -> Nodes:
        stop = np.cumsum([len(task.node.rows) for task in tasks], dtype=np.int64)
        return Nodes(
            rows=np.concatenate([task.node.rows for task in tasks]),
            start=np.concatenate([[0], stop[:-1]]).astype(np.int64),
            stop=stop,
            mode=np.array([task.mode for task in tasks], dtype=np.int64),
        )

    def _prepared(self, nodes: Nodes, targets: Targets, share: Callable[..., None]) -> NodeTargets:
        """Return what the search needs to know of each node's targets; every thread describes as many rows."""
        n, n_rows = len(nodes.start), nodes.stop - nodes.start
        widths = np.where(nodes.mode == LOCAL, n_rows * self._lanes, 0)
        out = NodeTargets(
            mean=np.empty((n, self.n_outputs)),
            energy=np.empty(n),
            fixed_mean=aligned((n, self._lanes), np.float64, fill=None),
            step=np.empty(n),
            tail=np.empty(n),
            lanes=np.zeros(n, dtype=np.int64),
            local=aligned(max(int(widths.sum()), LANES), np.int32, fill=None),
            local_at=np.cumsum(widths) - widths,
        )
        weight = np.concatenate([[0], np.cumsum(n_rows)])
        cuts = np.searchsorted(weight, np.linspace(0, weight[-1], self._threads + 1)).tolist()
        share(lambda i: prepare(cuts[i], cuts[i + 1], nodes, targets, out), self._threads)
        return out

    def _searched(
        self,
        tasks: list[_Task],
        busy: NDArray[np.int64],
        nodes: Nodes,
        impure: NDArray[np.bool_],
        targets: Targets,
        described: NodeTargets,
        share: Callable[..., None],
    ) -> list[tuple[float, int, int]]:
        """Return the best split of the nodes ``busy``, each thread searching its share of the tiles."""
        if len(busy) < len(impure):
            nodes = Nodes(nodes.rows, nodes.start[busy], nodes.stop[busy], nodes.mode[busy])
            described = NodeTargets._make(column if column is described.local else column[busy] for column in described)
            impure = impure[busy]
        histograms = self._histograms_of(tasks, nodes.start)
        limits = (self.limits.leaf_rows, self.limits.balance)
        tiles = np.linspace(0, self._tiles, self._threads + 1).astype(int).tolist()
        shape = self._threads, len(busy)
        gain = np.full(shape, -np.inf)
        feature, threshold = (np.full(shape, -1, dtype=np.int64) for _ in range(2))

        def search_share(i: int) -> None:
            features = Features(tiles[i], tiles[i + 1], self._n_codes, self._codes, self._plain)
            room = scratch((tiles[i + 1] - tiles[i]) * TILE, self._n_codes, self.n_outputs)
            splits = Splits(gain[i], feature[i], threshold[i])
            search(features, nodes, impure, targets, described, histograms, limits, room, splits)

        share(search_share, self._threads)
        ties = EVEN * described.energy
        columns = gain.T.tolist(), feature.T.tolist(), threshold.T.tolist(), ties.tolist()
        return [_first_best(*node) for node in zip(*columns, strict=True)]

    def _histograms_of(self, tasks: list[_Task], start: NDArray[np.int64]) -> Histograms:
        rows = [(t.node.block, t.parent, t.sibling, 0 if t.fresh else t.n_old, t.fresh) for t in tasks]
        block, parent, sibling, n_old, fresh = np.array(rows, dtype=np.int64).T.copy()
        return Histograms(self._pool, self._block_size, block, parent, sibling, start + n_old, fresh)

    def _descend(self, task: _Task, gain: float, feature: int, threshold: int) -> list[_Task]:
        node = task.node
        if feature < 0:
            self._prune(node)
            if node.block >= 0 and not self._keep:
                task.frees.append(node.block)
            return []
        node.gain = gain
        same = (feature, threshold) == (node.feature, node.threshold)
        new = node.rows[task.n_old :] if same else node.rows
        goes_left = self._plain[new, feature] <= threshold
        if same:
            return self._pass_on(node, new[goes_left], new[~goes_left])
        self._prune(node)
        node.feature, node.threshold = feature, threshold
        left = node.left = _Node(node.depth + 1, new[goes_left])
        right = node.right = _Node(node.depth + 1, new[~goes_left])
        small, large = (left, right) if len(left.rows) <= len(right.rows) else (right, left)
        tasks = [_Task(small), _Task(large)]
        needs = 2 if self._keep else 1
        if (
            node.block >= 0
            and self._worth_a_block(len(large.rows))
            and self._can_split(large)
            and len(self._free) >= needs
        ):
            small.block = self._free.pop()
            large.block = self._free.pop() if self._keep else node.block
            tasks[0].mode = GROWN
            tasks[1].mode, tasks[1].parent, tasks[1].sibling = SUBTRACTED, node.block, small.block
        elif node.block >= 0 and not self._keep:
            task.frees.append(node.block)
        return tasks

    def _pass_on(self, node: _Node, left_rows: Ints, right_rows: Ints) -> list[_Task]:
        tasks = []
        for child, rows in ((node.left, left_rows), (node.right, right_rows)):
            assert child is not None
            if len(rows):
                tasks.append(self._grown(child, rows))
        return tasks

    def _grown(self, node: _Node, rows: Ints) -> _Task:
        """Give further rows to a node; one that has become large begins to keep a histogram."""
        task = _Task(node, n_old=len(node.rows))
        node.rows = np.concatenate([node.rows, rows])
        if node.block >= 0:
            task.mode, task.fresh = GROWN, False
        elif self._worth_a_block(len(node.rows)) and self._can_split(node) and self._free:
            node.block, task.mode = self._free.pop(), GROWN
        return task

    def _prune(self, node: _Node) -> None:
        for child in (node.left, node.right):
            if child is not None:
                self._free += [old.block for old in child.below() if old.block >= 0]
        node.left = node.right = None
        node.feature = node.threshold = -1

    def _tree(self) -> Tree:
        assert self._root is not None
        order = [self._root]
        for node in order:  # grows while it is read: breadth first
            if node.left is not None and node.right is not None:
                order += [node.left, node.right]
        number = {id(node): i for i, node in enumerate(order)}

        def ints(values: Any) -> NDArray[np.int32]:
            return np.fromiter(values, dtype=np.int32, count=len(order))

        return Tree(
            self.n_features,
            self.bits,
            ints(node.feature for node in order),
            ints(node.threshold for node in order),
            ints(number.get(id(node.left), -1) for node in order),
            ints(number.get(id(node.right), -1) for node in order),
            np.array([node.mean for node in order]),
            ints(len(node.rows) for node in order),
            np.array([node.gain if node.feature >= 0 else 0.0 for node in order]),
        )


def _first_best(gains: Any, features: Any, thresholds: Any, even: float) -> tuple[float, int, int]:
    best = 0
    for i in range(1, len(gains)):
        if gains[i] > gains[best] + even:
            best = i
    return float(gains[best]), int(features[best]), int(thresholds[best])


@contextmanager
def _crew(threads: int) -> Iterator[Callable[..., None]]:
    """Yield ``share(job, n)``, which runs ``job(0..n-1)`` on that many threads (the kernels release the lock)."""
    if threads == 1:
        yield lambda job, n: deque(map(job, range(n)), maxlen=0).clear()
        return
    with ThreadPoolExecutor(threads) as pool:
        yield lambda job, n: deque(pool.map(job, range(n)), maxlen=0).clear()
