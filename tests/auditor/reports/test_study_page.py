"""The page of results: what it says first, and its parts by name."""

import re

import numpy as np
import pytest

from auditor.reports.study_page import boxes, study_page
from auditor.study.results import results_of
from tests.auditor.study.drawn import opened, small_study, take_part
from tests.auditor.study.test_results import skilled


def page_of(tmp_path, skill, people=12):
    study, _ = small_study()
    store = opened(tmp_path, study)
    answer = skilled(np.random.default_rng(0), skill)
    for _ in range(people):
        take_part(store, answer)
    return study_page(results_of(study, store.digest, store.everybody()))


@pytest.mark.parametrize(
    ("skill", "verdict", "said"),
    [
        ({"none": 0.1, "one-heatmap": 0.1, "concepts": 0.95}, "good", "better with concepts than with none"),
        ({"none": 0.95, "one-heatmap": 0.95, "concepts": 0.1}, "bad", "better with none than with concepts"),
        ({"none": 0.5, "one-heatmap": 0.5, "concepts": 0.5}, "warn", "No difference was found between none"),
    ],
)
def test_it_says_first_whether_it_helps(tmp_path, skill, verdict, said):
    """What is worse than no assistant at all is no good result, however significant."""
    page = page_of(tmp_path, skill)
    assert re.search(r"class='verdict (\w+)'", page)[1] == verdict
    assert said in page


def test_regions_have_names_of_their_own(tmp_path):
    labels = re.findall(
        r"role='region' aria-label='([^']+)'",
        page_of(tmp_path, dict.fromkeys(("none", "one-heatmap", "concepts"), 0.5), 5),
    )
    assert len(labels) == len(set(labels)) > 5


def test_a_box_says_its_numbers():
    drawn = boxes({"none": [0.2, 0.4, 0.9], "xnn": []}, [(0, "0"), (1, "1")], "purity", {"chance": 0.5})
    assert "none mean 0.50, median 0.40" in drawn
    assert "n = 0" in drawn
    assert "chance 0.5" in drawn
