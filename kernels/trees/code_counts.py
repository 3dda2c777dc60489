"""How often each code value of each feature goes with each of many yes/no attributes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from auditor.kernels.trees.histogram_simd import LANES, add_lanes, aligned


def code_counts(codes: NDArray[np.uint8], marks: NDArray[np.bool_], n_codes: int) -> NDArray[np.int32]:
    """Return (features, n_codes, attributes + 1) counts: rows with the code and the attribute; last, with the code.

    ``codes`` is (rows, features), ``marks`` (rows, attributes). 1024 features by 312 attributes on 6,000 rows take
    well under a second.
    """
    n, k = marks.shape
    lanes = -(-(k + 1) // LANES) * LANES
    rows = aligned((n, lanes), np.int32)
    rows[:, :k], rows[:, k] = marks, 1
    out = aligned((codes.shape[1], n_codes, lanes), np.int32)
    _count(np.ascontiguousarray(codes.T), rows, out)
    return out[:, :, : k + 1]


@njit(nogil=True, cache=True)
def _count(columns: Any, rows: Any, out: Any) -> None:
    n_features, n = columns.shape
    _, n_codes, lanes = out.shape
    flat, total = rows.reshape(-1), out.reshape(-1)
    for f in range(n_features):
        for i in range(n):
            at = (f * n_codes + np.int64(columns[f, i])) * lanes
            for lane in range(0, lanes, LANES):
                add_lanes(total, at + lane, flat, i * lanes + lane)


def code_counts_reference(codes: NDArray[np.uint8], marks: NDArray[np.bool_], n_codes: int) -> NDArray[np.int32]:
    """Count by comparing everything with everything."""
    every = np.concatenate([marks, np.ones((len(marks), 1), bool)], axis=1).astype(np.int32)
    hits = (codes[:, :, None] == np.arange(n_codes)).astype(np.int32)  # rows, features, codes
    out: NDArray[np.int32] = np.einsum("nfc,na->fca", hits, every)
    return out
