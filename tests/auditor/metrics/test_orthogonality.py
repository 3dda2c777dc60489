import math

import pytest
import torch

from auditor.metrics.orthogonality import correlation, orthogonality, orthogonality_of


def test_orthogonality_known_answer_and_extremes():
    o = orthogonality_of(torch.tensor([[1, 0.5], [0.5, 1]], dtype=torch.float64))
    assert round(o.o1, 6) == 0.166925
    assert abs(o.o2 - 0.287682) < 1e-5  # the floor of 1e-6 on the diagonal
    same = torch.rand(4, 1, 5, 7).expand(4, 3, 5, 7)
    assert abs(orthogonality(same).o1 - (3 - math.sqrt(3))) < 1e-9
    assert 20 < orthogonality(same).o2 < 30  # singular: large, not infinite
    maps = torch.rand(4, 3, 5, 7)
    maps[:, 1] = 0
    assert orthogonality(maps).left_out == 1
    assert orthogonality(torch.zeros(4, 3, 5, 7)) is None
    rows = torch.rand(3, 50, dtype=torch.float64)
    torch.testing.assert_close(correlation(rows), torch.corrcoef(rows))


def test_the_measures_are_those_of_the_explicit_correlation_matrix():
    maps = torch.rand(5, 4, 3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 5 + 1
    rows = torch.stack([torch.cat([maps[i, k].flatten() for i in range(5)]) for k in range(4)])
    P = torch.corrcoef(rows)
    result = orthogonality(maps)
    assert result.o1 == pytest.approx(float(P.square().sum()) ** 0.5 - 2, rel=1e-9)
    assert result.o2 == pytest.approx(-float(torch.logdet(P + 1e-6 * torch.eye(4).double())), rel=1e-9)
    assert (result.n, result.left_out) == (4, 0)
    assert result.o1 > 0 < result.o2


def test_features_that_do_not_overlap_have_nothing_in_common():
    o = orthogonality_of(torch.eye(3, dtype=torch.float64))
    assert o.o1 == pytest.approx(0, abs=1e-12)
    assert o.o2 == pytest.approx(-3e-6, rel=1e-3)  # the floor on the diagonal
    assert (o.n, o.left_out) == (3, 0)


def test_two_varied_maps_are_enough_and_one_is_not():
    maps = torch.rand(3, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    maps[:, 0] = 2.0
    two = orthogonality(maps)
    assert (two.n, two.left_out) == (2, 1)
    maps[:, 1] = 0.0
    assert orthogonality(maps) is None
