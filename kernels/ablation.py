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
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
BLOCK = 256  # images whose linear answers are held at once


def losses_below_logits(d: Tensor, w: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the summed cross-entropy for each ablated neuron, (neurons,), when  logits = W a + c.

    ``d`` is (images, neurons), ``w`` (classes, neurons).
    """
    answers = np.ascontiguousarray(_numpy(w).T)
    return torch.from_numpy(_sum_direct(_numpy(d), answers, _numpy(logits.double()), labels.numpy()))


def losses_below_relu(d: Tensor, w: Tensor, z: Tensor, v: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the same when  logits = V relu(z) + c',  z = W a + c;  ``w`` (units, neurons), ``z`` (images, units)."""
    n_classes, n_units = v.shape
    by_neuron, by_unit = np.ascontiguousarray(_numpy(w).T), np.ascontiguousarray(_numpy(v).T)
    largest = _numpy(w.abs().amax(1).clamp_min(torch.finfo(w.dtype).tiny))
    total = np.zeros(w.shape[1])
    for rows in torch.split(torch.arange(len(d)), BLOCK):
        open_units = (z[rows] > 0).to(v.dtype)
        linear = (v[None] * open_units[:, None]).reshape(-1, n_units) @ w
        parts = (_numpy(linear.view(len(rows), n_classes, -1)), _numpy(d[rows]), _numpy(z[rows]))
        total += _sum_bent(*parts, by_neuron, by_unit, largest, _numpy(logits[rows].double()), labels[rows].numpy())
    return torch.from_numpy(total)


def _numpy(x: Tensor) -> Array:
    return np.ascontiguousarray(x.detach().numpy())


@numba.njit(fastmath={"contract", "reassoc"}, cache=True)
def _cross_entropy(logits: Array, label: int) -> Any:
    top = logits[0]
    for c in range(1, logits.shape[0]):
        top = max(top, logits[c])
    total = 0.0
    for c in range(logits.shape[0]):
        total += math.exp(logits[c] - top)
    return top + math.log(total) - logits[label]


@numba.njit(parallel=True, cache=True)
def _sum_direct(d: Array, answers: Array, logits: Array, labels: Array) -> Any:
    n_images, n_neurons = d.shape
    n_parts = numba.get_num_threads()
    sums = np.zeros((n_parts, n_neurons))
    for part in numba.prange(n_parts):
        changed = np.empty(logits.shape[1])
        for n in range(part, n_images, n_parts):
            as_it_is = _cross_entropy(logits[n], labels[n])
            for i in range(n_neurons):
                if d[n, i] == 0:
                    sums[part, i] += as_it_is
                    continue
                for c in range(logits.shape[1]):
                    changed[c] = logits[n, c] + d[n, i] * answers[i, c]
                sums[part, i] += _cross_entropy(changed, labels[n])
    return sums.sum(0)


@numba.njit(parallel=True, cache=True)
def _sum_bent(
    linear: Array, d: Array, z: Array, by_neuron: Array, by_unit: Array, largest: Array, logits: Array, labels: Array
) -> Any:
    n_images, n_neurons = d.shape
    n_units, n_classes = by_unit.shape
    n_parts = numba.get_num_threads()
    sums = np.zeros((n_parts, n_neurons))
    for part in numba.prange(n_parts):
        changed = np.empty(n_classes)
        for n in range(part, n_images, n_parts):
            as_it_is = _cross_entropy(logits[n], labels[n])
            far = np.abs(z[n]) / largest  # the unit cannot flip for a smaller |d|
            order = np.argsort(far)
            near = far[order]
            value = z[n][order]
            for i in range(n_neurons):
                step = d[n, i]
                if step == 0:
                    sums[part, i] += as_it_is
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
                sums[part, i] += _cross_entropy(changed, labels[n])
    return sums.sum(0)
