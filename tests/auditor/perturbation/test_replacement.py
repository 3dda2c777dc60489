"""Replacement images: statistics that merge, draws with the moments they claim, a blur against the plain sum."""

from __future__ import annotations

import math

import pytest
import torch

from auditor.errors import DataError, OptionError
from auditor.perturbation.replacement import Obfuscation, Statistics

SHAPE = (2, 13, 17)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_statistics_of_shards_merge_to_those_of_the_whole() -> None:
    x = torch.rand(50, *SHAPE, generator=generator(1)) * torch.rand(SHAPE, generator=generator(2))
    parts = [Statistics.of(part, generator(i), rank=60, keep=10) for i, part in enumerate(torch.split(x, 17))]
    merged = parts[0].merge(parts[1]).merge(parts[2])
    assert merged.count == 50
    torch.testing.assert_close(merged.mean, x.double().mean(0))
    torch.testing.assert_close(merged.scatter / 49, x.double().var(0))
    torch.testing.assert_close(merged.low, x.double().amin(0))
    cov = torch.cov(x.double().flatten(1).T)
    factor = merged.factor.flatten(1)
    torch.testing.assert_close(factor.T @ factor / 49, cov, rtol=1e-6, atol=1e-9)  # rank 60 holds all of 49
    assert merged.sample.shape == (10, *SHAPE)
    assert all((row == x).flatten(1).all(1).any() for row in merged.sample)
    small = Statistics.of(x, generator(), rank=5)
    top = torch.linalg.eigvalsh(cov)[-5:]
    torch.testing.assert_close(torch.linalg.eigvalsh(small.factor.flatten(1) @ small.factor.flatten(1).T) / 49, top)


@pytest.mark.parametrize("kind", ["gaussian", "uniform", "blur", "reference"])
def test_draws_have_the_moments_they_claim(kind: str) -> None:
    x = torch.rand(40, *SHAPE, generator=generator(1))
    obfuscation = Obfuscation.fitted(kind, Statistics.of(x, generator(2)), blur_sigma=1.5)  # type: ignore[arg-type]
    n = 400 if kind == "blur" else 4000  # only the width of a blur is random
    draws = obfuscation.draw(x[:2], n, generator(3))
    mean, var, _ = obfuscation.moments(x[:2])
    assert draws.shape[0] == (2 if kind == "blur" else 1)
    if kind == "blur":
        assert (draws.mean(1) - mean).abs().max() < 0.05  # the width varies about the one of the moments
        assert draws.std(1).max() > 0
    else:
        error = (draws.mean(1) - mean).abs() / (var / n).sqrt().clamp_min(1e-6)
        assert error.max() < 5
        torch.testing.assert_close(draws.var(1), var, rtol=0.15, atol=1e-3)
    assert torch.equal(draws, obfuscation.draw(x[:2], n, generator(3)))


def test_global_spread_is_one_number() -> None:
    x = torch.rand(40, *SHAPE, generator=generator(1)) * torch.linspace(0, 1, 17)
    flat = Obfuscation.fitted("gaussian", Statistics.of(x, generator(2)), spread="global")
    assert flat.centre.unique().numel() == flat.spread.unique().numel() == 1
    assert float(flat.centre[0, 0, 0]) == pytest.approx(float(x.mean()), rel=1e-5)


def fitted(kind: str, x: torch.Tensor, rank: int = 0, **options: object) -> Obfuscation:
    return Obfuscation.fitted(kind, Statistics.of(x, generator(2), rank=rank), **options)  # type: ignore[arg-type]


def test_ends_of_shards_merge() -> None:
    x = torch.rand(9, *SHAPE, generator=generator(1))
    merged = Statistics.of(x[:4], generator(), keep=3).merge(Statistics.of(x[4:], generator(1), keep=3))
    assert torch.equal(merged.low, x.double().amin(0))
    assert torch.equal(merged.high, x.double().amax(0))
    assert merged.factor.shape == (0, *SHAPE)  # rank 0 holds no factor
    assert len(merged.keys) == len(merged.sample) == 3


def test_the_sample_of_both_shards_is_that_of_the_smallest_keys() -> None:
    x = torch.arange(20.0).view(20, 1, 1, 1)
    parts = [Statistics.of(x[:12], generator(1), keep=5), Statistics.of(x[12:], generator(2), keep=5)]
    keys = torch.cat([torch.rand(12, generator=generator(1), dtype=torch.float64),
                      torch.rand(8, generator=generator(2), dtype=torch.float64)])  # fmt: skip
    merged = parts[0].merge(parts[1])
    assert merged.sample.flatten().tolist() == keys.argsort()[:5].float().tolist()
    assert torch.equal(merged.keys, keys.sort().values[:5])


def test_no_images_and_one_image() -> None:
    with pytest.raises(DataError, match="the data has no images"):
        Statistics.of(torch.zeros(0, *SHAPE), generator())
    one = torch.rand(1, *SHAPE, generator=generator(1))
    alone = fitted("gaussian", one)
    assert torch.equal(alone.draw(one, 3, generator()), one[None].expand(-1, 3, -1, -1, -1))  # no spread at all
    with pytest.raises(DataError, match="wanted at least 2 images"):
        fitted("reference", one)
    assert len(fitted("reference", one.repeat(2, 1, 1, 1)).reference) == 2


def test_fitted_moments_are_the_plain_ones() -> None:
    x = torch.rand(7, *SHAPE, generator=generator(1))
    independent = fitted("gaussian", x)
    torch.testing.assert_close(independent.centre, x.mean(0))
    torch.testing.assert_close(independent.spread, x.var(0))
    mean, variance, factor = independent.moments(x)
    torch.testing.assert_close(mean[0], x.mean(0))
    torch.testing.assert_close(variance[0], x.var(0))
    assert factor is None
    _, variance, factor = fitted("gaussian", x, rank=8).moments(x)
    assert factor is not None
    torch.testing.assert_close(factor.flatten(1).T @ factor.flatten(1), torch.cov(x.flatten(1).T), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(variance[0], x.var(0))
    uniform = fitted("uniform", x, rank=8)
    assert len(uniform.factor) == 0
    mean, variance, _ = uniform.moments(x)
    torch.testing.assert_close(mean[0], (x.amin(0) + x.amax(0)) / 2)
    torch.testing.assert_close(variance[0], (x.amax(0) - x.amin(0)) ** 2 / 12)
    mean, variance, factor = fitted("reference", x).moments(x)
    torch.testing.assert_close(mean[0], x.mean(0))
    torch.testing.assert_close(variance[0], x.var(0))
    assert factor is not None
    torch.testing.assert_close(factor.flatten(1).T @ factor.flatten(1), torch.cov(x.flatten(1).T), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kind", "rank"), [("gaussian", 0), ("gaussian", 5), ("uniform", 0)])
def test_draws_are_mirrored_about_the_mean(kind: str, rank: int) -> None:
    x = torch.rand(7, *SHAPE, generator=generator(1))
    obfuscation = fitted(kind, x, rank)
    draws = obfuscation.draw(x, 6, generator(4))[0]
    mean = obfuscation.moments(x)[0][0]
    torch.testing.assert_close(draws[:3] - mean, mean - draws[3:], rtol=0, atol=1e-5)  # float32 of numbers about 1
    assert (draws[0] != draws[1]).any()
    odd = obfuscation.draw(x, 5, generator(4))[0]
    assert torch.equal(odd, draws[:5])


def test_uniform_draws_stay_between_the_ends_and_fill_them() -> None:
    x = torch.rand(7, 1, 2, 3, generator=generator(1))
    draws = fitted("uniform", x).draw(x, 1000, generator(3))[0]
    low, high = x.amin(0), x.amax(0)
    assert bool(((draws >= low - 1e-6) & (draws <= high + 1e-6)).all())
    share = (draws - low) / (high - low)
    assert float(share.amin(0).max()) < 0.05
    assert float(share.amax(0).min()) > 0.95


def test_correlated_draws_have_the_covariance_of_the_data() -> None:
    x = torch.rand(3, 1, 2, 3, generator=generator(1))
    draws = fitted("gaussian", x, rank=3).draw(x, 20_000, generator(3))[0].flatten(1)
    cov = torch.cov(x.flatten(1).T)
    spread = (cov.diag()[:, None] * cov.diag() + cov.square()).sqrt() / 10_000**0.5  # half of the draws are mirrored
    assert bool(((torch.cov(draws.T) - cov).abs() <= 4 * spread).all())


@pytest.mark.parametrize("count", [1, 5, 6, 12])
def test_references_are_drawn_round_after_round(count: int) -> None:
    x = torch.arange(5.0).view(5, 1, 1, 1)
    draws = fitted("reference", x).draw(x, count, generator(4))
    assert draws.shape == (1, count, 1, 1, 1)
    times = torch.bincount(draws.flatten().long(), minlength=5)
    assert set(times.tolist()) <= {count // 5, -(-count // 5)}


def slow_blur(image: torch.Tensor, sigma: float) -> torch.Tensor:
    """Weigh every neighbour of every pixel, mirrored at the border."""
    height, width = image.shape

    def weights(n: int) -> dict[int, float]:
        reach = min(math.ceil(3 * sigma), n - 1)
        raw = {t: math.exp(-0.5 * (t / sigma) ** 2) for t in range(-reach, reach + 1)}
        return {t: value / sum(raw.values()) for t, value in raw.items()}

    def mirrored(i: int, n: int) -> int:
        return -i if i < 0 else 2 * (n - 1) - i if i >= n else i

    out = torch.zeros_like(image)
    for i in range(height):
        for j in range(width):
            for di, a in weights(height).items():
                for dj, b in weights(width).items():
                    out[i, j] += a * b * image[mirrored(i + di, height), mirrored(j + dj, width)]
    return out


@pytest.mark.parametrize("sigma", [0.7, 3.0])
def test_blur_is_the_plain_sum_over_neighbours(sigma: float) -> None:
    x = torch.rand(2, 2, 5, 8, generator=generator(1), dtype=torch.float64)
    mean, variance, factor = fitted("blur", x, blur_sigma=sigma).moments(x)
    for image, blurred in zip(x.flatten(0, 1), mean.flatten(0, 1), strict=True):
        torch.testing.assert_close(blurred, slow_blur(image, sigma))
    assert not variance.any()
    assert factor is None


def test_blurred_draws_are_between_half_and_three_halves_of_the_width() -> None:
    dot = torch.zeros(1, 1, 41, 41)
    dot[..., 20, 20] = 1
    widths = 2.0 * (0.5 + torch.rand(6, generator=generator(4)))
    draws = fitted("blur", torch.cat([dot, dot]), blur_sigma=2.0).draw(dot, 6, generator(4))
    assert draws.shape == (1, 6, 1, 41, 41)
    away = (torch.arange(41.0) - 20).square()
    measured = (draws[0, :, 0].sum(1) * away).sum(1).sqrt()
    torch.testing.assert_close(measured, widths, rtol=0.05, atol=0)  # cut off at three deviations
    assert float(measured.max() - measured.min()) > 0.3


@pytest.mark.parametrize("sigma", [0.0, -1.0])
def test_a_blur_needs_a_width(sigma: float) -> None:
    x = torch.rand(2, *SHAPE)
    with pytest.raises(OptionError, match="the width must be positive"):
        fitted("blur", x, blur_sigma=sigma).moments(x)


def test_global_spread_averages_the_variance_too() -> None:
    x = torch.rand(40, *SHAPE, generator=generator(1)) * torch.linspace(0, 1, 17)
    flat = fitted("gaussian", x, spread="global")
    assert flat.centre.shape == flat.spread.shape == SHAPE
    assert float(flat.spread[1, 2, 3]) == pytest.approx(float(x.var(0).mean()), rel=1e-5)
