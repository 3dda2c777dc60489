"""Pixel flipping and the rate curve on networks whose relevant pixels are known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from auditor.errors import OptionError, ShapeError
from auditor.explainers.rde.rate_curve import RateCurve, descending, kept_up_to, measure, smallest_set
from auditor.perturbation.cells import grid, pixels
from auditor.perturbation.distortion import MonteCarlo, Problems
from auditor.perturbation.pixel_flipping import MaskedImages, compare, flip_curve, pixel_flip, plot_curves
from auditor.perturbation.replacement import Obfuscation

SHAPE = (1, 5, 7)
RELEVANT = [3, 11, 20, 30]


class FourPixels(nn.Module):
    """Two classes; only four pixels matter."""

    def forward(self, x: Tensor) -> Tensor:
        evidence = 4 * (x.flatten(1)[:, RELEVANT] - 0.5).sum(1)
        return torch.stack([evidence, -evidence], 1)


@pytest.fixture
def images() -> Tensor:
    x = 0.1 + 0.1 * torch.rand(6, *SHAPE, generator=torch.Generator().manual_seed(0))
    x.view(6, -1)[:, RELEVANT] = 1.0
    return x


def scores(images: Tensor, informed: bool) -> Tensor:
    out = torch.rand(len(images), 35, generator=torch.Generator().manual_seed(1))
    if informed:
        out[:, RELEVANT] += 1
    return out


def test_first_step_is_free_and_last_step_does_not_know_the_map(images: Tensor) -> None:
    targets = torch.zeros(6, dtype=torch.long)
    good = pixel_flip(FourPixels(), images, targets, scores(images, True), pixels(SHAPE), group=4, draws=16)
    bad = pixel_flip(FourPixels(), images, targets, scores(images, False), pixels(SHAPE), group=4, draws=16)
    assert good.share_kept[0] == 1
    assert good.share_kept[-1] == 0
    assert (good.distortion[:, 0] == 0).all()
    assert (good.accuracy[:, 0] == 1).all()
    torch.testing.assert_close(good.distortion[:, -1], bad.distortion[:, -1])
    assert good.distortion[:, -1].min() > 0
    difference = compare(good, bad)
    assert difference.is_beyond_two_errors
    assert good.distortion[:, :8].max() < 1e-9, "28 irrelevant pixels are gone and nothing happened"


def test_the_best_map_is_better_than_its_reverse_and_ties_are_broken_at_random(images: Tensor) -> None:
    targets = torch.zeros(6, dtype=torch.long)
    best = scores(images, True)
    areas = [
        float(pixel_flip(FourPixels(), images, targets, s, pixels(SHAPE), draws=8).area().mean())
        for s in (best, torch.zeros_like(best), -best)
    ]
    assert areas[0] < areas[1] < areas[2]


def test_flipping_cells_flips_whole_cells(images: Tensor) -> None:
    cells = grid(SHAPE, 2, 3)
    curve = pixel_flip(FourPixels(), images, torch.zeros(6).long(), torch.rand(6, 6), cells, draws=4)
    assert curve.distortion.shape == (6, 7)


def test_curves_are_drawn(images: Tensor, tmp_path: Path) -> None:
    curve = pixel_flip(
        FourPixels(), images, torch.zeros(6).long(), scores(images, True), pixels(SHAPE), group=9, draws=4
    )
    plot_curves({"map": curve}, tmp_path / "flip.png", "four pixels")
    assert (tmp_path / "flip.png").read_bytes()[:4] == b"\x89PNG"


def test_bad_maps_are_refused(images: Tensor) -> None:
    targets = torch.zeros(6, dtype=torch.long)
    with pytest.raises(ShapeError, match=r"\(6, 35\), got \(6, 4\)"):
        pixel_flip(FourPixels(), images, targets, torch.zeros(6, 4), pixels(SHAPE))
    holey = scores(images, True)
    holey[2, 3] = torch.nan
    with pytest.raises(OptionError, match="1 of 6 maps hold NaN"):
        pixel_flip(FourPixels(), images, targets, holey, pixels(SHAPE))
    with pytest.raises(OptionError, match="1 to 35 cells, got 36"):
        pixel_flip(FourPixels(), images, targets, scores(images, True), pixels(SHAPE), group=36)


def test_smallest_set_is_the_four_pixels(images: Tensor) -> None:
    noise = Obfuscation(
        "uniform", torch.zeros(SHAPE), torch.ones(SHAPE), torch.zeros(0, *SHAPE), torch.zeros(0, *SHAPE)
    )
    problems = Problems.of(FourPixels(), images, torch.zeros(6).long(), pixels(SHAPE))
    d = MonteCarlo.drawn(problems, noise, 64, torch.Generator().manual_seed(0))
    order = descending(scores(images, True)[2], torch.Generator().manual_seed(0))
    assert sorted(order[:4].tolist()) == RELEVANT
    curve = measure(d, 2, order, [0, 10, 35])
    assert float(curve.distortion[0]) > 1
    assert curve.distortion[1:].max() < 1e-9
    smallest, tried = smallest_set(d, 2, order, curve, limit=1e-6, keep=1.0, width=2)
    assert smallest is not None
    assert smallest.size == 4
    assert smallest.kept_share == 1.0
    assert set(curve.sizes) < set(tried.sizes)
    each = measure(d, 2, order, list(range(36)))  # the plain truth: every size
    passing = [s for s, v in zip(each.sizes, each.distortion.tolist(), strict=True) if v <= 1e-6]
    assert passing[0] == 4


@pytest.mark.parametrize(
    ("probabilities", "limit"),
    [((0.1, 0.5, 1.0, 1.0), 1.0), ((0.1, 1.0, 1.0, 1.0), 4.0), ((0.0, 1.0, 0.5, 1.0), 0.0), ((1.0,) * 4, 9.0)],
)
def test_the_limit_of_a_curve_is_where_the_decision_is_first_lost(
    probabilities: tuple[float, ...], limit: float
) -> None:
    distortion = torch.tensor([9.0, 4.0, 1.0, 0.0])
    curve = RateCurve((0, 1, 2, 3), distortion, torch.zeros(4), torch.tensor(probabilities), torch.zeros(4))
    assert kept_up_to(curve, 0.95) == limit


def test_no_set_keeps_a_decision_that_was_never_made(images: Tensor) -> None:
    noise = Obfuscation(
        "uniform", torch.zeros(SHAPE), torch.ones(SHAPE), torch.zeros(0, *SHAPE), torch.zeros(0, *SHAPE)
    )
    problems = Problems.of(FourPixels(), images, torch.ones(6).long(), pixels(SHAPE))
    d = MonteCarlo.drawn(problems, noise, 8, torch.Generator().manual_seed(0))
    order = torch.arange(35)
    assert smallest_set(d, 0, order, measure(d, 0, order, [0, 35]), limit=1e9, keep=0.95)[0] is None


def test_equal_masks_of_several_maps_cost_one_pass(images: Tensor) -> None:
    n_run = []

    def network(x: Tensor) -> Tensor:
        n_run.append(len(x))
        return FourPixels()(x)

    masked = MaskedImages(network, pixels(SHAPE), draws=3, seed=5)
    targets = torch.zeros(6, dtype=torch.long)
    first = flip_curve(masked, images, targets, scores(images, True), range(6), group=5)
    assert sum(n_run) == 6 * (1 + 7 * 3)  # the whole image needs no noise
    n_run.clear()
    again = flip_curve(masked, images, targets, scores(images, True), range(6), group=5)
    assert not n_run
    torch.testing.assert_close(again.distortion, first.distortion)
    flip_curve(masked, images, 1 - targets, -scores(images, True), range(6), group=5)
    assert sum(n_run) == 6 * 6 * 3  # both ends are known, of the other class too
    alone = pixel_flip(FourPixels(), images, targets, scores(images, True), pixels(SHAPE), group=5, draws=3, seed=5)
    torch.testing.assert_close(alone.distortion, first.distortion)


def test_noise_and_random_maps_depend_on_the_image_and_not_on_its_company(images: Tensor) -> None:
    masked = MaskedImages(FourPixels(), pixels(SHAPE), draws=2, seed=1)
    targets = torch.zeros(6, dtype=torch.long)
    whole = flip_curve(masked, images, targets, scores(images, False), range(6), group=5)
    other = MaskedImages(FourPixels(), pixels(SHAPE), draws=2, seed=1)
    one = flip_curve(other, images[4:5], targets[:1], scores(images, False)[4:5], [4], group=5)
    torch.testing.assert_close(one.distortion[0], whole.distortion[4])
    assert torch.equal(masked.random_scores(3), other.random_scores(3))
    assert not torch.equal(masked.random_scores(3), masked.random_scores(4))


@pytest.mark.slow  # importing quantus alone takes seconds
@pytest.mark.filterwarnings("ignore")
def test_quantus_flips_to_the_same_curve():
    """Pixel flipping by others' code: the same order of pixels under the same noise, drawn by each for itself."""
    quantus = pytest.importorskip("quantus")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 3)).eval()
    generator, n = torch.Generator().manual_seed(3), 400
    x = torch.rand(1, 1, 4, 5, generator=generator)
    x.view(-1)[[0, 7]] = torch.tensor([0.0, 1.0])  # the noise of both is uniform over [0, 1]
    ascending = torch.rand(1, 20, generator=generator)
    with torch.no_grad():
        before = torch.softmax(net(x), 1)
    target = before.argmax(1)
    ours = flip_curve(MaskedImages(net, pixels((1, 4, 5)), draws=n, seed=0), x, target, ascending, [0]).distortion[
        0, 1:
    ]
    metric = quantus.PixelFlipping(
        features_in_step=1, abs=False, normalise=False, perturb_baseline="uniform", disable_warnings=True
    )
    said = metric(
        model=net, x_batch=x.repeat(n, 1, 1, 1).numpy(), y_batch=target.repeat(n).numpy(), softmax=True, device="cpu",
        a_batch=(0.5 - ascending).reshape(1, 1, 4, 5).repeat(n, 1, 1, 1).numpy(),  # theirs flips the largest first
    )  # fmt: skip
    theirs = (torch.tensor(said) - float(before[0, target])).square()
    error = theirs.std(0) / n**0.5 * 2**0.5  # of the difference of two means of n draws
    assert float(ours.max() / ours.min()) > 50  # the curve is not flat
    assert bool(((theirs.mean(0) - ours).abs() < 4 * error).all())
