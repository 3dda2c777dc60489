"""Loss of a network with one neuron ablated, for all neurons of a layer at once, without a pass per neuron.

A ReLU layer with activations a feeds  z = W a + c;  ablating neuron i moves a_i by  d_i  and nothing else, so

    z' = z + W_i d_i          rank one, and nothing at all where d_i = 0 (the neuron was silent)

- if z are the logits, each loss follows from  n_classes  numbers;
- if z feeds one more ReLU layer,  logits' = logits + V (relu(z') - relu(z)).  Units j that keep their sign answer
  linearly: for all neurons together  V diag(z > 0) W,  one matrix product per image. Only units whose sign flips
  differ, by  V_j |z'_j|,  and with the units sorted by  |z_j| / max_i |W_ji|  the scan for them ends early.

Activations and weights may be float32; losses are summed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
SHARES = 8  # of the images, for threads
BLOCK = 256  # images whose linear answers are held at once


def losses_below_logits(d: Tensor, w: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the summed cross-entropy for each ablated neuron, (neurons,), when  logits = W a + c.

    ``d`` is (images, neurons), ``w`` (classes, neurons).
    """
    answers = np.ascontiguousarray(_numpy(w).T)
    rows = (_numpy(d), _numpy(logits.double()), labels.numpy())
    return torch.from_numpy(_in_threads(lambda s: _sum_direct(rows[0][s], answers, rows[1][s], rows[2][s]), len(d)))


def losses_below_relu(d: Tensor, w: Tensor, z: Tensor, v: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the same when  logits = V relu(z) + c',  z = W a + c;  ``w`` (units, neurons), ``z`` (images, units)."""
    n_classes, n_units = v.shape
    by_neuron, by_unit = np.ascontiguousarray(_numpy(w).T), np.ascontiguousarray(_numpy(v).T)
    largest = _numpy(w.abs().amax(1).clamp_min(torch.finfo(w.dtype).tiny))
    total = np.zeros(w.shape[1])
    for rows in torch.split(torch.arange(len(d)), BLOCK):
        open_units = (z[rows] > 0).to(v.dtype)
        linear = (v[None] * open_units[:, None]).reshape(-1, n_units) @ w
        steps = _numpy(linear.view(len(rows), n_classes, -1)), _numpy(d[rows]), _numpy(z[rows])
        ends = _numpy(logits[rows].double()), labels[rows].numpy()

        def part(s: slice, steps: Any = steps, ends: Any = ends) -> Any:
            linear, moves, units = (a[s] for a in steps)
            return _sum_bent(linear, moves, units, by_neuron, by_unit, largest, ends[0][s], ends[1][s])

        total += _in_threads(part, len(rows))
    return torch.from_numpy(total)


def _in_threads(part: Callable[[slice], Any], n: int) -> Any:
    """Add up what ``part`` gives for shares of ``n`` images; the share does not depend on who runs it."""
    shares = [slice(k * n // SHARES, (k + 1) * n // SHARES) for k in range(SHARES)]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return sum(pool.map(part, shares))


def _numpy(x: Tensor) -> Array:
    return np.ascontiguousarray(x.detach().numpy())


@numba.njit(nogil=True, cache=True, fastmath={"contract", "reassoc"})
def _cross_entropy(logits: Array, label: int) -> Any:
    top = logits[0]
    for c in range(1, logits.shape[0]):
        top = max(top, logits[c])
    total = 0.0
    for c in range(logits.shape[0]):
        total += math.exp(logits[c] - top)
    return top + math.log(total) - logits[label]


@numba.njit(nogil=True, cache=True)
def _sum_direct(d: Array, answers: Array, logits: Array, labels: Array) -> Any:
    n_images, n_neurons = d.shape
    sums = np.zeros(n_neurons)
    changed = np.empty(logits.shape[1])
    for n in range(n_images):
        as_it_is = _cross_entropy(logits[n], labels[n])
        for i in range(n_neurons):
            if d[n, i] == 0:
                sums[i] += as_it_is
                continue
            for c in range(logits.shape[1]):
                changed[c] = logits[n, c] + d[n, i] * answers[i, c]
            sums[i] += _cross_entropy(changed, labels[n])
    return sums


@numba.njit(nogil=True, cache=True)
def _sum_bent(
    linear: Array, d: Array, z: Array, by_neuron: Array, by_unit: Array, largest: Array, logits: Array, labels: Array
) -> Any:
    n_images, n_neurons = d.shape
    n_units, n_classes = by_unit.shape
    sums = np.zeros(n_neurons)
    changed = np.empty(n_classes)
    for n in range(n_images):
        as_it_is = _cross_entropy(logits[n], labels[n])
        far = np.abs(z[n]) / largest  # the unit cannot flip for a smaller |d|
        order = np.argsort(far)
        near = far[order]
        value = z[n][order]
        for i in range(n_neurons):
            step = d[n, i]
            if step == 0:
                sums[i] += as_it_is
                continue
            for c in range(n_classes):
                changed[c] = logits[n, c] + step * linear[n, c, i]
            reach = abs(step)
            row = by_neuron[i]
            for k in range(n_units):
                if near[k] > reach:
                    break
                j = order[k]
                after = value[k] + step * row[j]
                if (value[k] > 0) != (after > 0):
                    for c in range(n_classes):
                        changed[c] += by_unit[j, c] * abs(after)
            sums[i] += _cross_entropy(changed, labels[n])
    return sums
