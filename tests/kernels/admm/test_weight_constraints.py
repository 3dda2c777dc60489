"""Projections: nearest among many feasible matrices, idempotent, feasible; known polar factor."""

import pytest
import torch

from auditor.kernels.admm.weight_constraints import polar_factor, project, violation

SETS = ["orthonormal", "unit_rows", "unit_columns", "support", "nonnegative"]
SHAPES = [(3, 5), (5, 3), (4, 4)]


def matrix(shape, seed):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mask_of(shape):
    return (torch.arange(shape[0] * shape[1]) % 3 > 0).view(shape)


def test_polar_known_answer():
    Q = project(torch.tensor([[3.0, 0.0], [1.0, 2.0]], dtype=torch.float64), "orthonormal")
    expected = torch.tensor([[0.980581, -0.196116], [0.196116, 0.980581]], dtype=torch.float64)
    torch.testing.assert_close(Q, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", SETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_projection_is_feasible_and_nearest(kind, shape):
    W, mask = matrix(shape, 0) * 2, mask_of(shape)
    P = project(W, kind, mask)
    assert violation(P, kind, mask) < 1e-12
    assert violation(W, kind, mask) > 0.1  # the test would not notice otherwise
    torch.testing.assert_close(project(P, kind, mask), P, rtol=0, atol=1e-12)
    distance = (W - P).norm()
    for seed in range(1, 200):  # no feasible matrix is nearer, close by or far away
        for other in (matrix(shape, seed), P + 0.1 * matrix(shape, seed)):
            assert (W - project(other, kind, mask)).norm() >= distance - 1e-12


def test_float32_stays_feasible_to_1e_6():
    W = matrix((128, 784), 0).float()
    assert violation(polar_factor(W), "orthonormal") < 1e-6


def test_zero_rows_get_a_unit_vector():
    assert violation(project(torch.zeros(3, 4), "unit_rows"), "unit_rows") < 1e-6


def test_no_constraint_changes_nothing():
    W = matrix((3, 5), 0)
    assert project(W, "none") is W
    assert violation(W, "none") == 0


def test_violations_by_hand():
    square = torch.tensor([[2.0, 1.0], [0.0, 0.0]])
    assert violation(square, "orthonormal") == 4  # W W' = diag(5, 0)
    assert violation(square.T, "orthonormal") == 3  # W W' = [[4, 2], [2, 1]]
    assert violation(torch.tensor([[0.5, 0.0, 0.0]]), "orthonormal") == 0.75  # too short counts as too long does
    assert violation(torch.tensor([[0.5], [0.0], [0.0]]), "orthonormal") == 0.75
    assert violation(torch.tensor([[0.6, 0.8], [0.25, 0.0]]), "unit_rows") == 0.75
    assert violation(torch.tensor([[0.6, 0.25], [0.8, 0.0]]), "unit_columns") == 0.75
    assert violation(torch.tensor([[-3.0, 1.0], [2.0, -5.0]]), "nonnegative") == 5
    assert violation(torch.tensor([[3.0, 1.0]]), "nonnegative") == 0
    mask = torch.tensor([[1, 0], [0, 1]])
    assert violation(torch.tensor([[9.0, -3.0], [2.0, 9.0]]), "support", mask) == 3


def test_projections_by_hand():
    small = torch.tensor([[0.003, 0.004], [0.0, 0.0]])
    torch.testing.assert_close(project(small, "unit_rows"), torch.tensor([[0.6, 0.8], [0.5**0.5, 0.5**0.5]]))
    torch.testing.assert_close(project(small.T, "unit_columns"), project(small, "unit_rows").T)
    W = torch.tensor([[-0.5, 0.25], [3.0, -2.0]])
    assert project(W, "nonnegative").tolist() == [[0.0, 0.25], [3.0, 0.0]]
    assert project(W, "support", torch.tensor([[1, 0], [0, 1]])).tolist() == [[-0.5, 0.0], [0.0, -2.0]]
    tall = torch.tensor([[3.0, 0.0], [0.0, 0.0], [0.0, -4.0]])
    torch.testing.assert_close(polar_factor(tall), torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, -1.0]]))
