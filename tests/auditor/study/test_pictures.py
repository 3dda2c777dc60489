"""Pictures of a study: what a participant sees is the image, whole pixels enlarged, and shapes nobody has to know."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from auditor.study.pictures import SHAPES, SMALLEST_SIDE, heat_png, image_png, practice_pictures


def pixels(png):
    picture = Image.open(io.BytesIO(png))
    return np.asarray(picture.convert("RGBA") if picture.mode == "P" else picture)


def test_a_small_image_is_enlarged_by_a_whole_factor():
    image = torch.rand(3, 13, 17, generator=torch.Generator().manual_seed(0))
    picture = pixels(image_png(image))
    times = 10  # 17 * 9 = 153 is still below the smallest side
    assert picture.shape == (13 * times, 17 * times, 3)
    assert max(picture.shape) >= SMALLEST_SIDE
    blocks = picture.reshape(13, times, 17, times, 3)
    assert (blocks == blocks[:, :1, :, :1]).all()
    assert np.abs(blocks[:, 0, :, 0] / 255 - image.permute(1, 2, 0).numpy()).max() < 0.005  # eight bits


def test_a_large_image_keeps_its_size():
    assert pixels(image_png(torch.zeros(1, SMALLEST_SIDE, 30))).shape[:2] == (SMALLEST_SIDE, 30)


def test_a_heatmap_is_a_layer_of_the_image_s_proportions_that_covers_where_the_heat_is():
    heat = torch.zeros(4, 6)
    heat[:, :3] = 1.0
    for against, channel in ((False, 0), (True, 2)):
        layer = pixels(heat_png(heat, (40, 60), against))
        assert layer.shape[0] / layer.shape[1] == pytest.approx(40 / 60, abs=0.01)
        left, right = layer[20, 10], layer[20, -5]
        assert left[3] > 100
        assert right[3] == 0
        assert left[channel] == left[:3].max()  # red for, blue against


def test_mass_on_single_pixels_is_smoothed_and_stays_visible():
    heat = torch.zeros(80, 80)
    heat[::5, ::5] = 1 / 256  # shares out mass 1
    alpha = pixels(heat_png(heat, (80, 80), False))[..., 3]
    assert (alpha > 0).mean() > 0.9
    assert alpha.max() > 150


def test_mass_on_a_coarse_grid_is_seen_as_well_as_mass_on_pixels():
    """Heatmaps of heads stop at a layer; beside the smoothed one of the class they were next to invisible."""
    rows, columns = torch.meshgrid(torch.arange(27.0), torch.arange(27.0), indexing="ij")
    coarse = torch.exp(-((rows - 13) ** 2 + (columns - 9) ** 2) / 18)
    coarse[0, 0] = 12.0  # a single hot cell
    coarse = coarse / coarse.sum()
    fine = coarse.repeat_interleave(8, 0).repeat_interleave(8, 1) / 64
    seen = [(pixels(heat_png(heat, (216, 216), False))[..., 3] > 90).mean() for heat in (coarse, fine)]
    assert seen[0] == pytest.approx(seen[1], rel=0.3)
    assert seen[0] > 0.03


def test_shapes_to_practise_on_are_as_many_sorts_as_groups_and_never_change():
    pictures = practice_pictures(3)
    assert len(pictures) == SHAPES
    assert pictures == practice_pictures(3) != practice_pictures(4)
    assert {pixels(png).shape for png in pictures.values()} == {(SMALLEST_SIDE, SMALLEST_SIDE, 3)}
