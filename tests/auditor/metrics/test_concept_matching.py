"""Matching of concepts against every permutation."""

import itertools

import pytest
import torch

from auditor.metrics.concept_matching import match_columns


def best_by_hand(A, B):
    """Try every assignment: plainly right, hopelessly slow."""

    def cosine(i, j):
        a, b = A[:, i], B[:, j]
        size = float(a.norm() * b.norm())
        return float(a @ b) / size if size > 0 else 0.0

    m, n = A.shape[1], B.shape[1]
    if m <= n:
        return max(sum(cosine(i, j) for i, j in enumerate(p)) for p in itertools.permutations(range(n), m))
    return max(sum(cosine(i, j) for j, i in enumerate(p)) for p in itertools.permutations(range(m), n))


@pytest.mark.parametrize(("m", "n"), [(4, 4), (3, 5), (5, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_the_sum_of_cosines_is_the_largest_there_is(m, n, seed):
    g = torch.Generator().manual_seed(seed)
    A = torch.randn(6, m, generator=g, dtype=torch.float64) * 7
    B = torch.randn(6, n, generator=g, dtype=torch.float64)
    match = match_columns(A, B)
    assert len(match.left) == len(match.right) == min(m, n)
    assert float(match.cosine.sum()) == pytest.approx(best_by_hand(A, B), rel=1e-12)
    for i, j, c in zip(match.left, match.right, match.cosine, strict=True):
        assert float(c) == pytest.approx(float(torch.cosine_similarity(A[:, i], B[:, j], dim=0)), rel=1e-9)


def test_a_zero_column_is_like_nothing():
    A = torch.eye(3)
    A[:, 1] = 0
    match = match_columns(A, torch.eye(3)[:, [1, 0, 2]])
    assert match.cosine.tolist() == [1.0, 0.0, 1.0]
    assert not match.cosine.isnan().any()
    tiny = match_columns(torch.eye(2).double() * 1e-100, torch.eye(2).double())
    assert tiny.cosine.tolist() == pytest.approx([1.0, 1.0])  # however short, a column has a direction
