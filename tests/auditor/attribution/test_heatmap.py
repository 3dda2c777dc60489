"""Pictures of heatmaps: every colour follows from image, heat and alpha by hand."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from auditor.attribution.heatmap import BLUE, RED, is_density, overlay, smoothed, to_rgb, upsample


def slow_upsample(grid, size):
    """Interpolate between the centres of cells, the border cells reaching to the border."""
    out = torch.zeros(size)
    for i in range(size[0]):
        for j in range(size[1]):
            corners = []
            for at, n, m in ((i, grid.shape[0], size[0]), (j, grid.shape[1], size[1])):
                where = max(0.0, (at + 0.5) * n / m - 0.5)
                low = min(math.floor(where), n - 1)
                corners.append((low, min(low + 1, n - 1), where - low))
            (r0, r1, u), (c0, c1, v) = corners
            top = (1 - v) * grid[r0, c0] + v * grid[r0, c1]
            out[i, j] = (1 - u) * top + u * ((1 - v) * grid[r1, c0] + v * grid[r1, c1])
    return out


def test_upsampling_interpolates_between_the_centres_of_cells():
    grid = torch.rand(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(upsample(grid, (13, 17)), slow_upsample(grid, (13, 17)).float())
    assert torch.equal(upsample(grid, (3, 4)), grid.float())


def test_a_density_has_mass_one_on_many_pixels():
    even = torch.full((64, 64), 1 / 64**2)
    assert is_density(even)
    assert is_density(even * 1.009)
    assert is_density(even * 0.991)
    assert not is_density(even * 1.011)
    assert not is_density(even * 0.989)
    assert not is_density(torch.full((63, 65), 1 / (63 * 65)))  # 4095 pixels


def test_smoothing_a_dot_gives_the_bell():
    dot = torch.zeros(60, 100)
    dot[30, 40] = 2.0
    sigma = 0.02 * 100
    soft = smoothed(dot, share=0.02)
    bell = [math.exp(-(t**2) / (2 * sigma**2)) if abs(t) <= 6 else 0.0 for t in range(-60, 101)]
    total = sum(bell)
    for i, j in ((30, 40), (31, 40), (30, 43), (36, 46), (36, 47), (37, 46), (24, 34)):
        expected = 2.0 * bell[60 + i - 30] * bell[60 + j - 40] / total**2
        assert float(soft[i, j]) == pytest.approx(expected, rel=1e-4, abs=1e-9)
    assert soft.shape == dot.shape


def test_a_narrow_bell_reaches_one_pixel_at_least():
    soft = smoothed(torch.eye(3)[:1], share=0.1)  # sigma 0.3 of a pixel: three times it rounds to one
    assert float(soft[0, 0]) > float(soft[0, 1]) > 0
    assert float(soft[0, 2]) == 0


def test_pixels_become_bytes():
    x = torch.tensor([0.0, 1.0, 0.5, -1.0, 2.0, 100.4 / 255, 100.6 / 255]).view(1, 1, 7)
    assert to_rgb(x)[0, :, 0].tolist() == [0, 255, 128, 0, 255, 100, 101]
    colour = torch.rand(3, 2, 5, requires_grad=True)
    rgb = to_rgb(colour)
    assert rgb.shape == (2, 5, 3)
    assert rgb.flags.c_contiguous
    for c in range(3):
        assert (rgb[..., c] == (colour[c].detach() * 255).round().numpy()).all()
    assert (np.ptp(to_rgb(torch.rand(1, 2, 5)), axis=2) == 0).all()
    two = to_rgb(torch.stack([torch.zeros(2, 5), torch.ones(2, 5)]))
    assert (two == 127).all()  # other numbers of channels are shown by their mean


def by_hand(image, heat, peak, colour):
    """Mix colour and dimmed pixel, one by one."""
    _, height, width = image.shape
    out = np.zeros((height, width, 3), np.uint8)
    for i in range(height):
        for j in range(width):
            alpha = 0.75 * min(max(float(heat[i, j]) / peak, 0), 1) if peak > 0 else 0.0
            for c in range(3):
                dimmed = round(float(image[c, i, j]) * 255) * 0.6 + 60
                out[i, j, c] = int(min(dimmed * (1 - alpha) + colour[c] * alpha, 255))
    return out


@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("top", [None, 0.4, 2.0])
def test_colours_follow_from_image_and_heat(positive, top):
    generator = torch.Generator().manual_seed(1)
    image, heat = torch.rand(3, 6, 9, generator=generator), torch.randn(6, 9, generator=generator)
    shown = np.asarray(overlay(image, heat, positive=positive, top=top)).astype(int)
    peak = float(heat.max()) if top is None else top
    expected = by_hand(image, heat.clamp_min(0), peak, RED if positive else BLUE).astype(int)
    assert abs(shown - expected).max() <= 1  # the last byte may round the other way in float32
    assert len(np.unique(shown)) > 50


def test_no_heat_is_the_dimmed_image():
    image = torch.rand(3, 6, 9)
    plain = by_hand(image, torch.zeros(6, 9), 0.0, RED).astype(int)
    for heat in (torch.zeros(2, 3), -torch.ones(2, 3)):
        assert abs(np.asarray(overlay(image, heat)).astype(int) - plain).max() <= 1


def test_the_picture_has_the_side_that_is_asked_for():
    image, heat = torch.rand(3, 6, 9), torch.rand(2, 3)
    assert overlay(image, heat).size == (9, 6)
    assert overlay(image, heat, side=90).size == (90, 60)
    assert overlay(image, heat, side=3).size == (3, 2)
    assert overlay(torch.rand(3, 1, 200), heat, side=20).size == (20, 1)
    for side, rule in ((36, Image.Resampling.BILINEAR), (45, Image.Resampling.NEAREST)):  # pixels stay square beyond 4
        enlarged = np.asarray(Image.fromarray(to_rgb(image)).resize((side, side * 6 // 9), rule))
        shown = np.asarray(overlay(image, torch.zeros(2, 3), side=side))
        assert (shown == (enlarged.astype(np.float32) * 0.6 + 60).astype(np.uint8)).all()


def test_a_density_is_smoothed_and_its_highest_two_percent_are_in_full_colour():
    generator = torch.Generator().manual_seed(2)
    density = torch.rand(80, 100, generator=generator) ** 8
    density = density / density.sum()
    black = torch.zeros(3, 80, 100)
    soft = smoothed(density)
    peak = float(soft.flatten().sort().values[7840 - 1])  # 98 percent of 8000
    assert abs(np.asarray(overlay(black, density)).astype(int) - by_hand(black, soft, peak, RED).astype(int)).max() <= 1
    as_given = by_hand(black, density, 1e-3, RED).astype(int)
    assert abs(np.asarray(overlay(black, density, top=1e-3)).astype(int) - as_given).max() <= 1


def test_a_map_that_speaks_neither_for_nor_against_is_not_painted():
    image = torch.zeros(3, 6, 6)
    bare = np.asarray(overlay(image, torch.zeros(2, 2)))
    assert np.array_equal(np.asarray(overlay(image, torch.ones(2, 2), positive=None)), bare)
    assert np.array_equal(np.asarray(overlay(image, torch.ones(2, 2), positive=None, top=1.0)), bare)
