"""A measure keeps its number, its interval and its reason, also on a trip through JSON."""

import json
import math

import numpy as np
import pytest

from auditor.metrics.measure import N_BOOTSTRAP, Measure, bootstrap, of_items, of_value, skipped


def test_the_interval_is_that_of_resampled_means():
    values = np.random.default_rng(3).normal(2.0, 1.0, 200)
    low, high = bootstrap(values, seed=5)
    random = np.random.default_rng(5)
    rows = random.integers(0, 200, (N_BOOTSTRAP, 200))
    means = sorted(float(np.mean([values[i] for i in row])) for row in rows)
    assert low == pytest.approx(float(np.quantile(means, 0.025)), rel=1e-12)
    assert high == pytest.approx(float(np.quantile(means, 0.975)), rel=1e-12)
    error = 1.96 * values.std() / math.sqrt(200)
    assert high - low == pytest.approx(2 * error, rel=0.1)  # about twice 1.96 standard errors
    assert bootstrap(values) == bootstrap(values, 0) != (low, high)


def test_one_item_has_no_interval_and_two_have():
    assert bootstrap([1.0]) == (None, None)
    assert bootstrap([1.0, 3.0]) == (1.0, 3.0)
    one = of_items([4.0], "up", null=0.5)
    assert (one.value, one.low, one.high, one.n, one.null, one.direction) == (4.0, None, None, 1, 0.5, "up")
    assert one.status == "passed"
    assert one.per_image == (4.0,)


def test_items_that_are_not_finite_fail_the_measure_and_none_at_all_skip_it():
    bad = of_items([1.0, math.nan, math.inf], "down", null=0.25)
    assert math.isnan(bad.value)
    assert (bad.status, bad.reason, bad.n, bad.null) == ("failed", "2 of 3 values are not finite", 3, 0.25)
    assert bad.per_image[0] == 1.0
    none = of_items([], "up")
    assert (none.status, none.n, none.direction, none.reason) == ("skipped", 0, "up", "no items to measure")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_fails(value):
    measure = of_value(value, "down", n=7, null=1.0)
    assert math.isnan(measure.value)
    assert (measure.status, measure.n, measure.null) == ("failed", 7, 1.0)


def test_a_value_has_one_item_unless_said_otherwise():
    assert of_value(2.5, "none") == Measure(2.5, n=1)
    assert of_value(2.5, "up", n=9, null=0.0) == Measure(2.5, n=9, null=0.0, direction="up")
    assert Measure(1.0).n == 1
    assert skipped("why").direction == "none"
    assert skipped("why").n == 0


def test_json_and_back_is_the_identity_also_for_nan():
    measures = [of_items([1.0, 2.0, 4.0], "up", null=0.1), of_value(3.0, "down"), of_items([1.0, math.nan], "up")]
    for measure in [*measures, skipped("no labels")]:
        text = json.dumps(measure.to_json()).replace("NaN", "null")
        back = Measure.from_json(json.loads(text))
        assert repr(back) == repr(measure)
        assert str(back.per_image) == str(measure.per_image)
    assert "per_image" not in of_value(3.0, "down").to_json()


@pytest.mark.parametrize(
    ("measure", "is_taken"),
    [
        (Measure(0.5), True),
        (Measure(math.nan), False),
        (Measure(0.5, status="failed", reason="why"), False),
        (skipped("why"), False),
    ],
)
def test_only_a_finite_value_that_passed_is_taken(measure, is_taken):
    assert measure.is_taken is is_taken


def test_the_interval_of_items_is_their_bootstrap():
    values = np.random.default_rng(4).normal(size=30)
    for options in ({}, {"seed": 7}):
        measure = of_items(values, "up", **options)
        assert (measure.low, measure.high) == bootstrap(values, **options)
