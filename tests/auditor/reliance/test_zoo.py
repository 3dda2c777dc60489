"""Two models of the shortcut zoo from training to verdict: a sticker is found, a beak is not."""

import pytest

from auditor.reliance import RelianceConfig, judge, measure
from tests.benchmarks.shortcut_models import Case, make

CONFIG = RelianceConfig(images_per_class=16)


@pytest.mark.slow
def test_a_planted_sticker_is_found_with_its_class_and_place():
    made = make(Case("sticker", "drawn", "small", "sticker", "one", seed=3, size=48, pull=0.9))
    assert made.learned
    worst = judge(measure(made.subject, made.images, made.labels, CONFIG))[0]
    assert (worst.verdict, worst.label) == ("found", 0)
    top, left = (int(worst.boxes.top[0]), int(worst.boxes.left[0]))
    planted = made.boxes[worst.rows[0]]
    assert abs(top - planted[0]) <= 5
    assert abs(left - planted[1]) <= 5


@pytest.mark.slow
def test_a_beak_that_decides_is_not_accused():
    made = make(Case("beak", "drawn", "small", seed=4, size=48, classes=(0, 1)))
    assert made.accuracy > 0.8
    findings = judge(measure(made.subject, made.images, made.labels, CONFIG))
    assert {f.verdict for f in findings} <= {"look", "nothing"}
