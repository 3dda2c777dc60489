"""The design: what is refused in a sentence, and that a study comes back from JSON as it was."""

import json

import pytest

from auditor.errors import StudyError
from auditor.study.design import Study, checked_config
from tests.auditor.study.drawn import small_study


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"conditions": ("none",)}, "at least two different"),
        ({"conditions": ("none", "none")}, "at least two different"),
        ({"conditions": ("none", "a/b")}, "'a/b' is neither none, one-heatmap nor the name"),
        ({"per_batch": 3}, "at least one of each of 4 classes, got 3"),
        ({"sets": 1}, "2 conditions need as many"),
        ({"n_classes": 1}, "n_classes"),
        ({"n_classes": 10}, "n_classes"),
        ({"name": "../x"}, "want 1 to 64 letters"),
        ({"colour": "red"}, "colour"),
        ({"questions": ({"key": "a", "text": "x"}, {"key": "a", "text": "y"})}, "same key"),
    ],
)
def test_a_design_that_makes_no_sense_is_one_sentence(options, said):
    with pytest.raises(StudyError, match=said) as error:
        checked_config(**options)
    assert "\n" not in str(error.value)


def test_a_study_comes_back_from_json_and_a_newer_one_is_refused():
    study, _ = small_study()
    document = json.loads(json.dumps(study.to_json()))
    assert Study.from_json(document) == study
    with pytest.raises(StudyError, match="newer version"):
        Study.from_json({**document, "schema_version": 99})
    del document["images"]
    with pytest.raises(StudyError, match="images"):
        Study.from_json(document)


def test_levels_are_of_the_drawn_set():
    study, _ = small_study()
    chance, ceiling = study.levels(0, 0)
    assert chance == pytest.approx(0.5396, abs=1e-4)
    assert ceiling == 1.0
    assert study.models == ["models:/birds/1", "models:/digits/1"]
