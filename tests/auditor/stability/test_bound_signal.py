"""The calculus of Lipschitz constants against its formulas and explicit matrices."""

import math

import pytest
import torch

from auditor.stability import bound_signal
from auditor.stability.bound_signal import Signal, added, joined, repeats, times


def matrix(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def largest(m) -> float:
    return float(torch.linalg.matrix_norm(m, 2))


def test_what_does_not_change_has_no_kinks():
    assert times(0.0, math.inf) == times(math.inf, 0.0) == 0
    assert times(2.0, 3.0) == 6
    assert times(2.0, math.inf) == math.inf
    assert Signal((3,), 0.0, 0.0).bent(1.0, math.inf, "relu").second == 0


def test_constants_of_a_signal_carry_the_norm_of_its_matrix():
    m = matrix(5, 3)
    signal = Signal((3,), 2.0, 7.0, matrix=m)
    assert signal.first == pytest.approx(2 * largest(m))
    assert signal.second == pytest.approx(7 * largest(m))
    assert Signal((3,), 2.0, 7.0).norm() == 1
    scaled = Signal((2, 3), 1.0, 0.0, scale=torch.tensor([4.0, 0.5]).view(2, 1))
    assert scaled.norm() == 4
    one_number = Signal((), 1.0, 0.0, matrix=matrix(4))
    assert one_number.norm() == pytest.approx(float(matrix(4).norm()))


def test_a_bend_follows_the_chain_rule():
    signal = Signal((3,), 2.0, 5.0)
    bent = signal.bent(3.0, 0.5, "curve")
    assert (bent.first, bent.second, bent.kink, bent.shape) == (6.0, 0.5 * 4 + 3 * 5, "", (3,))
    kinked = signal.bent(1.0, math.inf, "relu", (7,))
    assert (kinked.second, kinked.kink, kinked.shape) == (math.inf, "relu", (7,))
    assert kinked.bent(1.0, math.inf, "later").kink == "relu"  # the first place is the reason


def test_a_map_is_multiplied_out_or_answers_with_its_own_size():
    base, m = Signal((4,), 1.0, 2.0, matrix=matrix(6, 4)), matrix(4, 3, seed=1)
    exact = base.mapped(lambda t: t @ m, lambda: 99.0, (3,))
    assert exact.first == pytest.approx(largest(matrix(6, 4) @ m))
    assert exact.second == pytest.approx(2 * largest(matrix(6, 4) @ m))
    assert exact.origin is base.origin
    rough = base.mapped(None, lambda: 3.0, (3,))
    assert rough.first == pytest.approx(3 * largest(matrix(6, 4)))
    assert (rough.second, rough.shape) == (pytest.approx(2 * rough.first), (3,))
    assert rough.origin is not base.origin
    assert base.scaled(2.0).shape == (4,)


def test_how_large_a_matrix_may_be(monkeypatch):
    plain, held = Signal((3, 2), 1.0, 0.0), Signal((6,), 1.0, 0.0, matrix=matrix(5, 6))
    assert torch.equal(plain.explicit(4), torch.eye(6).double().view(6, 3, 2))
    assert held.explicit(4) is held.matrix
    scale = torch.tensor([2.0, 3.0, 4.0]).double().view(3, 1)
    scaled = Signal((3, 2), 1.0, 0.0, scale=scale).explicit(4)
    assert torch.equal(scaled, torch.eye(6).double().view(6, 3, 2) * scale)
    monkeypatch.setattr(bound_signal, "MOST_ENTRIES", 36)
    assert plain.explicit(6) is not None  # 6 x 6 entries
    assert plain.explicit(7) is None
    assert held.explicit(7) is not None  # 5 x 7
    assert held.explicit(8) is None
    monkeypatch.setattr(bound_signal, "MOST_ENTRIES", 35)
    assert plain.explicit(5) is None  # 6 x 5 would do, but not the identity itself
    monkeypatch.setattr(bound_signal, "MOST_ENTRIES", 1000)
    monkeypatch.setattr(bound_signal, "MOST_SIDE", 5)
    assert held.explicit(40) is not None  # its shorter side is 5
    assert plain.explicit(6) is None
    assert plain.explicit(5) is not None


def test_branches_of_one_base_are_added_before_the_norm():
    base = Signal((4,), 1.5, 2.0, "kink")
    one = base.mapped(lambda t: t @ matrix(4, 4), lambda: 9.0, (4,))
    total = added([(base, 1.0), (one, -2.0)], (4,))
    want = largest(torch.eye(4).double() - 2 * matrix(4, 4))
    assert total.first == pytest.approx(1.5 * want)
    assert total.second == pytest.approx(2.0 * want)
    assert total.kink == "kink"
    assert total.origin is base.origin


def test_other_branches_add_their_constants():
    a, b = Signal((4,), 2.0, 1.0), Signal((4,), 3.0, 5.0, "here")
    total = added([(a, 1.0), (b, -2.0)], (4,))
    assert (total.first, total.second, total.kink) == (2 + 2 * 3, 1 + 2 * 5, "here")
    wide = added([(Signal((1,), 2.0, 1.0), 3.0), (b, 1.0)], (4,))
    assert wide.first == pytest.approx(3 * 2 * 2 + 3)
    same = Signal((1,), 2.0, 1.0)
    assert added([(same, 1.0), (same, 1.0)], (4,)).first == pytest.approx(8)  # not of the result's shape


def test_joined_branches():
    a, b = Signal((2,), 3.0, 6.0), Signal((2,), 4.0, 8.0, "there")
    apart = joined([a, b], (4,), lambda t: torch.cat(t, 1))
    assert (apart.first, apart.second, apart.kink) == (5.0, 10.0, "there")
    base = Signal((2,), 3.0, 1.0, matrix=matrix(3, 2))
    twice = joined([base, base], (4,), lambda t: torch.cat(t, 1))
    assert twice.first == pytest.approx(3 * largest(torch.cat([matrix(3, 2)] * 2, 1)))
    assert twice.second == pytest.approx(largest(torch.cat([matrix(3, 2)] * 2, 1)))
    other = Signal((2,), 3.0, 1.0, matrix=matrix(3, 2, seed=1), origin=base.origin)
    stacked = joined([base, other], (4,), lambda t: torch.cat(t, 1))  # less than if both were largest at once
    assert stacked.first == pytest.approx(3 * largest(torch.cat([matrix(3, 2), matrix(3, 2, seed=1)], 1)))
    between = joined([base, base], (5,), None)  # a constant stands between
    assert between.first == pytest.approx(3 * largest(matrix(3, 2)) * math.sqrt(2))


def test_broadcasting_repeats_a_signal():
    assert repeats((2, 1), (2, 9)) == 3
    assert repeats((3,), (3,)) == 1
    assert repeats((), (4,)) == 2
    assert repeats((0,), (4,)) == 2
