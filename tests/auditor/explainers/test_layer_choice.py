"""Candidate layers measured: what is a candidate, figures against plain counts, constant layers left behind."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from auditor import Subject, fit, open_data
from auditor.explainers.contributions import contributions
from auditor.explainers.layer_choice import (
    MeasuredLayer,
    best_layer,
    candidates,
    choose_layer,
    measure_layers,
    random_images,
    some_images,
)
from auditor.kernels.factorization.projection import prepare, project_images
from auditor.network.above_layer import prepare_above_layer
from tests.auditor.explainers.nmf import photo_like


class Stages(nn.Module):
    """Three maps, each handed on by something that computes nothing."""

    def __init__(self, dead: bool = False) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU())
        self.drop = nn.Dropout()
        self.two = nn.Sequential(nn.Conv2d(6, 8, 3, stride=2), nn.ReLU())
        self.pad = nn.ZeroPad2d(1)
        self.three = nn.Sequential(nn.Conv2d(8, 10, 3), nn.ReLU())
        self.same = nn.Identity()
        self.fc = nn.Linear(10, 4)
        if dead:
            nn.init.zeros_(self.three[0].weight)
            nn.init.constant_(self.three[0].bias, 0.5)

    def forward(self, x):
        return self.fc(self.same(self.three(self.pad(self.two(self.drop(self.one(x)))))).mean((2, 3)))


def stages(**options) -> Subject:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Subject(Stages(**options).eval(), input_shape=(1, 13, 17))


def test_candidates_compute_something_and_differ_in_shape():
    assert [layer.name for layer in candidates(stages())] == ["one", "two", "three"]


def test_cost_is_the_share_of_operations_above_the_layer():
    """Multiplications written out: 9 per weight of a filter and position, and the head."""
    measured = measure_layers(stages(), torch.rand(6, 1, 13, 17, generator=torch.Generator().manual_seed(0)))
    one, two, three, head = 6 * 9 * 11 * 15, 8 * 6 * 9 * 5 * 7, 10 * 8 * 9 * 5 * 7, 10 * 4
    total = one + two + three + head
    wanted = [(two + three + head) / total, (three + head) / total, head / total]
    assert [m.cost for m in measured] == pytest.approx(wanted)
    assert [m.later for m in measured] == [2, 1, 0]


def test_the_score_is_the_formula_and_ties_go_to_the_later_layer():
    layer = candidates(stages())[0]
    m = MeasuredLayer(layer, 0.8, 0.4, 0.2, 2)
    assert m.score == pytest.approx(0.8 + 0.1 - 0.05 - 0.2)
    assert MeasuredLayer(layer, math.nan, math.nan, math.nan, 0, "constant").score == -math.inf
    assert best_layer([]) is None


def test_a_constant_layer_is_passed_over_with_its_reason(tmp_path):
    subject = stages(dead=True)
    measured = {m.layer.name: m for m in measure_layers(subject, random_images(subject))}
    assert "its activations are constant" in measured["three"].reason
    assert best_layer(list(measured.values())) == "two"
    np.savez(tmp_path / "x.npz", images=np.random.default_rng(0).random((12, 13, 17, 1), dtype=np.float32))
    assert fit("nmf", subject, open_data(tmp_path / "x.npz"), rank=2, refits=1).layer_ == "two"


def test_the_layer_asked_for_is_taken(tmp_path):
    np.savez(tmp_path / "x.npz", images=np.random.default_rng(0).random((12, 13, 17, 1), dtype=np.float32))
    data, net = open_data(tmp_path / "x.npz"), stages().module
    assert choose_layer(stages(), data, "one") == "one"
    assert choose_layer(Subject(net, input_shape=(1, 13, 17), layer="one"), data, None) == "one"
    assert choose_layer(stages(), open_data(tmp_path / "x.npz", limit=2), None) == "three"  # too few to measure


def test_the_same_images_give_the_same_choice_and_leave_no_hook(tmp_path):
    subject = photo_like.subject()
    data = open_data(photo_like.write(tmp_path / "x.npz", 2))
    x = some_images(subject, data)
    assert len(x) == 16
    first, second = (measure_layers(subject, x) for _ in range(2))
    assert first == second
    assert not any(m._forward_hooks for m in subject.module.modules())
    assert random_images(subject).shape == (16, 1, 20, 20)


FAMILIES = ("resnet18", "mobilenet_v3_small", "densenet121", "regnet_y_400mf", "shufflenet_v2_x0_5", "vgg11_bn")
FAMILIES += ("efficientnet_b0", "convnext_tiny", "mnasnet0_5", "squeezenet1_1", "mobilenet_v2", "alexnet")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_of_every_family_computes_something_and_its_path_starts_there(name):
    """The convolution that reads the pixels runs once for the images and never again for a path integral."""
    import torchvision

    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = getattr(torchvision.models, name)(weights=None).eval()
    subject = Subject(net, input_shape=(3, 96, 96))
    x = random_images(subject)[:4]
    measured = measure_layers(subject, x)
    chosen = best_layer(measured)
    assert len(measured) > 1
    assert not any(m.layer.is_passive for m in measured)
    assert not subject.layer(subject.default_layer()).is_passive
    prepare_above_layer(subject, chosen)
    z = subject.activations(x, [chosen])[chosen]
    layout = subject.layout(chosen)
    first = next(m for m in net.modules() if isinstance(m, nn.Conv2d))
    calls = []
    handle = first.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        logits = subject.logits(x)
        W = torch.rand(layout.channels, 3, generator=torch.Generator().manual_seed(0))
        S = project_images(layout.to_positions(z), prepare(W))
    parts = contributions(subject, chosen, layout, z, logits, W, S, logits.argmax(1).tolist())
    handle.remove()
    assert len(calls) == 1
    whole = parts.bias + parts.contributions.sum(1) + parts.residual
    torch.testing.assert_close(whole, logits.amax(1).double(), rtol=1e-4, atol=1e-4)
