"""First measurements of a matrix: its range, its energy, and which columns carry it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from auditor.kernels.factorization.coordinate_descent import over_blocks

MIXTURE = 0.1  # share of the samples drawn evenly, so that weak columns come in, too


@dataclass(frozen=True)
class Energy:
    """Smallest and largest entry of X, |X|_F^2 summed in float64, and the same per column."""

    low: float  # NaN when X holds a NaN
    high: float
    total: float
    columns: Tensor  # (positions,) float64


@numba.njit(nogil=True, cache=True)
def _energy_block(X: NDArray[Any], out: NDArray[Any], lo: int, hi: int) -> None:
    for i in range(X.shape[0]):
        row = X[i]
        for p in range(lo, hi):
            out[p] += np.float64(row[p]) * np.float64(row[p])


def columns_on_device(X: Tensor) -> Tensor:
    """Return |x_p|^2 (positions,) of X (channels, positions) in float64, on the device of X."""
    norm: Tensor = torch.linalg.vector_norm(X.detach(), dim=0, dtype=torch.float64)
    return norm.square()


def energy(X: Tensor) -> Energy:
    """Measure X (channels, positions) in two passes, without a float64 copy of it."""
    if X.numel() == 0:
        return Energy(0.0, 0.0, 0.0, torch.zeros(X.shape[1], dtype=torch.float64, device=X.device))
    low, high = (float(v) for v in X.aminmax())
    if X.device.type == "cpu":
        columns = torch.zeros(X.shape[1], dtype=torch.float64)
        x, out = X.detach().contiguous().numpy(), columns.numpy()
        over_blocks(lambda lo, hi: _energy_block(x, out, lo, hi), X.shape[1], block=4096)
    else:
        columns = columns_on_device(X)
    return Energy(low, high, float(columns.sum()), columns)


def check_range(measured: Energy, what: str, *, signed: bool) -> None:
    """Refuse entries that are not finite and, unless ``signed``, negative ones; ``what`` begins the sentence."""
    if not (math.isfinite(measured.low) and math.isfinite(measured.high)):
        raise ValueError(f"{what} must be finite, got NaN or infinite values; look at the layer's activations first.")
    if measured.low < 0 and not signed:
        raise ValueError(
            f"{what} must be non-negative, got a smallest value of {measured.low:.4g}; "
            "choose a layer after a ReLU, or signed=True."
        )


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})
def _inner_block(A: NDArray[Any], B: NDArray[Any], lo: int, hi: int) -> float:
    total = 0.0
    for i in range(A.shape[0]):
        a, b = A[i], B[i]
        for p in range(lo, hi):
            total += np.float64(a[p]) * np.float64(b[p])
    return total


def inner_product(A: Tensor, B: Tensor) -> float:
    """Return <A, B> of two matrices, summed in float64 in a fixed order."""
    if A.device.type != "cpu":
        return float((A.double() * B.double()).sum())
    a, b = A.detach().contiguous().numpy(), B.detach().contiguous().numpy()
    return float(sum(over_blocks(lambda lo, hi: _inner_block(a, b, lo, hi), A.shape[1], block=4096)))


def sample_columns(X: Tensor, columns: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Return about ``size`` columns of X drawn by energy without replacement, each divided by the root of its chance.

    Then the sampled  sum_p min_s |x_p - W s|^2  has the full one as its mean: NMF of the sample is NMF of a sketch.
    ``columns`` are the energies from :func:`energy`.
    """
    chance = (1 - MIXTURE) * columns.cpu() / columns.sum().cpu().clamp_min(1e-300) + MIXTURE / columns.numel()
    key = torch.empty_like(chance).exponential_(generator=generator) / chance
    index = key.topk(size, largest=False).indices.sort().values
    scale = (size * chance[index]).clamp_max(1).rsqrt().to(X.dtype).to(X.device)
    return X[:, index.to(X.device)] * scale
