"""Distortion: closed forms and sampling."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from auditor.errors import NumericsError, ShapeError
from auditor.perturbation.cells import Partition, components, grid, pixels, superpixels
from auditor.perturbation.distortion import AssumedDensity, MonteCarlo, Problems
from auditor.perturbation.gaussian_moments import ClosedFormError
from auditor.perturbation.replacement import Obfuscation

SHAPE = (2, 13, 17)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def small_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(5 * 5 * 7, 3)
    ).requires_grad_(False)


def gaussian(mean: Tensor, var: Tensor, factor: Tensor | None = None) -> Obfuscation:
    factor = torch.zeros(0, *mean.shape) if factor is None else factor
    return Obfuscation("gaussian", mean, var, factor, torch.zeros(0, *mean.shape))


def problems(partition: Partition, batch: int = 2) -> Problems:
    images = torch.rand(batch, *SHAPE, generator=generator(3))
    return Problems.of(small_net(), images, torch.arange(batch) % 3, partition)


PARTITIONS = {
    "component": lambda: components(SHAPE),
    "pixel": lambda: pixels(SHAPE),
    "grid": lambda: grid(SHAPE, 4, 5),
    "superpixel": lambda: superpixels(torch.rand(2, *SHAPE, generator=generator(5)), 20),
}


@pytest.mark.parametrize("kind", list(PARTITIONS))
@pytest.mark.parametrize("surrogate", ["monte-carlo", "diagonal", "low rank"])
def test_gradients_are_the_slope_of_the_value(kind: str, surrogate: str) -> None:
    p = problems(PARTITIONS[kind]())
    p = Problems(
        lambda x: small_net().double()(x), p.images.double(), p.targets, p.partition, p.image_of, p.target_values
    )
    noise = gaussian(torch.full(SHAPE, 0.4).double(), torch.full(SHAPE, 0.05).double())
    d = (
        MonteCarlo(p, noise.draw(p.images, 6, generator()).double(), chunk=5)
        if surrogate == "monte-carlo"
        else AssumedDensity.of(p, noise, low_rank=surrogate == "low rank", chunk=700)
    )
    rows = torch.tensor([1, 0, 1])
    s = 0.2 + 0.6 * torch.rand(3, p.partition.size, generator=generator(1)).double()
    value, g = d.gradient(s, rows)
    torch.testing.assert_close(value, d.value(s, rows), rtol=1e-9, atol=1e-12)
    direction = torch.randn(s.shape, generator=generator(4)).double()
    h = 1e-5
    slope = (d.value(s + h * direction, rows) - d.value(s - h * direction, rows)) / (2 * h)
    torch.testing.assert_close((g * direction).sum(1), slope, rtol=2e-3, atol=1e-6)  # kinks of the sampled ReLU
    assert g.abs().max() > 0


def test_keeping_everything_costs_nothing_and_one_batch_equals_rows_one_by_one() -> None:
    p = problems(grid(SHAPE, 3, 4))
    d = MonteCarlo.drawn(p, gaussian(torch.zeros(SHAPE), torch.ones(SHAPE)), 9, generator(), chunk=20)
    one = torch.ones(2, 12)
    assert d.value(one, torch.arange(2)).max() < 1e-10
    s = torch.rand(3, 12, generator=generator(1))
    rows = torch.tensor([0, 1, 1])
    value, grad = d.gradient(s, rows)
    for i in range(3):
        v, g = MonteCarlo(p, d.noise, chunk=2).gradient(s[i : i + 1], rows[i : i + 1])
        torch.testing.assert_close(v, value[i : i + 1])
        torch.testing.assert_close(g, grad[i : i + 1])
    assert value.unique().numel() == 3


def test_both_surrogates_are_exact_for_a_linear_network() -> None:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(2 * 13 * 17, 3))
    images = torch.rand(2, *SHAPE, generator=generator(3))
    p = Problems.of(net, images, torch.tensor([0, 2]), pixels(SHAPE))
    noise = gaussian(torch.rand(SHAPE, generator=generator(4)), torch.rand(SHAPE, generator=generator(5)))
    s, rows = torch.rand(2, 13 * 17, generator=generator(6)), torch.arange(2)
    draws = 100_000
    mc = MonteCarlo.drawn(p, noise, draws, generator(7), chunk=5000)
    with torch.no_grad():
        at_target = mc.logits(s, rows).gather(2, p.targets[:, None, None].expand(-1, draws, 1)).squeeze(2)
        squares = 0.5 * (at_target - p.target_values[:, None]).square()
        error = 3 * squares.std(1) / draws**0.5
        for low_rank in (False, True):
            exact = AssumedDensity.of(p, noise, low_rank=low_rank).value(s, rows)
            assert ((exact - squares.mean(1)).abs() <= error).all()


def test_low_rank_sees_correlation_that_the_diagonal_misses() -> None:
    """Noise that moves all components together: only the factor knows that a difference of two cancels it."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 1, bias=False))
    net[1].weight.data = torch.tensor([[1.0, -1.0, 0.0, 0.0]])
    images = torch.tensor([0.5, 0.2, 0.1, 0.3]).view(1, 1, 2, 2)
    p = Problems.of(net, images, torch.tensor([0]), pixels((1, 2, 2)))
    noise = gaussian(torch.zeros(1, 2, 2), torch.ones(1, 2, 2), torch.ones(1, 1, 2, 2))
    s, rows = torch.zeros(1, 4), torch.tensor([0])
    with torch.no_grad():
        together = AssumedDensity.of(p, noise, low_rank=True).value(s, rows)
        apart = AssumedDensity.of(p, noise, low_rank=False).value(s, rows)
    assert float(together) == pytest.approx(0.5 * 0.3**2)
    assert float(apart) == pytest.approx(0.5 * (0.3**2 + 2))
    sampled = MonteCarlo.drawn(p, noise, 1000, generator()).value(s, rows)
    assert float(sampled) == pytest.approx(0.5 * 0.3**2, abs=1e-6)


def test_bad_input_is_said_in_one_sentence() -> None:
    with pytest.raises(ShapeError, match=r"got \(1, 2, 5, 5\)"):
        Problems.of(small_net(), torch.zeros(1, 2, 5, 5), torch.tensor([0]), pixels(SHAPE))
    net = small_net()
    net[4].bias.data[0] = torch.nan
    with pytest.raises(NumericsError, match="2 of 2 images"):
        Problems.of(net, torch.zeros(2, *SHAPE), torch.tensor([0, 0]), pixels(SHAPE))


def test_an_exported_graph_is_refused_in_one_sentence_too() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(4)).eval()
    images = torch.rand(1, *SHAPE, generator=generator(3))
    net(images)
    graph = torch.export.export(net, (images,)).module()
    steps = torch.fx.Interpreter(graph)  # how exported models are run layer by layer
    noise = gaussian(torch.zeros(SHAPE), torch.ones(SHAPE))
    for network in (net, graph, steps.run):
        p = Problems.of(network, images, torch.tensor([0]), pixels(SHAPE))
        with pytest.raises(ClosedFormError, match="max_pool2d, which has no closed form") as caught:
            AssumedDensity.of(p, noise, low_rank=False)
        assert "\n" not in str(caught.value)
