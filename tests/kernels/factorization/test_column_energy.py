"""Range, energy and sampling of columns against numpy in float64."""

import math

import numpy as np
import pytest
import torch

from auditor.kernels.factorization.column_energy import (
    check_range,
    columns_on_device,
    energy,
    inner_product,
    sample_columns,
)


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(13, 17), (1, 1), (3, 4099), (5, 1)])
def test_energy_equals_numpy(shape, dtype):
    X = drawn(*shape, dtype=dtype)
    x = X.double().numpy()
    measured = energy(X)
    assert (measured.low, measured.high) == (x.min(), x.max())
    np.testing.assert_allclose(measured.columns, (x**2).sum(0), rtol=1e-12)
    np.testing.assert_allclose(columns_on_device(X), (x**2).sum(0), rtol=1e-12)
    assert measured.total == pytest.approx((x**2).sum(), rel=1e-12)
    turned = energy(X.T.contiguous().T)
    torch.testing.assert_close(turned.columns, measured.columns, rtol=0, atol=0)


def test_nothing_and_what_is_no_number():
    empty = energy(torch.zeros(0, 3))
    assert (empty.low, empty.high, empty.total, empty.columns.tolist()) == (0, 0, 0, [0, 0, 0])
    assert math.isnan(energy(torch.tensor([[1.0, torch.nan]])).low)


def test_a_range_is_refused_by_what_it_holds():
    for values, signed, sentence in (
        ([0.0, 3.0], False, ""),
        ([-0.5, 3.0], True, ""),
        ([-0.5, 3.0], False, "X must be non-negative, got a smallest value of -0.5; choose a layer after a ReLU"),
        ([math.nan, 3.0], True, "X must be finite, got NaN or infinite values"),
        ([0.0, math.inf], True, "X must be finite, got NaN or infinite values"),
        ([-math.inf, 0.0], True, "X must be finite, got NaN or infinite values"),
    ):
        if sentence:
            with pytest.raises(ValueError, match=f"^{sentence}"):
                check_range(energy(torch.tensor([values])), "X", signed=signed)
        else:
            check_range(energy(torch.tensor([values])), "X", signed=signed)


def test_small_entries_are_not_lost_beside_large_ones():
    X = torch.full((2, 5000), 1e-4)
    X[0, 0] = 1e4
    assert energy(X).total - 1e8 == pytest.approx(9999 * float(X[1, 1]) ** 2, rel=5e-3)  # float32: 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(13, 17), (1, 1), (3, 4099)])
def test_inner_product_equals_numpy(shape, dtype):
    A, B = drawn(*shape, dtype=dtype), drawn(*shape, seed=1, dtype=dtype)
    want = (A.double().numpy() * B.double().numpy()).sum()
    assert inner_product(A, B) == pytest.approx(want, rel=1e-10, abs=1e-10)


def chances(columns):
    return [0.9 * float(c) / float(columns.sum()) + 0.1 / len(columns) for c in columns]


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_a_sample_of_all_columns_is_all_of_them_each_divided_by_the_root_of_its_chance(scale):
    X = drawn(3, 7) * torch.tensor([0.0, 1, 2, 3, 4, 5, 30])
    X = X * scale
    columns = energy(X).columns
    got = sample_columns(X, columns, 7, torch.Generator().manual_seed(0))
    for p, chance in enumerate(chances(columns)):
        torch.testing.assert_close(got[:, p], X[:, p] / min(7 * chance, 1) ** 0.5, rtol=1e-5, atol=0)


def test_columns_are_drawn_by_their_chance():
    columns = torch.tensor([0.0, 1.0, 3.0, 6.0], dtype=torch.float64)
    X, g = torch.eye(4), torch.Generator().manual_seed(1)
    drawn_ones = [int(sample_columns(X, columns, 1, g)[:, 0].argmax()) for _ in range(3000)]
    shares = np.bincount(drawn_ones, minlength=4) / 3000
    for share, chance in zip(shares, chances(columns), strict=True):
        assert abs(share - chance) < 4 * math.sqrt(chance * (1 - chance) / 3000)


def test_the_sample_keeps_the_energy_in_the_mean_and_its_order():
    X = drawn(4, 40) * torch.linspace(0.1, 3, 40)
    measured, g = energy(X), torch.Generator().manual_seed(2)
    totals = torch.tensor([energy(sample_columns(X, measured.columns, 1, g)).total for _ in range(4000)])
    assert abs(float(totals.mean()) - measured.total) < 4 * float(totals.std()) / 4000**0.5
    part = sample_columns(torch.arange(40.0)[None], torch.ones(40).double(), 9, g)
    assert part.shape == (1, 9)
    assert (part.diff() > 0).all()


def test_no_energy_at_all_is_drawn_evenly():
    got = sample_columns(torch.zeros(3, 5), torch.zeros(5).double(), 2, torch.Generator().manual_seed(0))
    assert got.shape == (3, 2)
    assert got.abs().max() == 0
