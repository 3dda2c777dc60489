"""What a participant is sent and what is taken from them."""

import json

import pytest

from auditor.errors import AnswerError
from auditor.study.session import (
    as_sent,
    checked_answer,
    checked_seconds,
    described,
    images_of,
    picture_name,
    pictures_of,
    steps_of,
)
from tests.auditor.study.drawn import right_answer, small_study


def test_steps_are_practice_then_batches_each_with_confidence_then_rating_and_comment():
    study, _ = small_study()
    kinds = [step.kind for step in steps_of(study, 0)]
    assert kinds == ["practice", *["group", "confidence"] * 6, "rating", "comment"]
    asked, _ = small_study(questions=({"key": "age", "text": "Age?"},))
    assert steps_of(asked, 0)[0].kind == "questions"
    alone, _ = small_study(conditions=("none", "concepts"), names=("birds",))
    assert [s.stage for s in steps_of(alone, 0) if s.kind == "group"] == [1, 2]


def test_nothing_that_is_sent_says_what_the_model_predicted_or_what_the_condition_is_called():
    study, _ = small_study(conditions=("none", "one-heatmap", "gull-expert"))
    for number in range(4):
        for index in range(len(steps_of(study, number)) + 1):
            sent = json.dumps(described(study, number, index))
            for secret in ("predicted", 'label"', "gull-expert", ".png", "birds", "models:"):
                assert secret not in sent


def test_pictures_are_those_of_the_step_alone_and_heatmaps_only_where_the_condition_shows_them():
    study, pictures = small_study()
    steps = steps_of(study, 1)
    shown = {i: pictures_of(study, 1, step) for i, step in enumerate(steps)}
    assert all(names <= set(pictures) for names in shown.values())
    first, heat, concepts = shown[1], shown[5], shown[9]
    assert not any(name.startswith("heat/") for name in first)
    assert sum(name.startswith("heat/") for name in heat) in (10, 20)
    assert not heat & concepts
    for index in (5, 9):
        for image in described(study, 1, index)["images"]:
            for sent in filter(None, image["heats"]):
                assert picture_name(study, sent) in shown[index]
    assert picture_name(study, "image/0000") == "image/0000"
    assert picture_name(study, "heat/0000/none/0") not in pictures


def test_images_come_in_an_order_of_the_participants_own():
    study, _ = small_study()
    orders = {tuple(images_of(study, n, steps_of(study, n)[1])) for n in range(0, 40, 20)}
    assert len(orders) == 2
    assert len({frozenset(o) for o in orders}) == 1


@pytest.mark.parametrize(
    ("kind", "answer", "said"),
    [
        ("group", {}, "want a group for every image"),
        ("group", {"groups": {}}, "10 of 10 images are in no group yet"),
        ("group", {"groups": {"nosuch": 1}}, "not of this batch"),
        ("confidence", {"confidence": 7}, "one of the 7 steps"),
        ("confidence", {"confidence": True}, "one of the 7 steps"),
        ("confidence", {"confidence": None}, "one of the 7 steps"),
        ("rating", {"ratings": {}}, "the rating of Assistant A"),
        ("rating", {}, "every assistant"),
        ("comment", {"comment": "x" * 5001}, "at most 5000"),
        ("comment", [], "named parts"),
    ],
)
def test_an_answer_that_does_not_fit_is_one_sentence(kind, answer, said):
    study, _ = small_study()
    step = next(s for s in steps_of(study, 0) if s.kind == kind)
    with pytest.raises(AnswerError, match=said):
        checked_answer(study, 0, step, answer)


def test_groups_have_numbers_within_range_and_drafts_may_be_unfinished():
    study, _ = small_study()
    step = steps_of(study, 0)[1]
    whole = right_answer(study, 0, step)
    assert checked_answer(study, 0, step, whole)["groups"] == whole["groups"]
    key = next(iter(whole["groups"]))
    for odd in (0, 5, "1", True, 1.0):
        with pytest.raises(AnswerError, match="a group from 1 to 4"):
            checked_answer(study, 0, step, {"groups": {**whole["groups"], key: odd}})
    assert checked_answer(study, 0, step, {"groups": {key: 2}}, draft=True)["groups"][key] == 2


def test_questions_are_optional_unless_the_owner_says_so():
    questions = (
        {"key": "cs", "text": "Courses?", "choices": ("0", "1")},
        {"key": "a", "text": "Age?", "required": True},
    )
    study, _ = small_study(questions=questions)
    step = steps_of(study, 0)[0]
    assert checked_answer(study, 0, step, {"questions": {"a": " 30 "}}) == {"questions": {"cs": "", "a": "30"}}
    with pytest.raises(AnswerError, match="please answer"):
        checked_answer(study, 0, step, {"questions": {}})
    with pytest.raises(AnswerError, match="choose one of the answers"):
        checked_answer(study, 0, step, {"questions": {"a": "1", "cs": "9"}})


def test_ratings_go_out_under_the_names_they_came_in_by():
    study, _ = small_study()
    index = next(i for i, s in enumerate(steps_of(study, 0)) if s.kind == "rating")
    step = steps_of(study, 0)[index]
    sent = {"ratings": {a["key"]: 3 for a in described(study, 0, index)["assistants"]}}
    stored = checked_answer(study, 0, step, sent)
    assert set(stored["ratings"]) == {"one-heatmap", "concepts"}
    assert as_sent(study, step, stored) == sent


def test_seconds_are_never_nonsense():
    assert [checked_seconds(x) for x in (1.26, -1, True, None, 1e12)] == [1.3, 0.0, 0.0, 0.0, 0.0]
