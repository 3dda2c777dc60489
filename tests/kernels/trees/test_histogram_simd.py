"""Every vector instruction of the tree kernel against loops over plain arrays."""

from typing import Any

import numba
import numpy as np
import pytest

from auditor.kernels.trees.histogram_simd import (
    CACHE_LINE,
    LANES,
    add_lanes,
    add_squared_gaps,
    aligned,
    count_and_square,
    rows_not_above,
)

njit: Any = numba.njit


@njit
def _add(total, at, part, of):
    add_lanes(total, at, part, of)


@njit
def _gaps(hist, at, n_bins, lefts, mean, first, out):
    add_squared_gaps(hist, at, n_bins, lefts, mean, first, out)


@njit
def _count(hist, at, n_bins, lefts, mean, first, out):
    count_and_square(hist, at, n_bins, lefts, mean, first, out)


@njit
def _not_above(codes, at, n_rows, row, out):
    rows_not_above(codes, at, n_rows, row, out)


@pytest.mark.parametrize("shape", [5, (3, 7), (0, 4), (2, 1, 3)])
@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float64])
def test_arrays_start_on_a_cache_line(shape, dtype):
    for fill in (0, 3, None):
        a = aligned(shape, dtype, fill=fill)
        assert not a.size or a.ctypes.data % CACHE_LINE == 0
        assert a.shape == (shape if isinstance(shape, tuple) else (shape,))
        assert a.dtype == dtype
        assert a.flags.c_contiguous
        assert fill is None or (a == fill).all()


@pytest.mark.parametrize(("at", "of"), [(0, 0), (3, 5), (20, 1)])
def test_sixteen_lanes_are_added_and_no_other(at, of):
    rng = np.random.default_rng(0)
    total, part = (rng.integers(-(2**30), 2**30, 40).astype(np.int32) for _ in range(2))
    want = total.copy()
    want[at : at + LANES] += part[of : of + LANES]
    _add(total, at, part, of)
    np.testing.assert_array_equal(total, want)


@pytest.mark.parametrize("n_bins", [0, 1, 5])
@pytest.mark.parametrize(("at", "first"), [(0, 0), (7, 16)])
def test_running_sums_and_their_squared_gaps(n_bins, at, first):
    rng = np.random.default_rng(n_bins)
    hist = rng.integers(-(2**20), 2**20, at + 6 * LANES).astype(np.int32)
    hist[at::LANES] = np.abs(hist[at::LANES]) % 50  # lane 0 counts
    mean = rng.normal(size=(2, LANES)) * 1000
    lefts, out = np.full(6, 3.0), np.full(6, 11.0)
    sums = hist[at : at + n_bins * LANES].reshape(n_bins, LANES).cumsum(0).astype(np.float64)
    means = mean.reshape(-1)[first : first + LANES]
    _gaps(hist, at, n_bins, lefts, mean, first, out)
    np.testing.assert_allclose(out[:n_bins], 11 + ((sums - 3 * means) ** 2).sum(1), rtol=1e-12)
    assert (out[n_bins:] == 11).all()
    assert (lefts == 3).all()
    _count(hist, at, n_bins, lefts, mean, first, out)
    np.testing.assert_array_equal(lefts[:n_bins], sums[:, 0])
    np.testing.assert_allclose(out[:n_bins], ((sums - sums[:, :1] * means) ** 2).sum(1), rtol=1e-12)
    assert (out[n_bins:] == 11).all()
    assert (lefts[n_bins:] == 3).all()


@pytest.mark.parametrize("n_rows", [1, 2, 12, 16])
@pytest.mark.parametrize("at", [0, 16])
def test_rows_not_above_are_bits(n_rows, at):
    codes = np.random.default_rng(n_rows).choice(np.array([0, 1, 127, 128, 255], np.uint8), (n_rows + 1, LANES))
    flat, out = codes.reshape(-1), np.full(LANES, 99, np.uint16)
    used = codes[1:] if at else codes[:n_rows]
    for row in range(n_rows):
        _not_above(flat, at, n_rows, row, out)
        for q in range(LANES):
            assert out[q] == sum(1 << i for i in range(n_rows) if used[i, q] <= used[row, q])
