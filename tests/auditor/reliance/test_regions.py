"""Regions: hottest pixels, masks that move away, boxes by density, pasting."""

import pytest
import torch

from auditor.reliance.regions import Boxes, boxes, hottest, moved, pasted, random_places, scattered


def test_hottest_takes_the_largest_values_and_at_least_one():
    maps = torch.arange(13 * 17.0).view(1, 13, 17)
    mask = hottest(maps, 0.05)
    assert mask.sum() == round(0.05 * 13 * 17)
    assert float(maps[0][mask[0, 0] > 0].min()) > float(maps[0][mask[0, 0] == 0].max())
    assert hottest(maps, 1e-6).sum() == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_moved_mask_keeps_its_shape_and_leaves_the_region(seed):
    maps = torch.zeros(3, 13, 17)
    maps[:, 2:6, 3:9] = 1
    masks = hottest(maps, 24 / 221)
    away = moved(masks, torch.Generator().manual_seed(seed))
    assert torch.equal(away.sum((1, 2, 3)), masks.sum((1, 2, 3)))
    assert float((away * masks).sum((1, 2, 3)).max()) <= 0.1 * 24


def test_a_mask_that_covers_most_of_the_image_still_moves_as_far_as_it_can():
    masks = torch.ones(1, 1, 6, 7)
    masks[0, 0, 0, :3] = 0
    away = moved(masks, torch.Generator().manual_seed(0))
    assert away.sum() == masks.sum()
    assert float((away * masks).sum()) < float(masks.sum())


def test_scattered_hides_as_much_in_whole_cells():
    masks = hottest(torch.rand(5, 20, 30), 0.1)
    other = scattered(masks, 4, torch.Generator().manual_seed(1))
    assert bool((other.sum((1, 2, 3)) >= 60).all())
    assert bool((other.sum((1, 2, 3)) <= 60 + 16).all())
    assert not torch.equal(other[0], other[1])


@pytest.mark.parametrize(("top", "left", "height", "width"), [(4, 30, 6, 13), (20, 3, 9, 9), (2, 20, 13, 6)])
def test_the_box_is_where_the_heat_is_and_of_its_shape(top, left, height, width):
    maps = torch.full((2, 50, 60), 1e-4)
    maps[:, top : top + height, left : left + width] = 1.0
    result = boxes(maps)
    y, x, h, w = int(result.top[0]), int(result.left[0]), int(result.height[0]), int(result.width[0])
    inter = max(0, min(y + h, top + height) - max(y, top)) * max(0, min(x + w, left + width) - max(x, left))
    assert inter / (h * w + height * width - inter) > 0.5
    assert (w > h) == (width > height) or width == height
    assert 0.5 < float(result.heat[0]) <= 1


def test_random_places_stay_in_the_frame_and_away():
    maps = torch.zeros(30, 24, 32)
    maps[:, 10:15, 10:15] = 1
    at = boxes(maps)
    away = random_places(at, (24, 32), torch.Generator().manual_seed(0), away=True)
    overlap = (at.height - (at.top - away.top).abs()).clamp_min(0) * (at.width - (at.left - away.left).abs()).clamp_min(
        0
    )
    assert float((overlap / (at.height * at.width)).max()) <= 0.1
    assert bool((away.top + away.height <= 24).all())
    assert bool((away.left + away.width <= 32).all())
    assert len(set(away.top.tolist())) > 3


def test_pasting_puts_the_donors_pixels_at_the_place_and_nothing_else():
    receivers, donors = torch.zeros(2, 3, 24, 32), torch.rand(2, 3, 24, 32) + 0.1
    maps = torch.zeros(2, 24, 32)
    maps[:, 3:8, 4:9] = 1
    source = boxes(maps)
    box = source.at(torch.tensor([10, 0]), torch.tensor([20, 1]))
    out = pasted(receivers, donors, source, box)
    h, w = int(source.height[0]), int(source.width[0])
    assert torch.equal(out[0, :, 10 : 10 + h, 20 : 20 + w], source.crop(donors, 0))
    assert int((out[0] > 0).sum()) == 3 * h * w
    assert receivers.sum() == 0


def test_masks_of_boxes_are_one_inside():
    at = Boxes(torch.tensor([2, 0]), torch.tensor([3, 5]), torch.tensor([4, 1]), torch.tensor([2, 3]), torch.ones(2))
    masks = at.masks((8, 9))
    assert masks.shape == (2, 1, 8, 9)
    assert masks.sum((1, 2, 3)).tolist() == [8, 3]
    assert float(masks[0, 0, 2:6, 3:5].min()) == float(masks[1, 0, 0, 5:8].min()) == 1


def test_boxes_are_joined_where_they_touch():
    at = Boxes(torch.tensor([2, 20]), torch.tensor([3, 20]), torch.tensor([4, 4]), torch.tensor([2, 2]), torch.ones(2))
    other = Boxes(torch.tensor([4]), torch.tensor([1]), torch.tensor([5]), torch.tensor([3]), torch.ones(1))
    out = at.joined_with(other)
    assert out.to_json() == [[2, 1, 7, 4, 1], [20, 20, 4, 2, 1]]


def test_boxes_come_back_from_json():
    at = boxes(torch.rand(3, 20, 30))
    again = Boxes.from_json(at.to_json())
    assert again.to_json() == at.to_json()
    assert again.top.dtype == at.top.dtype
    assert len(Boxes.from_json([])) == 0


def test_boxes_grow_by_a_share_of_their_sides_and_not_beyond_the_frame():
    one = torch.tensor
    grown = Boxes(one([0, 4]), one([5, 8]), one([4, 4]), one([8, 4]), torch.ones(2)).grown(0.25, (10, 14))
    assert grown.to_json() == [[0, 3, 5, 11, 1], [3, 7, 6, 6, 1]]
    rows = [grown.rows(one([1])), grown.rows(one([0]))]
    assert Boxes.cat(rows).to_json() == [[3, 7, 6, 6, 1], [0, 3, 5, 11, 1]]
