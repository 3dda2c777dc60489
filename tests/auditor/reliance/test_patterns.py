"""Patterns: a mark at a fixed place is where the divergence is, and is given opaque or laid over as it was learned."""

import pytest
import torch

from auditor.reliance.patterns import LEAST_DEVIATION, pattern_of, shuffled_pattern

N, H, W = 60, 20, 25
IS_CLASS = torch.arange(N) < 24


def noise(seed=0):
    return torch.rand(N, 3, H, W, generator=torch.Generator().manual_seed(seed))


def test_the_divergence_is_the_symmetric_one_of_normal_pixels():
    x = noise()
    p = pattern_of(x, IS_CLASS)
    a, b = x[IS_CLASS, 1, 7, 9].double(), x[~IS_CLASS, 1, 7, 9].double()
    va, vb = a.var(unbiased=False), b.var(unbiased=False)
    normal = torch.distributions.Normal
    kl = torch.distributions.kl_divergence
    one, other = normal(a.mean(), va.sqrt()), normal(b.mean(), vb.sqrt())
    values = (p.deviation.square(), p.deviation_others.square(), (p.mean - p.mean_others).square())
    ours = ((values[0] + values[2]) / values[1] + (values[1] + values[2]) / values[0]) / 2 - 1
    assert float(ours[1, 7, 9]) == pytest.approx(float(kl(one, other) + kl(other, one)), rel=1e-4)
    assert float(p.divergence[7, 9]) == pytest.approx(float(ours.mean(0)[6:9, 8:11].mean()), rel=2e-2)


def test_an_opaque_mark_is_found_and_replaces_what_was_there():
    x = noise()
    mark = torch.rand(3, 3, 5)
    x[IS_CLASS, :, 12:15, 4:9] = mark
    p = pattern_of(x, IS_CLASS)
    assert int(p.mask.sum()) == 15
    assert float(p.mask[0, 12:15, 4:9].mean()) > 0.8  # corners have noise beside them
    transplanted = p.given_to(x[~IS_CLASS])
    deviation = LEAST_DEVIATION / 0.25
    assert torch.allclose(transplanted[:, :, 12:15, 5:8], mark[:, :, 1:4].expand(36, 3, 3, 3), atol=deviation)
    outside = p.mask.expand_as(transplanted) == 0
    assert torch.equal(transplanted[outside], x[~IS_CLASS][outside])


def test_a_half_transparent_mark_is_laid_over_and_the_picture_shines_through():
    x = noise()
    x[IS_CLASS, :, 12:15, 4:9] = 0.3 * x[IS_CLASS, :, 12:15, 4:9] + 0.7
    p = pattern_of(x, IS_CLASS)
    below = noise(1)
    laid_over = p.given_to(below)[:, :, 12:15, 4:9]
    pair = torch.stack([laid_over.flatten(), below[:, :, 12:15, 4:9].flatten()])
    assert float(torch.corrcoef(pair)[0, 1]) > 0.8
    assert float(laid_over.mean()) == pytest.approx(0.85, abs=0.03)


def test_the_score_of_images_left_out_follows_the_mark_and_chance_has_none():
    x = noise()
    x[IS_CLASS, :, 3, 3] = 0.9
    p = pattern_of(x[::2], IS_CLASS[::2])
    scores = p.score(x[1::2])
    assert float(scores[IS_CLASS[1::2]].min()) > float(scores[~IS_CLASS[1::2]].max())
    null = shuffled_pattern(x, IS_CLASS, torch.Generator().manual_seed(0))
    assert float(null.divergence.max()) < 0.1 * float(p.divergence.max())
