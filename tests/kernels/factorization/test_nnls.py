"""The active-set method against scipy and the optimality conditions; its parts against numpy."""

import numpy as np
import pytest
from scipy.optimize import nnls

from auditor.kernels.factorization.nnls import (
    _descend,
    _finish,
    _move_towards,
    _solve_passive,
    finish_lanes,
    solve_columns,
)


def unit_problem(channels, rank, columns, seed=0):
    """A basis of unit columns, its Gram matrix and right-hand sides of any sign."""
    rng = np.random.default_rng(seed)
    W = rng.normal(size=(channels, rank))
    W /= np.linalg.norm(W, axis=0)
    X = rng.normal(size=(channels, columns)) + 0.5
    return W, X, W.T @ W, np.ascontiguousarray(W.T @ X)


def scipy_answer(W, X):
    return np.stack([nnls(W, x)[0] for x in X.T], axis=1)


@pytest.mark.parametrize(
    ("channels", "rank", "columns"), [(13, 4, 17), (13, 1, 5), (9, 9, 12), (40, 12, 30), (1, 1, 1)]
)
def test_columns_equal_scipy(channels, rank, columns):
    W, X, G, B = unit_problem(channels, rank, columns, seed=rank)
    scale = np.linspace(0.5, 2, rank)
    S = np.full((rank, columns), -7.0)
    assert solve_columns(G, B, S, scale, 0, columns)
    want = scipy_answer(W, X)
    assert rank == 1 or 0 < (want == 0).mean() < 1
    np.testing.assert_allclose(S, want * scale[:, None], rtol=0, atol=1e-10)


@pytest.mark.parametrize("seed", range(6))
def test_an_ill_conditioned_basis_meets_the_optimality_conditions(seed):
    rng = np.random.default_rng(seed)
    W = rng.random((30, 10)) + 2  # columns almost parallel
    W /= np.linalg.norm(W, axis=0)
    G, B = W.T @ W, W.T @ rng.random((30, 20))
    S = np.empty((10, 20))
    assert solve_columns(G, B, S, np.ones(10), 0, 20)
    slope = G @ S - B
    assert S.min() >= 0
    assert slope.min() > -1e-9
    assert np.abs(slope[S > 0]).max() < 1e-9
    assert (S == 0).any(axis=0).all()


def test_only_the_asked_columns_are_filled_and_single_precision_is_taken():
    W, X, G, B = unit_problem(13, 3, 7)
    S = np.full((3, 7), -7.0, np.float32)
    assert solve_columns(G, B, S, np.ones(3), 2, 5)
    np.testing.assert_allclose(S[:, 2:5], scipy_answer(W, X)[:, 2:5], atol=1e-6)
    assert (S[:, :2] == -7).all()
    assert (S[:, 5:] == -7).all()


def test_copies_in_the_basis_reach_the_same_fit():
    W, X, _, _ = unit_problem(13, 4, 17)
    W[:, 3] = W[:, 1]
    S = np.empty((4, 17))
    assert solve_columns(W.T @ W, np.ascontiguousarray(W.T @ X), S, np.ones(4), 0, 17)
    want = ((X - W @ scipy_answer(W, X)) ** 2).sum(0)
    np.testing.assert_allclose(((X - W @ S) ** 2).sum(0), want, rtol=1e-9)
    assert S.min() >= 0


def test_a_dead_component_and_an_empty_problem_get_zeros():
    W, X, G, B = unit_problem(13, 3, 7)
    G[1], G[:, 1], G[1, 1], B[1] = 0, 0, 1, 0
    S = np.empty((3, 7))
    assert solve_columns(G, B, S, np.ones(3), 0, 7)
    assert (S[1] == 0).all()
    np.testing.assert_allclose(S[[0, 2]], scipy_answer(W[:, [0, 2]], X), atol=1e-10)
    assert solve_columns(G, np.zeros((3, 7)), S, np.ones(3), 0, 7)
    assert (S == 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(bad):
    _, _, G, B = unit_problem(13, 3, 7)
    B[2, 6] = bad
    assert not solve_columns(G, B, np.empty((3, 7)), np.ones(3), 0, 7)
    assert solve_columns(G, B, np.empty((3, 7)), np.ones(3), 0, 6)
    tile = np.zeros((3, 4), np.float32)
    tile[1, 3] = bad
    everyone = np.ones(4, np.bool_)
    assert not finish_lanes(G, tile.ravel(), np.zeros(12, np.float32), everyone, 4)
    assert finish_lanes(G, tile.ravel(), np.zeros(12, np.float32), everyone, 3)


@pytest.mark.parametrize("start", [0.0, 1.0, 50.0])
def test_unsettled_lanes_are_finished_from_any_start_and_others_left(start):
    W, X, G, B = unit_problem(13, 4, 6)
    width = 8  # six lanes of eight are there
    b, s = np.zeros((4, width), np.float32), np.full((4, width), start, np.float32)
    b[:, :6] = B
    unsettled = np.array([True, False, True, True, True, True, True, True])
    assert finish_lanes(G, b.ravel(), s.reshape(-1), unsettled, 6)
    want = scipy_answer(W, X)
    np.testing.assert_allclose(s[:, [0, 2, 3, 4, 5]], want[:, [0, 2, 3, 4, 5]], atol=1e-5)
    assert (s[:, [1, 6, 7]] == start).all()


def finish(G, b, s):
    rank = len(b)
    L, z, idx = np.empty((rank, rank)), np.empty(rank), np.empty(rank, np.int64)
    _finish(G, b, s, L, z, idx, np.empty(rank, np.bool_), np.empty(rank, np.bool_))


@pytest.mark.parametrize("seed", range(40))
def test_the_active_set_walks_back_from_a_wrong_support(seed):
    """Every start ends at the minimiser, whatever part of it is positive."""
    rng = np.random.default_rng(seed)
    rank = int(rng.integers(1, 8))
    W, X, G, B = unit_problem(11, rank, 1, seed=seed)
    s = rng.random(rank) * (rng.random(rank) < 0.6) * 10.0 ** rng.integers(-3, 3)
    finish(G, B[:, 0], s)
    np.testing.assert_allclose(s, scipy_answer(W, X)[:, 0], rtol=0, atol=1e-10)


def test_descent_is_passes_from_zero_with_their_gradient():
    _, _, G, B = unit_problem(9, 5, 1, seed=3)
    G = G * np.outer(d := np.array([1.0, 2.0, 0.5, 1.0, 3.0]), d)  # any diagonal
    want = np.zeros(5)
    for _ in range(4):
        for k in range(5):
            want[k] = max(0.0, want[k] - (G[k] @ want - B[k, 0]) / G[k, k])
    s, g = np.full(5, 9.0), np.full(5, 9.0)
    _descend(G, B[:, 0], s, g)
    np.testing.assert_allclose(s, want, atol=1e-12)
    np.testing.assert_allclose(g, G @ want - B[:, 0], atol=1e-12)


@pytest.mark.parametrize("chosen", [[0], [1, 3], [4, 0, 2], [0, 1, 2, 3, 4]])
def test_the_passive_block_is_solved_as_numpy_does(chosen):
    rng = np.random.default_rng(0)
    A = rng.normal(size=(9, 5))
    G, b = A.T @ A, rng.normal(size=5)
    L, z, idx = np.empty((5, 5)), np.full(5, 9.0), np.zeros(5, np.int64)
    idx[: len(chosen)] = chosen
    assert _solve_passive(G, b, idx, len(chosen), L, z)
    np.testing.assert_allclose(z[: len(chosen)], np.linalg.solve(G[np.ix_(chosen, chosen)], b[chosen]), rtol=1e-10)
    assert (z[len(chosen) :] == 9).all()


def test_a_singular_block_is_refused_and_a_nearly_singular_one_is_not():
    L, z, idx = np.empty((2, 2)), np.empty(2), np.arange(2)
    for gap, is_solved in ((0.0, False), (1e-14, False), (1e-12, True)):
        G = 100 * np.array([[1.0, 1.0], [1.0, 1.0 + gap]])  # what is left of the second diagonal is 100 gap
        assert _solve_passive(G, np.ones(2), idx, 2, L, z) == is_solved


@pytest.mark.parametrize("scale", [1e-14, 1.0, 1e14])
def test_the_scale_of_the_right_hand_side_does_not_matter(scale):
    W, X, G, B = unit_problem(11, 5, 1, seed=2)
    s = np.zeros(5)
    finish(G, scale * B[:, 0], s)
    np.testing.assert_allclose(s / scale, scipy_answer(W, X)[:, 0], rtol=0, atol=1e-10)


@pytest.mark.parametrize(("start", "end"), [((1.0, 2.0, 3.0), (0, 0, 5)), ((3.0, 1.0, 0.5), (5, 0, 0))])
def test_of_copies_the_weakest_leaves_first(start, end):
    """Three copies of one component: the strongest of the start takes all of it."""
    s = np.array(start)
    finish(np.ones((3, 3)), np.full(3, 5.0), s)
    np.testing.assert_allclose(s, end, atol=1e-12)


def test_a_move_ends_at_the_first_entry_that_reaches_zero():
    idx = np.array([4, 0, 2])
    s = np.array([2.0, 9.0, 1.0, 9.0, 3.0])
    assert _move_towards(s, np.array([5.0, -2.0, -3.0]), idx, 3) == 2  # a quarter of the way, a half for the second
    np.testing.assert_allclose(s, [1.0, 9.0, 0.0, 9.0, 3.5])
    assert _move_towards(s, np.array([1.0, 2.0, 3.0]), idx, 3) == -1
    np.testing.assert_allclose(s, [2.0, 9.0, 3.0, 9.0, 1.0])
    assert _move_towards(s, np.array([0.0, 1.0, 7.0]), idx, 2) == 0  # zero itself blocks; the third is not asked
    np.testing.assert_allclose(s, [1.0, 9.0, 3.0, 9.0, 0.0])
    assert _move_towards(s, np.array([0.0, -1.0, 1.0]), idx, 3) == 0  # already there: nobody moves
    np.testing.assert_allclose(s, [1.0, 9.0, 3.0, 9.0, 0.0])
