"""When sampling stops: never wrongly more often than promised, and soon where the answer is clear."""

import itertools

import pytest
import torch

from auditor.metrics.sequential import ALPHA, even_order, is_settled, looks


def stopped(mean, limit, seed, most=40):
    """Return after how many images the sampling of a normal variable stops, and on which side of the limit."""
    x = mean + torch.randn(most, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    sizes = looks(most)
    for n in sizes:
        if is_settled(x[:n], [limit], len(sizes)):
            return n, bool(x[:n].mean() > limit)
    return most, None


def test_a_mean_at_the_limit_is_settled_no_more_often_than_the_level():
    wrong = sum(stopped(0.0, 0.0, seed)[1] is not None for seed in range(2000))
    assert wrong / 2000 <= ALPHA + 4 * (ALPHA * (1 - ALPHA) / 2000) ** 0.5  # four standard errors


def test_a_clear_mean_stops_at_the_first_look_and_on_the_right_side():
    ends = [stopped(2.5, 0.0, seed) for seed in range(50)]
    assert sum(n == 12 for n, _ in ends) > 45
    assert all(side for _, side in ends)


def test_every_limit_counts_and_constant_values_settle_unless_they_are_the_limit():
    x = torch.full((12,), 0.75)
    assert is_settled(x, [0.6, 0.9], 3)
    assert not is_settled(x, [0.6, 0.75], 3)
    assert not is_settled(torch.cat([x, x.new_tensor([float("nan")])]), [0.9], 3)
    assert not is_settled(x[:1], [0.9], 3)
    assert not is_settled(x[:0], [0.9], 3)
    spread = torch.linspace(0.5, 1.0, 12)
    assert is_settled(spread, [0.2], 3)
    assert not is_settled(spread, [0.2, 0.8], 3)


@pytest.mark.parametrize("most", [1, 5, 12, 13, 15, 22, 26, 39, 100, 1000])
def test_rounds_grow_and_end_with_all(most):
    sizes = looks(most)
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    assert all(b >= 1.3 * a for a, b in itertools.pairwise(sizes))


@pytest.mark.parametrize("n", [1, 7, 60, 101])
def test_every_beginning_of_the_order_is_spread_over_all(n):
    order = even_order(n)
    assert sorted(order) == list(range(n))
    for k in (n // 4, n // 2):
        if k:
            rows = [-1, *sorted(order[:k]), n]
            assert max(b - a for a, b in itertools.pairwise(rows)) <= 3 * n / k
