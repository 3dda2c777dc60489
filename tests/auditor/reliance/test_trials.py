"""Trials: a mark in a third of the images, beside the hottest spot, is found; choosing among noise is no gain."""

import pytest
import torch
import torch.nn.functional as F

from auditor.reliance.heat import margins
from auditor.reliance.regions import boxes
from auditor.reliance.trials import CHOSEN, second_boxes, tried

N, H, W = 18, 40, 48
MARK, OTHER = (slice(5, 12), slice(30, 37)), (slice(25, 33), slice(4, 14))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def dark(seed):
    return 0.2 * torch.rand(N, 3, H, W, generator=generator(seed))


def heat():
    """Most of it at another place, some at the mark."""
    maps = torch.full((N, H, W), 1e-6)
    maps[:, OTHER[0], OTHER[1]] = 1.0
    maps[:, MARK[0], MARK[1]] = 0.5
    return maps


def sees_a_mark(x):
    score = F.avg_pool2d(x.mean(1, keepdim=True), 5, 1).amax((1, 2, 3)) - 0.5
    return torch.stack([-score, score], 1)


def trial(predict, images):
    maps, receivers = heat(), dark(1)
    before = margins(predict(receivers), torch.ones(N, dtype=torch.long))
    return tried(predict, 1, images, maps, boxes(maps), receivers, before, generator())


def test_the_second_box_is_the_other_hot_place():
    second = second_boxes(heat(), boxes(heat()))
    assert bool(((second.top - 5).abs() <= 2).all())  # boxes have a few shapes only
    assert bool(((second.left - 30).abs() <= 2).all())


def test_a_mark_of_a_third_of_the_images_is_found_beside_the_hottest_spot():
    images = dark(0)
    marked = torch.arange(N) % CHOSEN == 0
    images[marked, :, MARK[0], MARK[1]] = 1.0
    result = trial(sees_a_mark, images)
    assert result.followed.gain == 1
    assert set(result.rows.tolist()) == set(marked.nonzero()[:, 0].tolist())
    assert bool(((result.boxes.left - 30).abs() <= 2).all())
    assert float(result.sameness.mean()) > 0.9
    assert len(result.followed.hits) == N


@pytest.mark.parametrize("seed", range(3))
def test_choosing_is_no_gain_where_the_model_follows_noise(seed):
    weight = torch.randn(3, H, W, generator=generator(seed))

    def hashed(x):
        score = torch.sin((x * weight).sum((1, 2, 3)) * 50)
        return torch.stack([-score, score], 1)

    result = trial(hashed, dark(0))
    assert abs(result.followed.gain) < 4 * (0.5 / N) ** 0.5  # a difference of two shares of a half, over N images
