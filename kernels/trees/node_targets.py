"""Targets of a node for the split search: mean, energy, and its own fixed-point coordinates when it is small."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from auditor.kernels.trees.histogram_simd import LANES
from auditor.kernels.trees.tiny_nodes import MOST_SUBSET_ROWS

LOCAL = 0  # a node whose histograms are made from its own fixed-point targets and not kept
TOP = 2.0**30  # no fixed-point sum leaves (-TOP, TOP)
TAIL_SHARE = 2e-3  # energy that coordinates of a small node may leave out
MOST_COORDINATES = 63
SMALLEST_STEP = 1e-300


class Targets(NamedTuple):
    """The targets of all rows, as they are and rounded to multiples of a step."""

    y: Any  # (rows, outputs) float64
    fixed: Any  # (rows, lanes) int32: lane 0 is 1, outputs from lane 1 on, then zeros
    step: float  # of ``fixed``


class Nodes(NamedTuple):
    """Some nodes of one level: node i has the rows ``rows[start[i]:stop[i]]``."""

    rows: Any  # int32, the nodes' rows one after the other
    start: Any
    stop: Any
    mode: Any  # LOCAL, or how the node comes to the histogram that it keeps


class NodeTargets(NamedTuple):
    """The targets of those nodes, as :func:`prepare` writes them."""

    mean: Any  # (nodes, outputs) float64
    energy: Any  # (nodes,) summed squared distance from the mean
    fixed_mean: Any  # (nodes, lanes) mean of the fixed-point targets that its histograms add up
    step: Any  # (nodes,) of these targets
    tail: Any  # (nodes,) energy that its coordinates leave out
    lanes: Any  # (nodes,) of its histograms; 0 for a tiny node, which needs none
    local: Any  # flat int32: the fixed-point coordinates of LOCAL nodes
    local_at: Any  # (nodes,) where a LOCAL node's coordinates begin


@njit(nogil=True, cache=True)
def _coordinates(part: Any, coords: Any, norms: Any, energy: float) -> tuple[int, float]:
    """Pivoted Gram-Schmidt on the rows of ``part`` (overwritten); return the rank used and the energy left out."""
    m, k = part.shape
    axis = np.empty(k)
    rank = 0
    left = energy
    while rank < min(MOST_COORDINATES, k, m):
        if left <= 1e-13 * energy or ((rank + 1) % LANES == 0 and left <= TAIL_SHARE * energy):
            break
        pivot = 0
        for i in range(1, m):
            if norms[i] > norms[pivot]:
                pivot = i
        length = 0.0
        for c in range(k):
            length += part[pivot, c] * part[pivot, c]
        if length <= 0.0:
            break
        length = np.sqrt(length)
        for c in range(k):
            axis[c] = part[pivot, c] / length
        left = 0.0
        for i in range(m):
            dot = 0.0
            for c in range(k):
                dot += part[i, c] * axis[c]
            coords[i, rank] = dot
            rest = 0.0
            for c in range(k):
                part[i, c] -= dot * axis[c]
                rest += part[i, c] * part[i, c]
            norms[i] = rest
            left += rest
        rank += 1
    return rank, left


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def prepare(first: int, last: int, nodes: Nodes, targets: Targets, out: NodeTargets) -> None:
    """Describe nodes ``first..last`` in ``out``: mean, energy, and fixed-point targets (their own for LOCAL ones)."""
    for node in range(first, last):
        rows = nodes.rows[nodes.start[node] : nodes.stop[node]]
        out.energy[node] = _mean_and_energy(targets.y, rows, out.mean[node])
        out.tail[node] = 0.0
        for lane in range(out.fixed_mean.shape[1]):
            out.fixed_mean[node, lane] = 0.0
        if nodes.mode[node] != LOCAL:
            out.lanes[node] = targets.fixed.shape[1]
            out.step[node] = targets.step
            _mean_of_fixed(targets.fixed, rows, out.fixed_mean[node])
        elif rows.shape[0] <= MOST_SUBSET_ROWS:
            out.lanes[node] = 0
        else:
            _prepare_local(node, rows, targets, out)


@njit(inline="always")
def _mean_and_energy(y: Any, rows: Any, mean: Any) -> float:
    """Set ``mean`` to the mean of the rows of ``y`` and return their summed squared distance from it."""
    m, k = rows.shape[0], y.shape[1]
    for c in range(k):
        mean[c] = 0.0
    for j in range(m):
        for c in range(k):
            mean[c] += y[rows[j], c]
    for c in range(k):
        mean[c] /= m
    energy = 0.0
    for j in range(m):
        for c in range(k):
            d = y[rows[j], c] - mean[c]
            energy += d * d
    return energy


@njit(inline="always")
def _mean_of_fixed(fixed: Any, rows: Any, mean: Any) -> None:
    sums = np.zeros(fixed.shape[1], np.int64)
    for j in range(rows.shape[0]):
        for c in range(fixed.shape[1]):
            sums[c] += fixed[rows[j], c]
    for c in range(fixed.shape[1]):
        mean[c] = sums[c] / rows.shape[0]


@njit(inline="always")
def _prepare_local(node: int, rows: Any, targets: Targets, out: NodeTargets) -> None:
    """Write a small node's own fixed-point targets, along coordinates where these need fewer lanes."""
    m, k = rows.shape[0], targets.y.shape[1]
    part, norms = np.empty((m, k)), np.zeros(m)
    for j in range(m):
        for c in range(k):
            d = targets.y[rows[j], c] - out.mean[node, c]
            part[j, c] = d
            norms[j] += d * d
    width, energy = k, out.energy[node]
    if targets.fixed.shape[1] > LANES and energy > 0.0:
        coords, centred = np.empty((m, MOST_COORDINATES)), np.empty((m, k))
        for j in range(m):
            for c in range(k):
                centred[j, c] = part[j, c]
        rank, left = _coordinates(part, coords, norms, energy)
        if rank < MOST_COORDINATES or left <= TAIL_SHARE * energy:
            part, width = coords, rank
            out.tail[node] = left + 1e-10 * energy
        else:
            part = centred
    _round_local(node, part, width, out)


@njit(inline="always")
def _round_local(node: int, part: Any, width: int, out: NodeTargets) -> None:
    """Round ``width`` columns of ``part`` (rows, columns) to steps so small that no sum of all rows leaves TOP."""
    m = part.shape[0]
    largest = 0.0
    for j in range(m):
        for c in range(width):
            largest = max(largest, abs(part[j, c]))
    step = max(m * largest / TOP, SMALLEST_STEP)
    lanes = (width + 1 + LANES - 1) // LANES * LANES
    out.lanes[node] = lanes
    out.step[node] = step
    sums = np.zeros(lanes, np.int64)
    for j in range(m):
        at = out.local_at[node] + j * lanes
        out.local[at] = 1
        for c in range(width):
            rounded = np.int64(np.rint(part[j, c] / step))
            out.local[at + 1 + c] = rounded
            sums[1 + c] += rounded
        for c in range(width + 1, lanes):
            out.local[at + c] = 0
    sums[0] = m
    for c in range(lanes):
        out.fixed_mean[node, c] = sums[c] / m
