"""Orders: every place as often, every neighbour as often, and nobody sees an image twice."""

from collections import Counter

import pytest

from auditor.errors import StudyError
from auditor.study.orders import cells, latin_square, order_of, words


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6])
def test_a_square_has_each_condition_as_often_at_each_place_and_after_each_other_one(k):
    rows = latin_square(k)
    assert len(rows) == (k if k % 2 == 0 or k == 1 else 2 * k)
    for place in range(k):
        assert len(set(Counter(row[place] for row in rows).values())) == 1
    after = Counter((row[i], row[i + 1]) for row in rows for i in range(k - 1))
    assert len(after) == k * (k - 1)
    assert len(set(after.values())) <= 1


@pytest.mark.parametrize("by", ["latin", "seed"])
def test_none_is_first_data_sets_alternate_and_no_set_is_seen_twice(by):
    conditions = ("one-heatmap", "none", "xnn")
    for number in range(40):
        batches = order_of(number, conditions, 2, 4, by, seed=3).batches
        assert len(batches) == 6
        assert [b.condition for b in batches[:2]] == [1, 1]
        assert [b.data for b in batches] == [batches[0].data, batches[1].data] * 3
        assert len({(b.data, b.drawn) for b in batches}) == 6


def test_latin_orders_are_balanced_over_each_round():
    conditions = ("none", "a", "b")
    n = len(cells(conditions, 2))
    assert n == 4
    orders = [order_of(i, conditions, 2, 5, "latin", 0) for i in range(n)]
    second = Counter((o.batches[2].condition, o.batches[0].data) for o in orders)
    assert set(second.values()) == {1}
    assert len(second) == 4


def test_every_set_meets_every_condition_over_the_rounds():
    seen = Counter(
        (b.condition, b.drawn) for i in range(20) for b in order_of(i, ("none", "a", "b"), 1, 5, "latin", 0).batches
    )
    assert len(seen) == 15
    assert set(seen.values()) == {4}


def test_orders_by_seed_differ_between_people_and_come_again():
    one = [order_of(i, ("none", "a", "b"), 2, 5, "seed", 7) for i in range(12)]
    assert one == [order_of(i, ("none", "a", "b"), 2, 5, "seed", 7) for i in range(12)]
    assert len({o.batches for o in one}) > 6
    assert one != [order_of(i, ("none", "a", "b"), 2, 5, "seed", 8) for i in range(12)]


def test_too_few_sets_are_refused_and_words_say_which_balance():
    with pytest.raises(StudyError, match="3 conditions need as many sets of images, got 2"):
        order_of(0, ("none", "a", "b"), 1, 2, "latin", 0)
    assert "by the seed" in words(("none", "a"), 1, "seed")
    assert "6 of conditions" in words(("a", "b", "c"), 1, "latin")
