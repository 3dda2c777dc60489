"""Likeness: equal boxes have sameness 1, random ones about 0; places; statistics that give the class away."""

import math

import pytest
import torch

from auditor.reliance.likeness import (
    SIDE,
    centres,
    colour_statistics,
    context_sameness,
    crops,
    edge_distance,
    feature_sameness,
    leak,
    likenesses,
    place_entropy,
    sameness,
    spectrum_statistics,
)
from auditor.reliance.regions import Boxes


def boxes_at(top, left, height, width):
    n = len(top)
    return Boxes(
        torch.tensor(top), torch.tensor(left), torch.full((n,), height), torch.full((n,), width), torch.ones(n)
    )


def test_equal_boxes_are_alike_and_random_ones_are_not():
    torch.manual_seed(0)
    x = torch.rand(6, 3, 60, 70)
    spot = torch.nn.functional.interpolate(torch.rand(1, 3, 5, 5), (20, 20), mode="bilinear")[0]
    tops, lefts = [0, 3, 30, 9, 38, 11], [0, 40, 7, 48, 20, 11]
    for i, (top, left) in enumerate(zip(tops, lefts, strict=True)):
        x[i, :, top : top + 20, left : left + 20] = spot
    likeness = sameness(x, boxes_at([t + 3 for t in tops], [v + 3 for v in lefts], 14, 14))
    assert float(likeness.min()) > 0.95
    shifted = sameness(x, boxes_at([3, 4, 35, 13, 40, 13], [3, 44, 9, 50, 23, 15], 14, 14))
    assert float(shifted.min()) > 0.7  # a little out of step is still alike
    assert float(sameness(torch.rand(6, 3, 60, 70), boxes_at(tops, lefts, 14, 14)).abs().max()) < 0.5


def test_likeness_is_a_correlation_of_the_drawing_and_blind_to_colour():
    torch.manual_seed(1)
    x = torch.rand(2, 1, 16, 16).expand(2, 3, 16, 16).clone()
    tinted = torch.cat([x[:1], x[:1] * 0.5 + torch.tensor([0.1, 0.3, 0.0])[None, :, None, None]])
    assert float(likenesses(tinted, boxes_at([0, 0], [0, 0], 16, 16))[0, 1]) == pytest.approx(1.0, abs=1e-5)
    assert float(likenesses(tinted, boxes_at([0, 0], [0, 0], 16, 16))[0, 0]) == pytest.approx(1.0, abs=1e-5)


def test_an_image_is_compared_with_the_third_that_is_most_like_it():
    """Three of seven carry a spot: each of these has two others like it, which is the third of the six others."""
    torch.manual_seed(2)
    x = torch.rand(7, 3, 40, 40)
    x[:3, :, 10:30, 10:30] = torch.nn.functional.interpolate(torch.rand(1, 3, 4, 4), (20, 20), mode="bilinear")
    likeness = sameness(x, boxes_at([13] * 7, [13] * 7, 14, 14))
    assert float(likeness[:3].min()) > 0.95
    assert float(likeness[3:].max()) < 0.6


def test_crops_have_a_margin_that_is_mirrored_at_the_frame():
    x = torch.arange(40.0).expand(1, 1, 40, 40).clone()
    (crop,) = crops(x, boxes_at([0], [0], 20, 20))
    assert crop.shape == (1, SIDE, SIDE)
    assert float(crop[0, 0, 0]) > 0.5  # columns 3, 2, 1, 0, 1, ...
    (right,) = crops(x, boxes_at([20], [20], 20, 20))
    assert float(right[0, 0, -1]) < 39
    assert float(right[0, 0, 8]) == pytest.approx(30.5, abs=1.5)


def test_a_part_has_alike_surroundings_and_a_sticker_has_not():
    """Spots of the same look: in the middle of a drawn disc, and anywhere on clutter; discs face both ways."""
    torch.manual_seed(3)
    y, x = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
    images = torch.nn.functional.interpolate(torch.rand(20, 3, 7, 7), (64, 64), mode="bilinear")
    tops, lefts = torch.randint(14, 42, (2, 20)).tolist()
    for i in range(10):
        head = ((y - tops[i] - 4) ** 2 + (x - lefts[i] - 4) ** 2) < 9**2
        images[i] = torch.where(head, torch.rand(3, 1, 1), images[i])
    part = context_sameness(images[:10], boxes_at(tops[:10], lefts[:10], 8, 8))
    other = context_sameness(images[10:], boxes_at(tops[10:], lefts[10:], 8, 8))
    assert float(part.mean()) > float(other.mean()) + 0.15
    assert torch.allclose(
        part, context_sameness(images[:10].flip(3), boxes_at(tops[:10], [56 - v for v in lefts[:10]], 8, 8)), atol=0.1
    )


def test_centres_and_edges_are_shares_of_the_frame():
    at = centres(boxes_at([0, 30], [10, 40], 10, 20), (40, 100))
    assert at.tolist() == [[0.125, 0.20000000298023224], [0.875, 0.5]]
    assert [round(v, 4) for v in edge_distance(at).tolist()] == [0.125, 0.125]


def test_place_entropy_is_one_for_even_places_and_less_for_few():
    grid = torch.tensor([[(i + 0.5) / 4, (j + 0.5) / 4] for i in range(4) for j in range(4)])
    assert place_entropy(grid) == pytest.approx(1.0)
    two = torch.cat([torch.full((8, 2), 0.1), torch.full((8, 2), 0.9)])
    assert place_entropy(two) == pytest.approx(math.log(2) / math.log(16))
    assert place_entropy(torch.ones(5, 2)) == 0


def test_statistics_hold_mean_and_deviation_and_block_steps():
    x = torch.rand(3, 3, 32, 40)
    assert torch.allclose(colour_statistics(x), torch.cat([x.mean((2, 3)), x.std((2, 3))], 1))
    blocky = torch.nn.functional.interpolate(torch.rand(4, 3, 8, 8), scale_factor=8.0)
    smooth = torch.nn.functional.interpolate(torch.rand(4, 3, 8, 8), (64, 64), mode="bicubic")
    assert float(spectrum_statistics(blocky)[:, -2:].min()) > 5
    assert float(spectrum_statistics(smooth)[:, -2:].max()) < 2
    assert bool(torch.isfinite(spectrum_statistics(torch.rand(2, 1, 9, 9))).all())


@pytest.mark.parametrize("seed", range(3))
def test_a_leak_is_near_one_for_a_tint_and_within_its_permutation_band_for_shuffled_classes(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(60, 3, 8, 8, generator=generator)
    is_class = torch.arange(60) % 3 == 0
    x[is_class, 0] += 0.2
    assert leak(colour_statistics(x), is_class) > 0.99
    shuffled = is_class[torch.randperm(60, generator=generator)]
    assert abs(leak(colour_statistics(x), shuffled) - 0.5) < 0.3
    assert leak(colour_statistics(x), torch.zeros(60, dtype=torch.bool)) == 0.5


def test_a_leak_is_cross_fitted():
    """Many statistics of few images fit anything; on images left out they give nothing away."""
    torch.manual_seed(0)
    values = [leak(torch.randn(40, 60), torch.arange(40) % 2 == 0, seed) for seed in range(8)]
    assert abs(sum(values) / len(values) - 0.5) < 0.15


def test_boxes_that_a_layer_sees_alike_are_alike_at_any_scale_of_its_grid():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(12, 5, 10, 15, generator=generator)
    mark = 3 * torch.randn(5, 4, 4, generator=generator)
    top, left = torch.randint(0, 6, (12,), generator=generator), torch.randint(0, 11, (12,), generator=generator)
    for i in range(12):
        features[i, :, top[i] : top[i] + 4, left[i] : left[i] + 4] = mark
    side = torch.full((12,), 16)
    at = Boxes(4 * top, 4 * left, side, side, torch.ones(12))  # the image is four times the grid
    elsewhere = Boxes((4 * top + 20) % 25, (4 * left + 30) % 45, side, side, torch.ones(12))
    assert float(feature_sameness(features, at, (40, 60)).min()) > 0.95
    assert float(feature_sameness(features, elsewhere, (40, 60)).mean()) < 0.6
