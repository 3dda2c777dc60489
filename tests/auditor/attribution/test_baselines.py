"""The maps of other schools against closed forms and against Captum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from auditor import Subject
from auditor.attribution.baselines import (
    METHODS,
    SLOW,
    attribution,
    grad_cam,
    grad_cam_plus_plus,
    gradient,
    integrated_gradients,
    last_map,
    occlusion,
)
from auditor.errors import LayerError, OptionError


@pytest.fixture(scope="module")
def subject() -> Subject:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 5, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(5 * 4 * 6, 3),
    )
    return Subject(net, input_shape=(2, 13, 17), mean=(0.4, 0.6), std=(0.5, 0.25))


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(3, 2, 13, 17, generator=torch.Generator().manual_seed(1))


TARGETS = torch.tensor([0, 2, 1])


@pytest.mark.parametrize("name", [name for name in METHODS if name not in SLOW])
def test_every_map_has_the_images_shape_and_treats_a_batch_as_its_images(
    subject: Subject, images: Tensor, name: str
) -> None:
    together = METHODS[name](subject, images, TARGETS)
    assert together.shape == images.shape
    assert together.isfinite().all()
    assert together.std() > 0
    if name not in ("random", "SmoothGrad"):  # their noise depends on the batch
        alone = METHODS[name](subject, images[1:2], TARGETS[1:2])
        torch.testing.assert_close(together[1:2], alone, rtol=1e-4, atol=1e-6)


def test_integrated_gradients_add_up(subject: Subject, images: Tensor) -> None:
    total = integrated_gradients(subject, images, TARGETS, n_steps=400).flatten(1).sum(1)
    with torch.no_grad():
        rise = (subject.logits(images) - subject.logits(torch.zeros_like(images))).gather(1, TARGETS[:, None])[:, 0]
    torch.testing.assert_close(total, rise, rtol=0, atol=2e-3)  # kinks between 400 midpoints


def test_captum_agrees(subject: Subject, images: Tensor) -> None:
    pytest.importorskip("captum")
    saliency = attribution("captum:Saliency")(subject, images, TARGETS)
    torch.testing.assert_close(gradient(subject, images, TARGETS), saliency, rtol=1e-4, atol=1e-6)
    from captum.attr import IntegratedGradients, LayerGradCam

    theirs = IntegratedGradients(subject.logits).attribute(images, target=TARGETS, n_steps=32, method="riemann_middle")
    torch.testing.assert_close(integrated_gradients(subject, images, TARGETS), theirs.float(), rtol=1e-3, atol=1e-5)
    layer = last_map(subject)
    module = subject.module.get_submodule(layer)
    cam = LayerGradCam(lambda x: subject.logits(x), module).attribute(images, target=TARGETS, relu_attributions=True)
    ours = grad_cam(subject, images, TARGETS)
    expected = nn.functional.interpolate(cam, (13, 17), mode="bilinear", align_corners=False).detach()
    torch.testing.assert_close(ours[:, :1], expected, rtol=1e-4, atol=1e-6)


def test_occlusion_finds_the_only_pixel_that_matters() -> None:
    class Corner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([5 * x[:, 0, 9, 12], x[:, 0, 0, 0] * 0], 1)

    subject = Subject(Corner(), input_shape=(1, 13, 17))
    x = torch.zeros(1, 1, 13, 17)
    x[0, 0, 9, 12] = 1
    heat = occlusion(subject, x, torch.tensor([0]), window=2)[0, 0]
    assert divmod(int(heat.argmax()), 17) in [(9, 12), (8, 12), (9, 11), (9, 13), (10, 12), (8, 11)]
    assert heat[0, 0] == 0


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("lime", "no method is called 'lime'; did you mean LIME"),
        ("Grad-CAN", "did you mean Grad-CAM"),
        ("xyz:Nonsense", "the methods are gradient"),
    ],
)
def test_unknown_methods(name: str, sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        attribution(name)


def enlarged(cam: Tensor) -> Tensor:
    return nn.functional.interpolate(cam[:, None], (7, 9), mode="bilinear").expand(-1, 2, -1, -1)


def test_grad_cam_of_a_linear_head_is_the_weighted_sum_of_channels():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    subject = Subject(net, input_shape=(2, 7, 9))
    x = torch.rand(2, 2, 7, 9)
    A = net[:2](x).detach()
    w = net[4].weight[1].detach()
    want = torch.relu((A * w.view(1, 3, 1, 1)).sum(1)) / 35  # the pool shares the gradient over 5 x 7 cells
    target = torch.tensor([1, 1])
    torch.testing.assert_close(grad_cam(subject, x, target, "1"), enlarged(want))
    g = w.view(1, 3, 1, 1) / 35
    alpha = g**2 / (2 * g**2 + (A * g**3).sum((2, 3), keepdim=True))
    weight = (alpha * torch.relu(g)).expand(-1, -1, 5, 7).sum((2, 3), keepdim=True)
    torch.testing.assert_close(grad_cam_plus_plus(subject, x, target, "1"), enlarged(torch.relu((weight * A).sum(1))))
    with pytest.raises(LayerError, match="no positions"):
        grad_cam(subject, x, target, "3")
