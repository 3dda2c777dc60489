"""The sheet of the paper's figure: order, colours, captions."""

import numpy as np
import pytest
import torch
from PIL import Image

from auditor.attribution.heatmap import overlay
from auditor.explainers.explanation import ClassScore, Concept, Explanation
from auditor.explainers.xnn.paper_sheet import draw, xnn_sheet

GAP, HEAD, SIDE = 12, 26, 60


def test_contact_sheet_sorts_by_contribution_and_colours_by_sign(fitted, subject, images, tmp_path):
    from PIL import Image

    path = xnn_sheet(subject, fitted, images[:3], tmp_path / "sheet.png", side=64)
    with Image.open(path) as sheet:
        assert sheet.size == (12 + 76 * 7, (64 + 26 + 12) * 3 + 12)
        colours = sheet.convert("RGB").getcolors(1 << 24)
    assert (255, 255, 255) in {c for _, c in colours}
    contributions = [c.contribution for e in fitted.explain(subject, images[:3]) for c in e.concepts]
    assert any(r > 150 and b < 90 and g < 90 for _, (r, g, b) in colours) == any(c > 0 for c in contributions)
    if any(c < -0.01 for c in contributions):
        assert any(b > 150 and r < 90 for _, (r, g, b) in colours)


def spot(i):
    heat = torch.zeros(3, 4)
    heat[i % 3, i % 4] = 1.0
    return heat


def explained(contributions, *, label="three", notes=None):
    score = ClassScore(3, label, 0.5, 1.0)
    notes = notes or [""] * len(contributions)
    concepts = tuple(
        Concept(i, f"x-feature {i}", 1.0, c, spot(i), note)
        for i, (c, note) in enumerate(zip(contributions, notes, strict=True))
    )
    return Explanation("xnn", score, score, 1.0, concepts)


def drawn(images, explanations, whole, folder):
    with Image.open(draw(images, explanations, whole, folder / "new" / "sheet.png", SIDE)) as sheet:
        return np.asarray(sheet.convert("RGB"))


def tile(sheet, row, column):
    top, left = GAP + row * (SIDE + HEAD + GAP) + HEAD, GAP + column * (SIDE + GAP)
    return sheet[top : top + SIDE, left : left + SIDE]


def text_above(sheet, row, column, width=SIDE):
    top, left = GAP + row * (SIDE + HEAD + GAP), GAP + column * (SIDE + GAP)
    return sheet[top : top + HEAD, left : left + width].astype(int)


def test_features_stand_from_the_largest_contribution_to_the_smallest(tmp_path):
    images = torch.rand(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    rows = [[0.5, -2.0, 1.5], [-0.1, -0.5, 4.0]]
    sheet = drawn(images, [explained(row) for row in rows], [spot(5), None], tmp_path)
    assert sheet.shape == ((SIDE + HEAD + GAP) * 2 + GAP, GAP + (SIDE + GAP) * 5, 3)
    for i, row in enumerate(rows):
        grey = images[i].mean(0, keepdim=True)
        for column, k in enumerate(sorted(range(3), key=lambda k: -row[k]), start=2):
            expected = np.asarray(overlay(grey, spot(k), positive=row[k] >= 0, side=SIDE))
            np.testing.assert_array_equal(tile(sheet, i, column), expected)
            red, blue = (int((255 - text_above(sheet, i, column)[..., c]).sum()) for c in (0, 2))
            assert (red < blue) == (row[k] >= 0)  # a red number takes away blue, a blue one red
    grey = images.mean(1, keepdim=True)
    np.testing.assert_array_equal(tile(sheet, 0, 1), np.asarray(overlay(grey[0], spot(5), side=SIDE)))
    np.testing.assert_array_equal(tile(sheet, 1, 1), np.asarray(overlay(grey[1], grey[1, 0] * 0, side=SIDE)))  # no map


@pytest.mark.parametrize("note", ["inactive: it is zero on this image", "dead"])
def test_a_feature_that_is_silent_shows_no_heat_and_no_number(note, tmp_path):
    images = torch.rand(1, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    sheet = drawn(images, [explained([1.0, 0.0], notes=["", note])], [None], tmp_path)
    plain = np.asarray(overlay(images[0], images[0, 0] * 0, side=SIDE))
    np.testing.assert_array_equal(tile(sheet, 0, 3), plain)
    assert (tile(sheet, 0, 2) != plain).any()
    above = text_above(sheet, 0, 3)
    assert above.min() < 200
    assert (above.max(-1) == above.min(-1)).all()  # grey


def test_another_note_does_not_hide_a_feature(tmp_path):
    images = torch.rand(1, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    sheet = drawn(images, [explained([1.0], notes=["weak: little of it"])], [None], tmp_path)
    np.testing.assert_array_equal(tile(sheet, 0, 2), np.asarray(overlay(images[0], spot(0), side=SIDE)))


@pytest.mark.parametrize("label", ["wwwwwwwwwwwwwwwwwwwwwwwwww", "W" * 300])
def test_a_long_class_name_ends_where_its_column_ends(label, tmp_path):
    images = torch.zeros(1, 1, 12, 12)
    sheet = drawn(images, [explained([1.0], label=label)], [None], tmp_path)
    between = text_above(sheet, 0, 0, SIDE + GAP)[:, SIDE + 1 :]  # one pixel for the smoothing of letters
    assert between.min() == 255
    assert text_above(sheet, 0, 0).min() < 100
    short = drawn(images, [explained([1.0], label="w")], [None], tmp_path)
    assert (text_above(short, 0, 0) != text_above(sheet, 0, 0)).any()
