"""The oracles against linear programming, brute force and each other."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.optimize import linprog

from auditor.kernels.frank_wolfe.polytope import Birkhoff, Box, KSparse, Simplex


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("k", [1, 3, 8, 17, 40])
@pytest.mark.parametrize("seed", range(4))
def test_ksparse_reaches_the_linear_programme(k: int, seed: int) -> None:
    g = noise(1, 17, seed=seed)
    lp = linprog(g[0].numpy(), A_ub=[[1.0] * 17], b_ub=[k], bounds=[(0, 1)] * 17)
    v = KSparse(k).vertex(g)
    assert float((g * v).sum()) == pytest.approx(lp.fun, abs=1e-9)
    assert float(KSparse(k).violation(v)) == 0
    assert set(v.unique().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("seed", range(4))
def test_ksparse_is_the_lowest_corner_of_all(k: int, seed: int) -> None:
    g = noise(1, 7, seed=seed)
    corners = torch.tensor(list(itertools.product((0.0, 1.0), repeat=7)), dtype=g.dtype)
    lowest = (corners[corners.sum(1) <= k] @ g[0]).min()
    assert float((g * KSparse(k).vertex(g)).sum()) == pytest.approx(float(lowest), abs=1e-12)  # 7 float64 adds


def test_ksparse_leaves_zero_gradients_alone() -> None:
    g = torch.tensor([[0.0, 0.0, -2.0, 1.0, 0.0]])
    assert KSparse(4).vertex(g).tolist() == [[0, 0, 1, 0, 0]]
    assert KSparse(torch.tensor([4])).vertex(g).tolist() == [[0, 0, 1, 0, 0]]
    assert Box().vertex(g).tolist() == [[0, 0, 1, 0, 0]]


def test_one_rate_per_row_is_the_rows_one_by_one() -> None:
    g, k = noise(5, 3, 7, seed=1), torch.tensor([1, 4, 2, 9, 25])
    together = KSparse(k).vertex(g)
    for row in range(5):
        assert torch.equal(together[row : row + 1], KSparse(int(k[row])).vertex(g[row : row + 1]))
    some = torch.tensor([3, 1])
    assert torch.equal(KSparse(k).vertex(g[some], some), together[some])
    assert together.sum((1, 2)).unique().numel() > 2  # not the same answer five times


@pytest.mark.parametrize("seed", range(6))
def test_birkhoff_is_the_cheapest_permutation(seed: int) -> None:
    g = noise(2, 5, 5, seed=seed) + 1e6 * torch.arange(5.0)  # offsets per column must not cost digits
    v = Birkhoff().vertex(g)
    for b in range(2):
        cheapest = min(sum(float(g[b, i, p[i]]) for i in range(5)) for p in itertools.permutations(range(5)))
        assert float((g[b] * v[b]).sum()) == pytest.approx(cheapest, abs=1e-6)
    assert Birkhoff().violation(v).max() == 0


def test_sorting_by_row_sums_is_not_the_birkhoff_oracle_in_general_but_is_for_rank_one() -> None:
    missed = 0
    for seed in range(50):
        g = noise(1, 6, 6, seed=seed)
        rank = g[0].sum(1).argsort().argsort()  # cheap rows into the first slots
        by_sorting = float(g[0, torch.arange(6), rank].sum())
        missed += by_sorting > float((g * Birkhoff().vertex(g)).sum()) + 1e-9
    assert missed > 40
    rows, columns = noise(6, seed=99), torch.arange(6.0, 0, -1, dtype=torch.float64)
    g = rows[:, None] * columns
    rank = rows.argsort().argsort()
    assert float(g[torch.arange(6), rank].sum()) == pytest.approx(float((g * Birkhoff().vertex(g[None])[0]).sum()))


@pytest.mark.parametrize(("polytope", "sums"), [(Box(), None), (Simplex(), 1.0)])
def test_box_and_simplex_reach_the_linear_programme(polytope: Box | Simplex, sums: float | None) -> None:
    for seed in range(4):
        g = noise(1, 9, seed=seed)
        equality = {} if sums is None else {"A_eq": [[1.0] * 9], "b_eq": [sums]}
        lp = linprog(g[0].numpy(), bounds=[(0, 1)] * 9, **equality)
        v = polytope.vertex(g)
        assert float((g * v).sum()) == pytest.approx(lp.fun, abs=1e-9)
        assert float(polytope.violation(v)) == 0


def test_violation_sees_what_is_outside() -> None:
    assert float(KSparse(2).violation(torch.tensor([[1.0, 1.0, 0.5]]))) == pytest.approx(0.5)
    assert float(Box().violation(torch.tensor([[-0.25, 1.0]]))) == pytest.approx(0.25)
    assert float(Simplex().violation(torch.tensor([[0.5, 0.25]]))) == pytest.approx(0.25)
    assert float(Birkhoff().violation(torch.tensor([[[1.0, 0.5], [0.0, 0.5]]]))) == pytest.approx(0.5)


def test_violation_is_the_largest_of_each_row() -> None:
    s = torch.tensor([[0.5, 1.75], [-0.25, 1.0], [0.25, 0.5]])
    assert Box().violation(s).tolist() == [0.75, 0.25, 0.0]
    assert KSparse(1).violation(s).tolist() == [1.25, 0.25, 0.0]
    assert KSparse(torch.tensor([2, 1, 3])).violation(s).tolist() == [0.75, 0.25, 0.0]
    assert Simplex().violation(s).tolist() == [1.25, 0.25, 0.25]
    columns = torch.tensor([[[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0], [1.0, 0.0]], [[0.5, 0.0], [0.0, 0.25]]])
    assert Birkhoff().violation(columns).tolist() == [0.0, 1.0, 0.75]
    assert Birkhoff().violation(columns.transpose(1, 2)).tolist() == [0.0, 1.0, 0.75]


def test_large_constants_of_the_columns_do_not_change_the_permutation():
    """A cost plus one constant per column ranks the permutations as before; the sums are exact in float64."""
    g = torch.Generator().manual_seed(0)
    constants = 1e15 * torch.rand(40, 1, 7, generator=g, dtype=torch.float64)
    shifted = torch.rand(40, 7, 7, generator=g, dtype=torch.float64) + constants
    costs = shifted - constants
    got, want = (Birkhoff().vertex(grad) for grad in (shifted, costs))
    torch.testing.assert_close((got * costs).sum((1, 2)), (want * costs).sum((1, 2)), rtol=0, atol=0)
