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
from auditor.kernels.trees.node_targets import LOCAL, TOP, prepare
from auditor.kernels.trees.split_search import GROWN, SUBTRACTED, TILE, search
from auditor.kernels.trees.tree import Codes, Floats, Ints, Tree, TreeLimits, checked_codes, checked_targets

PURE = float(np.finfo(np.float64).eps)  # scikit-learn's: a node of smaller mean variance is a leaf
HISTOGRAM_BYTES = 1 << 30


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
    """One node of a level that has rows it has not seen, and how its histogram comes about."""

    node: _Node
    mode: int = LOCAL
    fresh: bool = True
    seen: int = 0  # rows[:seen] were there before; they are in the histogram already unless it is fresh
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
        wanted = threads or min(len(os.sched_getaffinity(0)), self._tiles // 8)
        self._threads = max(1, min(wanted, self._tiles))
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

    def _make_room(self, wanted: int, y: Floats) -> bool:
        """Return whether the step of the fixed-point targets had to change, so that histograms must be made anew."""
        stale = self._root is None
        if wanted > self._capacity:
            self._reserve(max(wanted, 2 * self._capacity))
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
        n = len(tasks)
        rows = np.concatenate([task.node.rows for task in tasks])
        stop = np.cumsum([len(task.node.rows) for task in tasks], dtype=np.int64)
        start = np.concatenate([[0], stop[:-1]]).astype(np.int64)
        mode = np.array([task.mode for task in tasks], dtype=np.int64)
        is_local = mode == LOCAL
        local_at = np.zeros(n, dtype=np.int64)
        widths = np.where(is_local, (stop - start) * self._lanes, 0)
        local_at[1:] = np.cumsum(widths)[:-1]
        local = aligned(max(int(widths.sum()), LANES), np.int32, fill=None)
        lanes = np.zeros(n, dtype=np.int64)
        mean, fixed_mean = np.empty((n, self.n_outputs)), aligned((n, self._lanes), np.float64, fill=None)
        energy, step, tail = np.empty(n), np.empty(n), np.empty(n)
        described = (rows, start, stop, mode, self._y, self._fixed, self._step, local, local_at, lanes)
        measured = (mean, energy, fixed_mean, step, tail)
        weight = np.concatenate([[0], np.cumsum(stop - start)])
        cuts = np.searchsorted(weight, np.linspace(0, weight[-1], self._threads + 1)).tolist()
        share(lambda i: prepare(cuts[i], cuts[i + 1], *described, *measured), self._threads)
        for i, task in enumerate(tasks):
            task.node.mean = mean[i]
        wanted = energy > PURE * (stop - start) * self.n_outputs
        wanted &= np.array([self._can_split(task.node) for task in tasks])
        busy = np.flatnonzero(wanted | ~is_local)  # an unwanted histogram may still be a sibling's
        gain = np.full((self._threads, len(busy)), -np.inf)
        feature, threshold = (np.full((self._threads, len(busy)), -1, dtype=np.int64) for _ in range(2))
        blocks = np.array(
            [
                (task.node.block, task.parent, task.sibling, 0 if task.fresh else task.seen, task.fresh)
                for task in tasks
            ],
            dtype=np.int64,
        )[busy]
        tiles = np.linspace(0, self._tiles, self._threads + 1).astype(np.int64)
        grown_from = start[busy] + blocks[:, 3]

        def one(i: int) -> None:
            hist = aligned(TILE * self._n_codes * LANES, np.int32, fill=None)
            search(
                tiles[i],
                tiles[i + 1],
                self._n_codes,
                self._codes,
                self._plain,
                rows,
                start[busy],
                grown_from,
                stop[busy],
                mode[busy],
                blocks[:, 4],
                wanted[busy],
                blocks[:, 0],
                blocks[:, 1],
                blocks[:, 2],
                self._y,
                self._fixed,
                local,
                local_at[busy],
                lanes[busy],
                self._pool,
                self._block_size,
                mean[busy],
                energy[busy],
                fixed_mean if len(busy) == n else fixed_mean[busy],
                step[busy],
                tail[busy],
                self.limits.leaf_rows,
                self.limits.balance,
                hist,
                gain[i],
                feature[i],
                threshold[i],
            )

        if len(busy):
            share(one, self._threads)
        splits = [(-np.inf, -1, -1)] * n
        for j, i in enumerate(busy.tolist()):
            splits[i] = _first_best(gain[:, j], feature[:, j], threshold[:, j], 1e-12 * energy[i])
        floor = self.limits.min_gain * self.n_rows * self.n_outputs
        return [split if split[0] + PURE * self.n_rows >= floor else (-np.inf, -1, -1) for split in splits]

    def _descend(self, task: _Task, gain: float, feature: int, threshold: int) -> list[_Task]:
        node = task.node
        if feature < 0:
            self._prune(node)
            if node.block >= 0 and not self._keep:
                task.frees.append(node.block)
            return []
        node.gain = gain
        same = (feature, threshold) == (node.feature, node.threshold)
        new = node.rows[task.seen :] if same else node.rows
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
        task = _Task(node, seen=len(node.rows))
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
