"""Known answers: a block that is read in place, one that is read anywhere, a mean colour, nothing at all."""

import pytest
import torch

from auditor.errors import DataError
from auditor.reliance.heat import Heat
from auditor.reliance.measures import RelianceConfig, measure, sample_rows, second_look
from tests.auditor.reliance.planted import BLOCK, SIZE, ReadsBlock, ReadsColour, ReadsNothing, images, subject

CONFIG = RelianceConfig(images_per_class=20)


def block_heat(x, targets):
    maps = torch.full((len(x), *SIZE), 1e-6)
    maps[:, BLOCK[0], BLOCK[1]] = 1.0
    return Heat(maps, "known", 0.0)


@pytest.fixture(scope="module")
def in_place():
    """What is measured of a model that reads the block at its place."""
    return measure(subject(ReadsBlock()), *images(), CONFIG, heat_of=block_heat)


def test_a_block_read_in_place_is_necessary_and_followed_only_there(in_place):
    marked = in_place.classes[1]
    hidden = {(s.share, s.fill): s for s in marked.hidden}
    assert float(hidden[0.10, "mean"].still.mean()) == 0
    assert float(hidden[0.10, "mean"].still_moved.mean()) == 1
    assert float(marked.followed["region"].hits.mean()) == 1
    assert float(marked.followed["region"].null.mean()) == 0
    assert float(marked.followed["spot"].hits.mean()) > 0.4  # a box may cut the block's edge
    assert float(marked.followed["box"].hits.mean()) < 0.2  # at another place it is not read
    assert float(marked.sameness.mean()) > 0.9
    assert float(marked.sameness_null.mean()) < 0.6
    assert marked.place_entropy == 0


def test_a_block_read_anywhere_is_followed_at_another_place():
    x, y = images()
    marked = measure(subject(ReadsBlock(anywhere=True)), x, y, CONFIG, heat_of=block_heat).classes[1]
    assert marked.followed["box"].gain > 0.85  # a box may cut the block's edge


def test_a_mean_colour_is_found_by_colour_and_by_no_region():
    x, y = images(marked=False)
    x[y == 1, 0] += 0.1
    x[y == 0, 2] += 0.1
    marked = measure(subject(ReadsColour()), x, y, CONFIG, heat_of=block_heat).classes[1]
    assert marked.followed["colour"].gain > 0.9
    assert marked.followed["box"].gain < 0.1
    assert marked.colour_leak > 0.99
    assert all(float(s.still.mean()) == 1 for s in marked.hidden if s.share <= 0.05)


def test_a_model_that_ignores_its_input_follows_nothing():
    x, _ = images(marked=False)
    result = measure(subject(ReadsNothing()), x, None, CONFIG, heat_of=block_heat)
    assert result.by_prediction
    assert [c.skipped != "" for c in result.classes] == [True, True]
    assert "too few images of other classes" in result.classes[1].skipped
    assert "only 0 images" in result.classes[0].skipped


def test_the_plain_heat_finds_the_block():
    x, y = images()
    result = measure(subject(ReadsBlock()), x, y, CONFIG)
    boxes = result.classes[1].boxes
    middle_y, middle_x = boxes.top + boxes.height / 2, boxes.left + boxes.width / 2
    assert float(((middle_y - 18).abs() < 3).float().mean()) > 0.9
    assert float(((middle_x - 7.5).abs() < 4).float().mean()) > 0.9
    assert result.passes_per_image <= 60


def test_few_images_of_a_class_are_skipped_with_that_reason():
    x, y = images(24)
    y[y == 1] = torch.tensor([1] * 6 + [0] * 6)
    result = measure(subject(ReadsBlock()), x, y, CONFIG, heat_of=block_heat)
    assert "only 6 images that the model gets right; at least 10" in result.classes[1].skipped


def test_a_model_right_on_nothing_is_one_sentence():
    x, y = images()
    with pytest.raises(DataError, match="right on none of the images"):
        measure(subject(ReadsBlock()), x, 1 - y, CONFIG, heat_of=block_heat)


def test_sampling_is_even_over_classes_seeded_and_in_order():
    labels = torch.tensor([0] * 50 + [1] * 7 + [2] * 20)
    rows = sample_rows(labels, 3, 10, 0)
    assert [int((labels[rows] == k).sum()) for k in range(3)] == [10, 7, 10]
    assert rows.tolist() == sorted(rows.tolist())
    assert torch.equal(rows, sample_rows(labels, 3, 10, 0))
    assert not torch.equal(rows, sample_rows(labels, 3, 10, 1))


def test_a_second_look_with_the_same_heat_finds_the_same_and_costs_five_passes(in_place):
    x, _ = images()
    again, cost = second_look(subject(ReadsBlock()), x, in_place, 1, block_heat, CONFIG)
    assert cost == 5 * again.n
    assert again.n == 20
    assert float(again.followed["spot"].hits.mean()) > 0.4
    assert again.followed["frame"] is in_place.classes[1].followed["frame"]  # no heat has a say in that
    assert again.hidden == ()
    assert float(again.sameness.mean()) > 0.9


def test_hidden_are_so_many_images_and_passes_stay_below_sixty_however_few_there_are():
    for n in (20, 22, 26, 30, 44):
        x, y = images(n)
        result = measure(subject(ReadsBlock()), x, y, RelianceConfig(images_per_class=20))
        marked = result.classes[1]
        assert len(marked.hidden[0].still) == max(10, marked.n // 2)
        assert result.passes_per_image <= 60
        assert result.image_passes == result.passes_per_image * len(result.rows)
