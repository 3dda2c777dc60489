"""Effects of order and data set: found where planted, and rarely elsewhere."""

import numpy as np
import pytest

from auditor.study.order_effects import data_effect, order_effect
from auditor.study.orders import order_of
from auditor.study.scores import Score

CONDITIONS = ("none", "a", "b")


def people(n, place=0.0, data=0.0, first=0.0, seed=0):
    """Scores of n people; effects of the condition's place, of the data set, of coming first within a stage."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(n):
        skill = rng.normal(0, 0.1)
        for k, batch in enumerate(order_of(number, CONDITIONS, 2, 5, "latin", 0).batches):
            stage = 1 + k // 2
            value = 0.5 + 0.1 * batch.condition + skill + rng.normal(0, 0.05)
            value += place * (stage == 3) + data * batch.data + first * (k % 2 == 0)
            name, source = CONDITIONS[batch.condition], f"d{batch.data}"
            rows.append(
                Score(f"p{number}", name, source, batch.drawn, stage, k + 1, value, None, 0.5, 1.0, 1.0, None, 0)
            )
    return rows


def test_an_effect_of_place_is_found_where_it_is():
    assert order_effect(people(24, place=0.2), by="stage", seed=0).p < 0.01
    effect = order_effect(people(24, place=0.2), by="stage", seed=0)
    assert effect.means["3"] > effect.means["2"] + 0.1
    assert order_effect(people(24, first=0.2), by="batch", seed=0).p < 0.01


def test_an_effect_is_rarely_found_where_there_is_none():
    p = [order_effect(people(12, data=0.3, seed=s), by="stage", seed=s).p for s in range(10)]
    assert sum(x <= 0.05 for x in p) <= 3  # of 10; 4 or more would come once in 900
    p = [order_effect(people(12, place=0.3, seed=s), by="batch", seed=s).p for s in range(10)]
    assert sum(x <= 0.05 for x in p) <= 3


def test_a_harder_data_set_is_found_and_differing_help_is_not_confused_with_it():
    harder, *differing = data_effect(people(20, data=-0.2), seed=0)
    assert harder.name == "d0 against d1"
    assert harder.size == pytest.approx(0.2, abs=0.05)
    assert harder.p < 0.01
    assert all(effect.p > 0.01 for effect in differing)


def test_few_people_are_not_tested_and_the_reason_is_said():
    effect = order_effect(people(4), by="stage", seed=0)
    assert np.isnan(effect.p)
    assert "4 people" in effect.reason
    assert "want 5" in data_effect(people(4), seed=0)[0].reason
    alone = [row for row in people(8) if row.condition == "none"]
    assert "same place" in order_effect(alone, by="stage", seed=0).reason
