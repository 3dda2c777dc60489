"""Sparsity and disentanglement of one layer's weights W, whose rows are neurons [Framework].

    |W|_{p,q} = (sum_i |W_i|_p^q)^(1/q)               cos_ij = |<W_i, W_j>| / (|W_i| |W_j|)   for all pairs i < j

Zero rows have no direction: they are left out of the cosines and counted. Each number has its null model: the same
statistic of weights drawn anew from torch's own initialisation, uniform within 1/sqrt(inputs) of zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from auditor.metrics.measure import Measure, of_value, skipped

NEAR_ZERO = 1e-3  # of the largest |w|
ALPHA = 0.2  # a pair below this is disentangled
N_BINS = 50  # of the histogram of |cos| over [0, 1]
MOST_ROWS = 1024  # beyond this many rows the cosines are those of a random sample of them


def weight_metrics(rows: Tensor, *, seed: int = 0) -> dict[str, Measure]:
    """Return the measures of one layer by name; ``rows`` is (neurons, inputs).

    ``cosine_histogram`` has the mean |cos| as value and in ``per_image`` the share of pairs in each of 50 bins.

    >>> m = weight_metrics(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]))
    >>> round(m["cosine_max"].value, 6), m["zero_rows"].value, m["norm_1_1"].value
    (0.707107, 1.0, 3.0)
    """
    w = rows.detach()
    n, fan_in = w.shape
    generator = torch.Generator().manual_seed(seed)
    sample = torch.randperm(n, generator=generator)[:MOST_ROWS].sort().values if n > MOST_ROWS else torch.arange(n)
    blank = (torch.rand(len(sample), fan_in, generator=generator) * 2 - 1) / math.sqrt(max(fan_in, 1))
    ours, null = _sparsity(w), _sparsity(blank)
    more = n / len(sample)
    grows = {"norm_1_1": more, "norm_2_1": more, "norm_2_2": math.sqrt(more), "zero_rows": more}
    measures = {
        name: of_value(value, "down" if name == "mean_abs_weight" else "none", n=w.numel(),
                       null=null[name] * grows.get(name, 1.0))
        for name, value in ours.items()
    }  # fmt: skip
    measures["near_zero_share"] = of_value(ours["near_zero_share"], "up", n=w.numel(), null=null["near_zero_share"])
    return measures | _disentanglement(w[sample.to(w.device)], blank, n)


def _sparsity(w: Tensor) -> dict[str, float]:
    peak = float(w.abs().max()) if w.numel() else 0.0
    one = w.abs().sum(1, dtype=torch.float64)
    two = torch.linalg.vector_norm(w, dim=1, dtype=torch.float64)
    return {
        "mean_abs_weight": float(one.sum()) / max(w.numel(), 1),
        # all zero is as sparse as can be
        "near_zero_share": float((w.abs() < NEAR_ZERO * peak).double().mean()) if peak > 0 else 1.0,
        "norm_1_1": float(one.sum()),
        "norm_2_1": float(two.sum()),
        "norm_2_2": float(two.norm()),
        "norm_2_inf": float(two.max()) if len(two) else 0.0,
        "zero_rows": float((two == 0).sum()),
    }


@dataclass(frozen=True, slots=True)
class Cosines:
    """|cos| of all pairs of rows with a direction."""

    values: Tensor

    @classmethod
    def of(cls, w: Tensor) -> Cosines:
        """Take them of the rows of ``w``."""
        w = w.double() if w.numel() <= 1 << 22 else w.float()
        length = w.norm(dim=1)
        unit = w[length > 0] / length[length > 0, None]
        i, j = torch.triu_indices(len(unit), len(unit), 1)
        return cls((unit @ unit.T).abs()[i, j].clamp(max=1).double())

    def figures(self) -> dict[str, float]:
        """Return maximum, quantiles and the share of pairs below alpha."""
        ordered = self.values.sort().values
        last = len(ordered) - 1
        return {
            "cosine_max": float(ordered[-1]),
            "cosine_q999": float(ordered[round(0.999 * last)]),
            "cosine_q99": float(ordered[round(0.99 * last)]),
            "cosine_median": float(ordered[round(0.5 * last)]),
            "cosine_share_below": float((ordered <= ALPHA).double().mean()),
        }


def _disentanglement(w: Tensor, blank: Tensor, n_rows: int) -> dict[str, Measure]:
    ours = Cosines.of(w)
    names = ("cosine_max", "cosine_q999", "cosine_q99", "cosine_median", "cosine_share_below", "cosine_histogram")
    if len(ours.values) == 0:
        reason = "there is no pair of neurons with non-zero weights"
        return {name: skipped(reason, "up" if "share" in name else "down") for name in names}
    random = Cosines.of(blank)
    null = random.figures()
    note = f"{len(w)} of {n_rows} neurons, drawn at random" if len(w) < n_rows else ""
    n = len(ours.values)
    measures = {
        name: Measure(value, n=n, null=null[name], direction="up" if "share" in name else "down", reason=note)
        for name, value in ours.figures().items()
    }
    counts = torch.histc(ours.values, N_BINS, 0, 1) / n
    mean, chance = float(ours.values.mean()), float(random.values.mean())
    measures["cosine_histogram"] = Measure(
        mean, n=n, null=chance, direction="down", reason=note, per_image=tuple(counts.tolist())
    )
    return measures
