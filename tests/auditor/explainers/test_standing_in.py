"""Fits that do not stand in for the model are named with what is wrong; those of the demo are not."""

import math

import pytest

from auditor.errors import WeakFitError
from auditor.explainers.nmf.explainer import NmfExplainer
from auditor.explainers.standing_in import LIMITS, shortcomings

GOOD = {"f_cls": 0.92, "f_cls_positive": 0.9, "f_reg_relative": 0.3, "agreement_model": 0.93}


def test_good_fits_and_fits_without_these_metrics_have_no_shortcomings():
    assert shortcomings(GOOD) == []
    assert shortcomings({"rate": 0.1}) == []
    assert shortcomings({item.metric: item.limit for item in LIMITS}) == []  # at the limit


@pytest.mark.parametrize(
    ("metric", "value", "words"),
    [
        ("f_cls", 0.01, "survives on 1% of held-out images when it stands in (at least 50% wanted)"),
        ("f_cls_positive", 0.08, "survives on 8% of the images of the class itself (at least 50% wanted)"),
        ("f_reg_relative", 20.0, "misses the logit by 20 times the logit's own spread (at most 1 wanted)"),
        ("agreement_model", 0.4, "on 40% of held-out images (at least 50% wanted)"),
        ("f_cls", math.nan, "f_cls could not be measured"),
    ],
)
def test_each_limit_is_said_with_its_value(metric, value, words):
    (phrase,) = shortcomings(GOOD | {metric: value})
    assert words in phrase


def test_the_error_says_what_is_wrong_and_what_to_try():
    explainer = NmfExplainer(rank=3)
    explainer.name, explainer.metrics, explainer.remarks_ = "parts", {"f_cls": 0.01}, []
    sentence = (
        "nmf 'parts' does not stand in for the model and is not attached: .* Try this: more concepts .*attach-anyway"
    )
    with pytest.raises(WeakFitError, match=sentence):
        explainer.check_stands_in()
    explainer.metrics = {"f_cls": 0.8}
    explainer.check_stands_in()
