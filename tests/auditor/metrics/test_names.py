"""Names of metrics: taken apart, put into words, and which of them can exist."""

import pytest

from auditor.metrics.names import DRIFT, DRIFT_DIRECTION, EXPLAINER, MODEL, WORDS, can_exist, nearest, split, words


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("explainer/concepts/f_cls", ("explainer", "concepts", "f_cls")),
        ("explainer/concepts/randomisation/conv", ("explainer", "concepts", "randomisation/conv")),
        ("model/accuracy", ("model", "", "accuracy")),
        ("model/accuracy/7", ("model", "", "accuracy/7")),
        ("model/layer4.0/cosine_max", ("model", "layer4.0", "cosine_max")),
        ("model/a/b/cosine_max", ("model", "a/b", "cosine_max")),
        ("drift/cka/layer4", ("drift", "", "cka/layer4")),
        ("drift/similarity", ("drift", "", "similarity")),
        ("nonsense", ("nonsense", "", "")),
    ],
)
def test_a_name_is_taken_apart(name, parts):
    assert split(name) == parts


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("model/accuracy", "accuracy"),
        ("model/accuracy/7", "accuracy of class 7"),
        ("explainer/concepts/randomisation", "survives destroyed weights"),
        ("explainer/concepts/randomisation/conv2", "survives shuffling down to conv2"),
        ("drift/cka/layer4", "likeness of layer layer4"),
        ("model/conv/cosine_max", "largest |cos|"),
        ("explainer/e/brand_new_metric", "brand new metric"),
    ],
)
def test_a_metric_has_words(name, title):
    assert words(name)[0] == title


@pytest.mark.parametrize(
    ("name", "exists"),
    [
        ("explainer/concepts/f_cls", True),
        ("explainer/concepts/randomisation/conv", True),
        ("explainer/other/f_cls", False),
        ("explainer/concepts/accuracy", False),
        ("drift/similarity", True),
        ("drift/cka/layer4", True),
        ("drift/accuracy", False),
        ("model/accuracy", True),
        ("model/accuracy/7", True),
        ("model/conv/cosine_max", False),
        ("model/cosine_max", False),
        ("nonsense/accuracy", False),
    ],
)
def test_which_names_an_audit_could_have_measured(name, exists):
    assert can_exist(name, ["concepts"]) is exists


def test_every_name_has_words_and_a_direction():
    assert set(WORDS) >= MODEL | DRIFT | EXPLAINER
    assert set(DRIFT_DIRECTION) == DRIFT
    assert all(title and sentence for title, sentence in WORDS.values())


def test_near_names_are_at_most_three_and_alike():
    names = ["f_cls", "f_reg", "flip_area", "flip_gain", "accuracy", "flip_are"]
    assert nearest("flip_areas", names)[:2] == ["flip_area", "flip_are"]
    assert len(nearest("flip_areas", names)) == 3
    assert nearest("zzz", names) == []


def test_names_of_reliance():
    assert split("model/reliance/jay/score") == ("model", "", "reliance/jay/score")
    assert words("model/reliance/worst/score")[0] == "hangs on one thing, worst class"
    assert words("model/reliance/jay/necessity_3_blur")[0] == "lost when 3% is hidden, class jay"
    assert words("model/reliance/jay/sufficiency_10")[0] == "kept by 10% alone, class jay"
    assert words("model/reliance/jay/transplant_box")[0] == "follows the box, class jay"
    for name in ("found", "worst/score", "a b/transplant_box", "7/sameness"):
        assert can_exist(f"model/reliance/{name}", ())
    for name in ("score", "worst/nosuch", "worst/found", "a/b/score", "worst"):
        assert not can_exist(f"model/reliance/{name}", ())
