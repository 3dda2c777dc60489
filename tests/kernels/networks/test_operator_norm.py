"""Bounds on norms against explicit matrices: never below, and close."""

import math

import pytest
import torch
from torch import nn

from auditor.kernels.networks import operator_norm
from auditor.kernels.networks.operator_norm import (
    FAILURE,
    _grids,
    _largest_norm,
    _Line,
    convolution_norm,
    lanczos_norm,
    matrix_norm,
)

CONVOLUTIONS = {
    "plain": ((4, 3, 3, 3), (13, 17), (1, 1), ((1, 1), (1, 1)), (1, 1), 1),
    "stride and uneven padding": ((4, 3, 3, 5), (13, 17), (2, 3), ((1, 1), (2, 0)), (1, 1), 1),
    "dilated groups": ((6, 2, 3, 3), (9, 11), (2, 1), ((2, 2), (2, 2)), (2, 2), 2),
    "depthwise": ((8, 1, 3, 3), (7, 7), (1, 1), ((1, 1), (1, 1)), (1, 1), 8),
    "stem": ((5, 3, 7, 7), (15, 14), (2, 2), ((3, 3), (3, 3)), (1, 1), 1),
    "patches": ((3, 4, 2, 2), (8, 6), (2, 2), ((0, 0), (0, 0)), (1, 1), 1),
    "pointwise with stride": ((3, 4, 1, 1), (5, 6), (2, 2), ((0, 0), (0, 0)), (1, 1), 1),
    "more padding than kernel": ((3, 2, 2, 3), (5, 4), (1, 1), ((4, 4), (3, 5)), (1, 1), 1),
}


def explicit(w, size, stride, pad, dilation, groups):
    n = w.shape[1] * groups
    eye = torch.eye(n * math.prod(size), dtype=torch.float64).view(-1, n, *size)
    x = nn.functional.pad(eye, [*pad[1], *pad[0]])
    return nn.functional.conv2d(x, w, None, stride, 0, dilation, groups).flatten(1)


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_no_convolution_exceeds_its_bound(name, coarse, monkeypatch):
    shape, size, stride, pad, dilation, groups = CONVOLUTIONS[name]
    if coarse:
        monkeypatch.setattr("auditor.kernels.networks.operator_norm.WORK", 0)
    w = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    truth = float(torch.linalg.matrix_norm(explicit(w, size, stride, pad, dilation, groups), 2))
    bound = convolution_norm(w, size, stride=stride, pad=pad, dilation=dilation, groups=groups)
    assert truth <= bound <= 1.4 * truth  # small maps: the border takes its share


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_taps_bound_a_convolution_whose_frequencies_are_too_many(name, monkeypatch):
    shape, size, stride, pad, dilation, groups = CONVOLUTIONS[name]
    monkeypatch.setattr(operator_norm, "MOST_WORK", 0)
    w = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    truth = float(torch.linalg.matrix_norm(explicit(w, size, stride, pad, dilation, groups), 2))
    bound = convolution_norm(w, size, stride=stride, pad=pad, dilation=dilation, groups=groups)
    taps = math.prod(shape[2:])
    assert truth <= bound <= 1.4 * math.sqrt(taps) * truth
    if taps == 1:
        assert bound <= 1.001 * truth


def test_taps_that_agree_are_bounded_closely(monkeypatch):
    monkeypatch.setattr(operator_norm, "MOST_WORK", 0)
    w = torch.ones(1, 1, 3, 3, dtype=torch.float64)
    bound = convolution_norm(w, (20, 20), stride=(1, 1), pad=((1, 1), (1, 1)), dilation=(1, 1))
    assert 8.5 < bound < 9.001


def test_the_bound_of_a_convolution_is_close_on_large_maps():
    w = torch.randn(3, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    truth = float(torch.linalg.matrix_norm(explicit(w, (22, 23), (1, 1), ((1, 1), (1, 1)), (1, 1), 1), 2))
    bound = convolution_norm(w, (22, 23), stride=(1, 1), pad=((1, 1), (1, 1)), dilation=(1, 1))
    assert truth <= bound <= 1.02 * truth


@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (5, 9), (40, 13)])
def test_matrix_norm_is_an_upper_bound_and_tight(shape):
    m = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    truth = float(torch.linalg.matrix_norm(m.double(), 2))
    assert truth <= matrix_norm(m) <= truth * (1 + 1e-6)  # float32 weights are exact in float64


def test_lanczos_brackets_the_norm():
    for seed in range(20):
        m = torch.randn(60, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        truth = float(torch.linalg.matrix_norm(m, 2))
        few = lanczos_norm(lambda v, m=m: m @ v, lambda u, m=m: m.T @ u, m[0], n_steps=20, seed=seed)
        assert few.lower <= truth * (1 + 1e-12)
        assert truth <= few.upper
        all_of_them = lanczos_norm(lambda v, m=m: m @ v, lambda u, m=m: m.T @ u, m[0], n_steps=60, seed=seed)
        assert all_of_them.lower == pytest.approx(truth, rel=1e-10)


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(3, 5), (5, 3)])
def test_pointwise_convolutions_and_patches_have_the_norm_of_their_matrix(shape):
    w = drawn(*shape, 1, 1)
    truth = float(torch.linalg.matrix_norm(w.flatten(1), 2))
    plain = {"stride": (1, 1), "pad": ((0, 0), (0, 0)), "dilation": (1, 1)}
    assert convolution_norm(w, (6, 7), **plain) == pytest.approx(truth, rel=1e-9)
    w = drawn(*shape, 2, 3)  # windows that do not overlap
    bound = convolution_norm(w, (8, 9), stride=(2, 3), pad=((0, 0), (0, 0)), dilation=(1, 1))
    assert bound == pytest.approx(float(torch.linalg.matrix_norm(w.flatten(1), 2)), rel=1e-9)


def test_a_shift_has_norm_one_and_groups_the_largest_of_theirs():
    w = torch.zeros(1, 1, 3, 3, dtype=torch.float64)
    w[0, 0, 2, 0] = 1
    same = {"stride": (1, 1), "pad": ((1, 1), (1, 1)), "dilation": (1, 1)}
    assert convolution_norm(w, (9, 8), **same) == pytest.approx(1, rel=1e-9)
    several = torch.cat([w, -3 * w, 2 * w])
    assert convolution_norm(several, (9, 8), groups=3, **same) == pytest.approx(3, rel=1e-9)
    assert convolution_norm(several, (9, 8), **same) == pytest.approx(14**0.5, rel=1e-9)


@pytest.mark.parametrize("dims", [1, 3])
def test_convolutions_of_one_and_three_dimensions(dims):
    w, size = drawn(3, 2, *[3, 2, 2][:dims]), [7, 5, 4][:dims]
    conv = nn.functional.conv1d if dims == 1 else nn.functional.conv3d
    eye = torch.eye(2 * math.prod(size), dtype=torch.float64).view(-1, 2, *size)
    truth = float(torch.linalg.matrix_norm(conv(eye, w, padding=1).flatten(1), 2))
    bound = convolution_norm(w, size, stride=[1] * dims, pad=[(1, 1)] * dims, dilation=[1] * dims)
    assert truth <= bound <= 1.4 * truth


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("dilation", [1, 2])
def test_a_coarse_grid_costs_its_factor_and_no_more(stride, dilation, monkeypatch):
    w = drawn(2, 2, 1, 5, seed=stride)
    settings = {"stride": (1, stride), "pad": ((0, 0), (2, 3)), "dilation": (1, dilation)}
    fine = convolution_norm(w, (1, 400), **settings)
    monkeypatch.setattr(operator_norm, "WORK", 0)
    coarse = convolution_norm(w, (1, 400), **settings)
    assert fine * (1 - 1e-9) <= coarse <= 1.2 * fine  # at least 8 points per degree: 1 / cos(pi / 8) is 1.08


def test_many_channels_are_sorted_out_by_their_powers():
    w = drawn(20, 18, 3, 1, seed=2)
    truth = float(torch.linalg.matrix_norm(explicit(w, (12, 2), (1, 1), ((1, 1), (0, 0)), (1, 1), 1), 2))
    bound = convolution_norm(w, (12, 2), stride=(1, 1), pad=((1, 1), (0, 0)), dilation=(1, 1))
    assert truth <= bound <= 1.1 * truth


def test_matrices_without_entries_and_with_long_sides(monkeypatch):
    assert matrix_norm(torch.zeros(0, 4)) == 0
    assert matrix_norm(torch.zeros(3, 4)) == 0
    m = drawn(30, 25)
    truth = float(torch.linalg.matrix_norm(m, 2))
    monkeypatch.setattr(operator_norm, "BLOCK", 60)  # the Gram matrix in parts
    assert truth <= matrix_norm(m) <= truth * (1 + 1e-9)
    monkeypatch.setattr(operator_norm, "MOST_SIDE", 24)
    assert truth <= matrix_norm(m) <= truth * (1 + 1e-6)


def test_the_lanczos_bound_is_the_published_one():
    m = torch.diag(torch.linspace(1, 2, 400, dtype=torch.float64))
    few = lanczos_norm(lambda v: m @ v, lambda u: m.T @ u, m[0], n_steps=25)
    e = (math.log(1.648 * math.sqrt(400) / FAILURE) / (2 * 25 - 1)) ** 2
    assert few.n_steps == 25
    assert few.upper == pytest.approx(few.lower / math.sqrt(1 - e) * (1 + 1e-9), rel=1e-13)
    assert few.lower <= 2 <= few.upper
    assert lanczos_norm(lambda v: m @ v, lambda u: m.T @ u, m[0], n_steps=5).upper == math.inf
    low_rank = torch.zeros(50, 50, dtype=torch.float64)
    low_rank[0, 3], low_rank[1, 4] = 5.0, 2.0
    all_of_it = lanczos_norm(lambda v: low_rank @ v, lambda u: low_rank.T @ u, low_rank[0], n_steps=40)
    assert all_of_it.n_steps <= 4
    assert all_of_it.lower == pytest.approx(5, rel=1e-12)
    assert all_of_it.upper == pytest.approx(5, rel=1e-8)


@pytest.mark.parametrize(
    ("n", "kernel", "stride", "pad", "dilation", "torus", "degree"),
    [
        (13, 3, 1, (1, 1), 1, 14, 1),  # the padded map
        (3, 5, 1, (1, 4), 1, 7, 2),  # the last tap of the last output
        (3, 1, 3, (0, 1), 1, 6, 0),  # as many outputs as strides
        (17, 5, 3, (2, 0), 1, 21, 1),  # 19, rounded up to a multiple of the stride
        (9, 3, 2, (2, 2), 2, 12, 1),
        (9, 4, 1, (0, 0), 3, 9, 2),  # dilation turns the circle faster, it adds no degree
    ],
)
def test_nothing_wraps_round_on_the_torus(n, kernel, stride, pad, dilation, torus, degree):
    line = _Line.of(n, kernel, stride, pad, dilation)
    assert (line.torus, line.degree) == (torus, degree)
    exact = torus // stride
    assert line.rise(exact) == 1
    assert line.rise(exact + 7) == pytest.approx(1 / math.cos(math.pi * degree / (exact + 7)))


def test_the_grid_is_the_finest_that_the_work_allows(monkeypatch):
    long, short = _Line.of(1000, 3, 1, (0, 0), 1), _Line.of(20, 11, 1, (0, 0), 1)
    assert _grids([long, short], 1) == [1000, 20]
    for work, grid in ((1000, 1000), (999, 96), (95, 64), (63, 48), (47, 32), (31, 24), (23, 16), (0, 16)):
        monkeypatch.setattr(operator_norm, "WORK", work)
        assert _grids([long], 1) == [grid]
    assert _grids([_Line.of(1000, 11, 1, (0, 0), 1)], 1) == [40]  # eight points per degree
    monkeypatch.setattr(operator_norm, "WORK", 64 * 20 * 5)
    assert _grids([long, short], 5) == [64, 20]


@pytest.mark.parametrize("shape", [(6, 3, 5), (6, 5, 3), (6, 20, 24), (6, 1, 7)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_the_largest_norm_of_a_batch_is_found_from_any_earlier_one(shape, scale):
    """No matrix is passed over whose norm could exceed the largest so far, whatever the units."""
    b = scale * torch.randn(*shape, dtype=torch.complex128, generator=torch.Generator().manual_seed(2))
    b = b * torch.linspace(0.5, 1, 6)[:, None, None]
    truth = float(torch.linalg.matrix_norm(b, 2).max())
    for share in (0.0, 0.5, 0.99):
        assert _largest_norm(b, share * truth) == pytest.approx(truth, rel=1e-9)
    assert _largest_norm(b, 2 * truth) == 2 * truth
