"""Every vector instruction of the projection against loops over plain arrays."""

from typing import Any

import numba
import numpy as np
import pytest

from auditor.kernels.factorization.projection_simd import (
    TILE,
    add_product_of_four,
    add_product_of_four_short,
    add_product_of_two,
    add_product_of_two_short,
    coordinate_pass,
    watched_pass,
    write_row,
)

njit: Any = numba.njit


@njit
def _four(X, at, stride, W, w_at, w_stride, n, out, out_at, lanes):
    add_product_of_four(X, at, stride, W, w_at, w_stride, n, out, out_at, lanes)


@njit
def _two(X, at, stride, W, w_at, w_stride, n, out, out_at, lanes):
    add_product_of_two(X, at, stride, W, w_at, w_stride, n, out, out_at, lanes)


@njit
def _four_short(X, at, stride, W, w_at, w_stride, n, out, out_at, lanes):
    add_product_of_four_short(X, at, stride, W, w_at, w_stride, n, out, out_at, lanes)


@njit
def _two_short(X, at, stride, W, w_at, w_stride, n, out, out_at, lanes):
    add_product_of_two_short(X, at, stride, W, w_at, w_stride, n, out, out_at, lanes)


@njit
def _pass(s, b, H, rank, stride):
    coordinate_pass(s, b, H, rank, stride)


@njit
def _watched(s, b, H, rank, stride, moved, top):
    watched_pass(s, b, H, rank, stride, moved, top)


@njit
def _write(S, at, s, s_at, scale, lanes):
    write_row(S, at, s, s_at, scale, lanes)


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


PRODUCTS = {  # function, rows, whether all lanes are there
    "four": (_four, 4, True),
    "two": (_two, 2, True),
    "four short": (_four_short, 4, False),
    "two short": (_two_short, 2, False),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("lanes", [1, 15, 16, 17, 63, 64])
@pytest.mark.parametrize("n_channels", [0, 1, 5])
def test_products_equal_plain_sums(name, lanes, n_channels):
    product, n_rows, is_whole = PRODUCTS[name]
    passed, lanes = lanes, TILE if is_whole else lanes  # a whole form takes every lane, whatever number it is given
    at, stride, w_at, w_stride, out_at = 3, 83, 2, 6, 5
    X = np.full(at + 5 * stride + TILE, np.nan, np.float32)  # lanes that are not there must not be read
    for c in range(5):
        X[at + c * stride : at + c * stride + lanes] = drawn(lanes, seed=c)
    W, out = drawn(w_at + 5 * w_stride + 4, seed=9), drawn(out_at + 4 * TILE + 7, seed=10)
    want = out.astype(np.float64)
    for r in range(n_rows):
        for p in range(lanes):
            for c in range(n_channels):
                want[out_at + TILE * r + p] += float(W[w_at + c * w_stride + r]) * float(X[at + c * stride + p])
    product(X, at, stride, W, w_at, w_stride, n_channels, out, out_at, passed)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


def plain_pass(s, b, H, rank, stride):
    """One lane and row after the other, in float64; returns what each lane moved and its largest score."""
    s, moved, top = s.astype(np.float64), np.zeros(TILE), np.zeros(TILE)
    for k in range(rank):
        for p in range(TILE):
            new = float(b[k * TILE + p]) - sum(float(H[k * stride + j]) * s[j * TILE + p] for j in range(rank))
            new = max(new, 0.0)
            moved[p] += abs(new - s[k * TILE + p])
            top[p] = max(top[p], new)
            s[k * TILE + p] = new
    return s, moved, top


@pytest.mark.parametrize(("rank", "stride"), [(1, 1), (3, 3), (5, 7)])
def test_passes_equal_the_plain_loop(rank, stride):
    s, b = np.abs(drawn(rank * TILE)), drawn(rank * TILE, seed=1)
    H = 0.3 * drawn(rank * stride, seed=2)
    H[:: stride + 1] = 0  # zero diagonal
    want, moved_want, top_want = plain_pass(s, b, H, rank, stride)
    assert (want == 0).any()
    assert (want > 0).any()
    plain, watched = s.copy(), s.copy()
    _pass(plain, b, H, rank, stride)
    np.testing.assert_allclose(plain, want, rtol=1e-5, atol=1e-5)
    moved, top = np.full(TILE, 9, np.float32), np.full(TILE, 9, np.float32)
    _watched(watched, b, H, rank, stride, moved, top)
    np.testing.assert_array_equal(watched, plain)
    np.testing.assert_allclose(moved, moved_want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(top, top_want, rtol=1e-5, atol=1e-5)


def test_a_lane_that_is_not_a_number_stays_one_and_disturbs_no_other():
    s, b, H = np.zeros(2 * TILE, np.float32), drawn(2 * TILE), np.array([0, 0.5, 0.5, 0], np.float32)
    b[7] = np.nan
    moved, top = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    _watched(s, b, H, 2, 2, moved, top)
    assert np.isnan(moved[7])
    assert np.isnan(s[[7, TILE + 7]]).all()
    assert np.isfinite(np.delete(moved, 7)).all()
    assert np.isfinite(np.delete(s, [7, TILE + 7])).all()


@pytest.mark.parametrize("lanes", [1, 15, 16, 17, 48, 63, 64])
def test_a_row_is_written_up_to_its_last_lane(lanes):
    S, s = np.full(100, -7, np.float32), drawn(2 * TILE)
    _write(S, 11, s, TILE, np.float32(2.5), lanes)
    np.testing.assert_array_equal(S[11 : 11 + lanes], np.float32(2.5) * s[TILE : TILE + lanes])
    assert (S[:11] == -7).all()
    assert (S[11 + lanes :] == -7).all()
