"""Heatmaps of photos stop at cells of 16 pixels, from what the pass has given; small images go to the pixels."""

import numpy as np
import pytest
import torch
from torch import nn

from auditor import Subject, fit
from auditor.data.source import open_data
from auditor.explainers.answer import explanations_of
from auditor.explainers.base import Explainer
from auditor.explainers.forward_pass import TorchPass
from auditor.explainers.xnn.heat_layer import heat_layer


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv, self.act = nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()

    def forward(self, x):
        return self.act(x + self.conv(x))


def network(stem_stride=4):
    """Layers with cells of 4, 8, 16 and 32 pixels; inside a residual block they see only part of the mass."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stem_stride, 1), nn.ReLU(), nn.MaxPool2d(2), Residual(6),
        nn.Conv2d(6, 8, 3, 2, 1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(8, 12, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip


def subject_of(net, height=96, width=112):
    return Subject(net.eval(), input_shape=(3, height, width))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    path = tmp_path_factory.mktemp("photos") / "photos.npz"
    pixels = np.random.default_rng(0).integers(0, 256, (36, 96, 112, 3), dtype=np.uint8)
    np.savez(path, images=pixels, labels=np.arange(36) % 3)
    return open_data(str(path))


@pytest.fixture(scope="module")
def subject():
    return subject_of(network())


@pytest.fixture(scope="module")
def heads(subject, photos):
    return fit("xnn", subject, photos, targets=[0, 1, 2], n=2, max_epochs=2)


@pytest.fixture(scope="module")
def images(subject, photos):
    return next(iter(photos.batches(subject, 5))).images


def test_the_deepest_layer_with_cells_of_16_pixels_is_taken(subject):
    assert heat_layer(subject, "10") == "5"  # 6 x 7 cells; the pool after it has cells of 32 pixels
    assert heat_layer(subject, "4") == "4"
    assert heat_layer(subject, "3") == "3"  # not 3.conv, past which the residual branch goes


def test_without_fine_cells_or_on_small_images_it_is_the_pixels(subject):
    assert heat_layer(subject_of(network(stem_stride=16)), "10") == "input"
    assert heat_layer(subject_of(network(), 64, 64), "10") == "input"


def test_an_inside_of_a_residual_block_is_never_taken():
    net = nn.Sequential(nn.Conv2d(3, 6, 3, 8, 1), nn.ReLU(), Residual(6), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert heat_layer(subject_of(nn.Sequential(*net, nn.Linear(6, 3))), "2.conv") == "1"


def test_heat_from_the_pass_is_that_of_a_walk_alone(heads, subject, images):
    assert heads.heat_layer_ == "5"
    assert heads.layers() == [heads.layer_, "5"]
    alone = heads.heatmaps(subject, images, 1)
    assert alone.maps.shape == (5, 2, 6, 7)
    logits, outputs = TorchPass(subject, [heads]).run(images)
    for e, maps in zip(explanations_of(heads, subject, images, [1] * 5, (logits, outputs)), alone.maps, strict=True):
        drawn = [c.heatmap for c in e.concepts]
        assert any(heat is not None for heat in drawn)
        for heat, expected in zip(drawn, maps, strict=True):
            if heat is not None:
                torch.testing.assert_close(heat, expected, rtol=1e-4, atol=1e-7)  # float32, another order of sums


def test_the_network_below_is_not_run_again(heads, subject, images):
    logits, outputs = TorchPass(subject, [heads]).run(images)
    wrong = {**outputs, "5": torch.zeros_like(outputs["5"])}
    maps = [c.heatmap for e in explanations_of(heads, subject, images, [1] * 5, (logits, wrong)) for c in e.concepts]
    assert all(heat is None for heat in maps)  # no excitation is left where the walk stops


def test_stored_heads_remember_it_and_those_of_earlier_releases_go_to_the_pixels(heads, subject, images, tmp_path):
    heads.save(tmp_path / "heads")
    again = Explainer.load(tmp_path / "heads", subject)
    assert again.heat_layer_ == "5"
    state = {key: value for key, value in heads.state().items() if key != "heat_layer"}
    again.restore(heads.tensors(), state, {})
    assert again.heat_layer_ == "input"
    assert again.layers() == [heads.layer_]
    assert again.heatmaps(subject, images, 1).maps.shape == (5, 2, 96, 112)


def test_a_layer_that_was_asked_for_is_taken(subject, photos, images):
    pixels = fit("xnn", subject, photos, target=1, n=2, max_epochs=1, heatmap_layer="input")
    assert pixels.layers() == [pixels.layer_]
    assert pixels.heatmaps(subject, images, 1).maps.shape == (5, 2, 96, 112)
