"""Coordinate passes and multiplicative updates: fast forms against the formulas, these against hand and scipy."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import nnls

from auditor.kernels.factorization.coordinate_descent import (
    multiply,
    multiply_reference,
    over_blocks,
    sweep,
    sweep_reference,
)


def problem(channels, columns, rank, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    W, X = (torch.randn(channels, n, generator=g, dtype=torch.float64) for n in (rank, columns))
    F = torch.rand(rank, columns, generator=g, dtype=torch.float64)
    return (t.to(dtype) for t in (F, W.T @ X, W.T @ W))


SHAPES = [(13, 17, 4), (13, 17, 1), (5, 1, 3), (1, 9, 1), (7, 9, 9), (6, 1030, 5)]


@pytest.mark.parametrize(("channels", "columns", "rank"), SHAPES)
@pytest.mark.parametrize("n_sweeps", [1, 3])
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-10), (torch.float32, 1e-3)])
def test_fast_sweep_equals_the_formula(channels, columns, rank, n_sweeps, dtype, tol):
    F, B, G = problem(channels, columns, rank, seed=rank, dtype=dtype)
    if rank == 3:
        G[1], G[:, 1], B[1] = 0, 0, 0  # one dead component
    before = F.clone()
    fast, plain = sweep(F, B, G, n_sweeps), sweep_reference(F, B, G, n_sweeps)
    torch.testing.assert_close(fast, plain, rtol=tol, atol=tol)  # the order of a rank-long sum differs
    assert fast.dtype == dtype
    assert torch.equal(F, before)


@pytest.mark.parametrize("rank", [48, 49, 70])
def test_groups_of_rows_keep_the_cyclic_order(rank):
    F, B, G = problem(80, 5, rank)
    torch.testing.assert_close(sweep(F, B, G, 2), sweep_reference(F, B, G, 2), rtol=1e-9, atol=1e-9)


def test_two_passes_by_hand():
    G, B = torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([[3.0], [3.0]])
    F = torch.tensor([[0.0], [5.0]])
    for form in (sweep, sweep_reference):
        assert form(F, B, G).flatten().tolist() == [0.0, 1.5]  # (3 - 5) / 2 is below zero; (3 - 0) / 2
        assert form(F, B, G, 2).flatten().tolist() == [0.75, 1.125]
        assert form(F, B, G, 0).flatten().tolist() == [0.0, 5.0]


def test_many_passes_end_at_the_non_negative_least_squares():
    g = torch.Generator().manual_seed(1)
    W, X = torch.randn(13, 4, generator=g).double(), torch.randn(13, 17, generator=g).double()
    want = np.stack([nnls(W.numpy(), x)[0] for x in X.T.numpy()], axis=1)
    assert (want == 0).any()
    for form in (sweep, sweep_reference):
        np.testing.assert_allclose(form(torch.ones(4, 17).double(), W.T @ X, W.T @ W, 500), want, atol=1e-9)


@pytest.mark.parametrize(("diagonal", "moves"), [(1e-12, False), (1.5e-12, True)])
def test_a_component_is_dead_at_a_share_of_the_largest_diagonal(diagonal, moves):
    G = torch.diag(torch.tensor([3.0, 3 * diagonal], dtype=torch.float64))
    F, B = torch.ones(2, 1).double(), torch.tensor([[6.0], [9 * diagonal]]).double()
    for form in (sweep, sweep_reference):
        torch.testing.assert_close(form(F, B, G), torch.tensor([[2.0], [3.0 if moves else 1.0]]).double())


def test_transposed_inputs_and_another_type_of_gram():
    F, B, G = problem(9, 6, 3)
    want = sweep_reference(F, B, G, 2)
    turned = sweep(F.T.contiguous().T, B.T.contiguous().T, G, 2)
    torch.testing.assert_close(turned, want, rtol=1e-10, atol=1e-10)
    single = sweep(F.float(), B.float(), G, 2)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("n_threads", [1, 2])
def test_blocks_cover_the_columns_in_order(n_threads):
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        edges = over_blocks(lambda lo, hi: (lo, hi), 1030, block=512)
        assert edges == [(0, 512), (512, 1024), (1024, 1030)]
        assert over_blocks(lambda lo, hi: (lo, hi), 1024) == [(0, 512), (512, 1024)]
        assert over_blocks(lambda lo, hi: (lo, hi), 0) == []
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("channels", "columns"), [(13, 17), (5, 1), (3, 5000)])
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("eps", [1e-9, 0.5])
def test_fast_multiplication_equals_the_formula(channels, columns, dtype, tol, eps):
    g = torch.Generator().manual_seed(0)
    W, X, F = (torch.rand(*s, generator=g, dtype=dtype) for s in ((channels, 3), (channels, columns), (3, columns)))
    before = F.clone()
    got, want = multiply(F, W.T @ X, W.T @ W, eps), multiply_reference(F, W.T @ X, W.T @ W, eps)
    torch.testing.assert_close(got, want, rtol=tol, atol=tol)
    assert torch.equal(F, before)


def test_multiplication_by_hand_and_never_uphill():
    F, B, G = torch.tensor([[2.0], [1.0]]), torch.tensor([[4.0], [3.0]]), torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    for form in (multiply, multiply_reference):  # 2 * 4 / (5 + 1) and 1 * 3 / (5 + 1)
        torch.testing.assert_close(form(F, B, G, 1.0), torch.tensor([[8 / 6], [0.5]]))
    g = torch.Generator().manual_seed(2)
    W, X, F = torch.rand(13, 4, generator=g), torch.rand(13, 17, generator=g), torch.rand(4, 17, generator=g)
    errors = []
    for _ in range(20):
        errors.append(float((X - W @ F).norm()))
        F = multiply(F, W.T @ X, W.T @ W)
    assert all(b <= a for a, b in itertools.pairwise(errors))
    assert errors[-1] < 0.9 * errors[0]
