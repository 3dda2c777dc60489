"""Metrics of a class: every measure has its interval and its null, a skipped class says why."""

import pytest

from auditor.metrics.names import can_exist, words
from auditor.reliance.class_metrics import metrics_of
from auditor.reliance.measures import ClassReliance, measure
from tests.auditor.reliance.planted import ReadsBlock, images, subject
from tests.auditor.reliance.test_measures import CONFIG, block_heat


@pytest.fixture(scope="module")
def in_place():
    """What is measured of a model that reads the block at its place."""
    return measure(subject(ReadsBlock()), *images(), CONFIG, heat_of=block_heat)


def test_measures_carry_nulls_and_intervals(in_place):
    metrics = metrics_of(in_place.classes[1])
    assert metrics["transplant_region"].value == 1
    assert metrics["transplant_region"].null == 0
    assert metrics["necessity_10_mean"].low == 1
    assert metrics["sameness"].n == in_place.classes[1].n


def test_the_margin_falls_where_the_class_does_and_a_random_share_takes_less(in_place):
    metrics = metrics_of(in_place.classes[1])
    assert metrics["margin_without_10_blur"].value < 0 < metrics["margin_without_10_blur"].null
    assert metrics["necessity_10_scattered"].value < metrics["necessity_10_blur"].value
    for name in metrics:
        full = f"model/reliance/cat/{name}"
        assert can_exist(full, set())
        assert words(full)[1]
    assert "random 10%" in words("model/reliance/cat/necessity_10_scattered")[0]


def test_a_skipped_class_has_its_reason():
    metrics = metrics_of(ClassReliance(1, "cat", 6, skipped="only 6 images that the model gets right"))
    assert metrics["transplant_box"].status == "skipped"
    assert "only 6" in metrics["transplant_box"].reason
