"""Annotated heat: shares of heat and area by class, and a sentence that says where the spots lie."""

import pytest
import torch

from auditor.auditing.annotated_heat import HeatOnParts
from auditor.reliance import Boxes, Finding, Reliance
from auditor.reliance.measures import ClassReliance

SIZE = (10, 20)
IDS = ["cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png"]
ROWS = torch.tensor([0, 1, 3])  # of the third image the model is wrong


@pytest.fixture
def measured():
    heat = torch.zeros(3, *SIZE)
    heat[:, :2, :2] = 1.0  # in the corner
    heat[1, 5, 10] = 4.0  # in the second image half of it on the object
    classes = (ClassReliance(0, "cat", 2, rows=(0, 1)), ClassReliance(1, "dog", 1, rows=(3,)))
    return Reliance(classes, "known", 1.0, False, heat=heat, rows=ROWS)


@pytest.fixture
def on_parts(measured):
    middle = torch.zeros(SIZE)
    middle[3:8, 5:15] = 1.0
    return HeatOnParts.of(measured, IDS, {"bird": {"cat/1.png": middle, "cat/2.png": middle}})


def test_heat_of_a_class_lies_beside_the_area_of_the_part(on_parts, measured):
    bird = on_parts.metrics(measured.classes[0])["heat_on_bird"]
    assert bird.value == pytest.approx(0.25)  # 0 and a half
    assert (bird.null, bird.n) == (pytest.approx(0.25), 2)  # 50 of 200 pixels
    assert on_parts.metrics(measured.classes[0])["heat_on_background"].value == pytest.approx(0.75)
    assert on_parts.words == "2 of 3 images have annotations (bird)"


def test_a_class_without_annotations_is_skipped_with_that_reason(on_parts, measured):
    dog = on_parts.metrics(measured.classes[1])["heat_on_bird"]
    assert (dog.status, dog.reason) == ("skipped", "none of the images of this class has annotations")


def boxes(top, left):
    one = torch.ones(2, dtype=torch.long)
    return Boxes(top * one, left * one, 2 * one, 4 * one, torch.ones(2))


@pytest.mark.parametrize(
    ("at", "words"),
    [
        ((0, 0), "lie outside what is annotated (bird): 0% of their area"),
        ((4, 6), "lie on what is annotated (bird): 100% of their area"),
        ((4, 13), "lie partly on what is annotated (bird): 50% of their area"),
    ],
)
def test_the_sentence_says_where_the_spots_lie(on_parts, at, words):
    assert words in on_parts.sentence(Finding(0, "cat", "found", 0.9, "box", rows=(0, 1), boxes=boxes(*at)))


def test_without_spots_the_sentence_is_about_the_heat(on_parts):
    assert on_parts.sentence(Finding(0, "cat", "found", 0.9, "frame", rows=(0, 1))) == (
        "Of the heat 25% lies on bird, which covers 25%."
    )
    assert on_parts.sentence(Finding(1, "dog", "found", 0.9, "frame", rows=(3,))) == ""
