"""A sheet with a row per image: the strongest concepts, red for and blue against."""

from dataclasses import replace

import pytest
import torch
from PIL import Image, ImageDraw

from auditor.attribution.heatmap import BLUE, RED
from auditor.explainers.contact_sheet import contact_sheet
from auditor.explainers.explanation import ClassScore, Concept, Explanation


def explained(*contributions, heat=True, **other):
    heatmap = torch.ones(2, 2) if heat else None
    concepts = tuple(Concept(i, f"part {i}", 0.5, c, heatmap) for i, c in enumerate(contributions))
    score = ClassScore(0, "a very long name of a class", 0.9, 2.0)
    return Explanation("kind", score, score, 2.0, concepts, bias=0.0, residual=0.0, **other)


@pytest.fixture
def written(monkeypatch):
    """Every text that goes on the sheet, with its colour."""
    texts = []
    whole = ImageDraw.ImageDraw.text
    monkeypatch.setattr(
        ImageDraw.ImageDraw,
        "text",
        lambda self, xy, text, fill=None, font=None: (texts.append((text, fill)), whole(self, xy, text, fill, font))[1],
    )
    return texts


def test_the_strongest_concepts_come_first_with_sign_and_colour(tmp_path, written):
    path = contact_sheet(torch.rand(1, 1, 8, 8), [explained(0.5, -2.0, 1.0)], tmp_path / "deep" / "s.png", n_concepts=2)
    numbers = [(t, c) for t, c in written if t[:1] in "+-"]
    assert numbers == [("-2.00", BLUE), ("+1.00", RED)]
    with Image.open(path) as sheet:
        assert sheet.size == (14 + (132 + 14) * 4, 34 + 132 + 40 + 14)
        pixel = sheet.convert("RGB").getpixel((14 + 146 + 66, 34 + 66))
        assert pixel[2] > pixel[0]  # blue heat of the concept that speaks against
        pixel = sheet.convert("RGB").getpixel((14 + 2 * 146 + 66, 34 + 66))
        assert pixel[0] > pixel[2]


def test_what_the_value_is_of_is_written(tmp_path, written):
    contact_sheet(
        torch.rand(2, 3, 8, 8), [explained(1.0), explained(1.0, target_value_of="tree's value")], tmp_path / "s.png"
    )
    totals = [t for t, _ in written if "= 2.00" in t]
    assert totals == ["logit a very … = 2.00", "tree's value a very … = 2.00"]


def test_relevance_without_contribution_shows_the_activation(tmp_path, written):
    contact_sheet(torch.rand(1, 1, 8, 8), [explained(None, heat=False)], tmp_path / "s.png")
    assert "0.5" in [t for t, _ in written]


def test_rows_may_have_different_numbers_of_concepts(tmp_path):
    path = contact_sheet(
        torch.rand(3, 1, 8, 8), [explained(), explained(1.0, 2.0, 3.0), explained(1.0)], tmp_path / "s.png"
    )
    with Image.open(path) as sheet:
        assert sheet.size == (14 + 146 * 5, 34 + 186 * 3)


def test_beside_the_concepts_stand_bias_the_others_residual_and_the_share_explained(tmp_path, written):
    explanation = replace(explained(3.0, -1.0, 0.5), bias=0.25, residual=-0.5, target_value=2.25)
    contact_sheet(torch.rand(1, 1, 8, 8), [explanation], tmp_path / "s.png", n_concepts=2)
    texts = [t for t, _ in written]
    assert {"bias +0.25", "1 more +0.50", "residual -0.50", "shown explain 80%"} <= set(texts)  # 4 of 4.5 + .5


def test_a_concept_that_adds_nothing_is_not_painted(tmp_path, written):
    path = contact_sheet(torch.zeros(1, 1, 8, 8), [explained(1.0, 0.004)], tmp_path / "s.png")
    with Image.open(path) as sheet:
        pixel = sheet.convert("RGB").getpixel((14 + 2 * 146 + 66, 34 + 66))
    assert pixel[0] == pixel[1] == pixel[2]  # grey, as the image itself
    assert ("+0.00", (30, 30, 30)) in written
