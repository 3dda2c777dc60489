"""Relevance maps by other methods, for comparison on the same images: gradients, class activation maps, occlusion.

Every method takes a subject, pixels and target classes, and returns a map (batch, C, H, W); a map without channels is
the same in each. LIME and SHAP are those of their authors, and further methods come from Captum and zennit when they
are installed (``captum:DeepLift``, ``zennit:EpsilonPlusFlat``).
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

import torch
import torch.nn.functional as F
from torch import Tensor

from auditor.attribution.excitation import ExcitationBackprop
from auditor.attribution.guided_backprop import guided_backprop
from auditor.attribution.other_libraries import Attribution, from_captum, from_zennit, lime, shap_partition
from auditor.attribution.relevance_propagation import deep_taylor, lrp
from auditor.errors import LayerError, OptionError
from auditor.network.aten_graph import graph_of
from auditor.subject.subject import Subject


def _slope(subject: Subject, x: Tensor, targets: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().clone().requires_grad_()
        value = subject.logits(leaf).gather(1, targets.to(subject.device)[:, None]).sum()
        return torch.autograd.grad(value, leaf)[0]


def gradient(subject: Subject, x: Tensor, targets: Tensor) -> Tensor:
    """Return |d logit / d x| (sensitivity)."""
    return _slope(subject, x, targets).abs()


def gradient_times_input(subject: Subject, x: Tensor, targets: Tensor) -> Tensor:
    """Return x * d logit / d x."""
    return x * _slope(subject, x, targets)


def integrated_gradients(subject: Subject, x: Tensor, targets: Tensor, n_steps: int = 32) -> Tensor:
    """Return x * mean of d logit / d x along the way from black [IntegratedGradients], in ``n_steps`` pieces."""
    points = (torch.arange(n_steps) + 0.5) / n_steps
    total = torch.zeros_like(x)
    for a in points.tolist():
        total += _slope(subject, a * x, targets)
    return x * total / n_steps


def smooth_gradient(subject: Subject, x: Tensor, targets: Tensor, n_samples: int = 16, sigma: float = 0.15) -> Tensor:
    """Return the mean of |d logit / d x| over noisy copies [SmoothGrad]."""
    random = torch.Generator().manual_seed(0)
    total = torch.zeros_like(x)
    for _ in range(n_samples):
        total += gradient(subject, x + sigma * torch.randn(x.shape, generator=random), targets)
    return total / n_samples


def grad_cam(subject: Subject, x: Tensor, targets: Tensor, layer: str | None = None) -> Tensor:
    """Return relu(sum_c mean-gradient_c * activation_c) of a layer, enlarged to the image [GradCAM]."""
    A, g, grid = _activation_and_gradient(subject, x, targets, layer)
    return _enlarged(F.relu((g.mean(-1, keepdim=True) * A).sum(1)), grid, x)


def grad_cam_plus_plus(subject: Subject, x: Tensor, targets: Tensor, layer: str | None = None) -> Tensor:
    """Return Grad-CAM++ of a layer, enlarged to the image [GradCAMpp].

    Positive gradients are weighed by a closed form of the higher derivatives of  exp(logit).
    """
    A, g, grid = _activation_and_gradient(subject, x, targets, layer)
    den = 2 * g.square() + (A * g.pow(3)).sum(-1, keepdim=True)
    alpha = torch.where(den.abs() > 1e-30, g.square() / torch.where(den == 0, 1.0, den), 0.0)
    weight = (alpha * F.relu(g)).sum(-1, keepdim=True)
    return _enlarged(F.relu((weight * A).sum(1)), grid, x)


def _activation_and_gradient(
    subject: Subject, x: Tensor, targets: Tensor, layer: str | None
) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Return activation and gradient of the target logit as (batch, channels, positions), and the grid of these."""
    name = layer or last_map(subject)
    layout = subject.layout(name)
    if layout.name == "vector":
        raise LayerError(f"Grad-CAM: layer {name!r} has no positions to draw a map on; take a convolutional layer.")
    with torch.no_grad():
        z = subject.activations(x, [name])[name]
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        logits = subject.forward_from(name, z)
        (g,) = torch.autograd.grad(logits.gather(1, targets.to(logits.device)[:, None]).sum(), z)
    return layout.to_positions(z.detach()), layout.to_positions(g), layout.grid


def _enlarged(cam: Tensor, grid: tuple[int, int], x: Tensor) -> Tensor:
    cam = cam.cpu().view(len(cam), 1, *grid)
    return F.interpolate(cam, x.shape[2:], mode="bilinear", align_corners=False).expand_as(x).contiguous()


def last_map(subject: Subject) -> str:
    """Return the last explainable layer that still has a height and a width."""
    maps = [
        item.name for item in subject.layers() if item.explainable and len(item.shape) == 3 and min(item.shape[1:]) > 1
    ]
    if not maps:
        raise LayerError("Grad-CAM: the model has no explainable layer with height and width; leave this map out.")
    return maps[-1]


def occlusion(subject: Subject, x: Tensor, targets: Tensor, window: int | None = None) -> Tensor:
    """Return how much the logit falls when a grey square covers the pixel, averaged over all such [Occlusion]."""
    _, _, h, w = x.shape
    window = window or max(1, min(h, w) // 8)
    stride = max(1, window // 2)
    total, count = torch.zeros_like(x[:, :1]), torch.zeros_like(x[:, :1])
    grey = x.mean((2, 3), keepdim=True)
    with torch.no_grad():
        base = _at(subject, x, targets)
        for top in range(0, max(1, h - window + stride), stride):
            for left in range(0, max(1, w - window + stride), stride):
                rows, columns = slice(top, top + window), slice(left, left + window)
                covered = x.clone()
                covered[:, :, rows, columns] = grey
                total[:, :, rows, columns] += (base - _at(subject, covered, targets))[:, None, None, None]
                count[:, :, rows, columns] += 1
    return (total / count.clamp_min(1)).expand_as(x).contiguous()


def _at(subject: Subject, x: Tensor, targets: Tensor) -> Tensor:
    logits = subject.logits(x)
    return logits.gather(1, targets.to(logits.device)[:, None]).squeeze(1).cpu()


def uninformed(subject: Subject, x: Tensor, targets: Tensor) -> Tensor:
    """Return noise: an uninformative map."""
    return torch.rand(x.shape, generator=torch.Generator().manual_seed(0))


def excitation(subject: Subject, x: Tensor, targets: Tensor) -> Tensor:
    """Return contrastive excitation backprop down to the pixels."""
    pre, z = subject.preprocessing, subject.normalise(x)
    floor = [-m / s for m, s in zip(pre.mean, pre.std, strict=True)]  # what a black pixel becomes
    walk = ExcitationBackprop(graph_of(subject), floor=floor)
    return walk.maps(z, targets[:, None]).maps.detach().cpu().expand_as(x).contiguous()


METHODS: dict[str, Attribution] = {
    "gradient": gradient,
    "gradient x input": gradient_times_input,
    "integrated gradients": integrated_gradients,
    "|integrated gradients|": lambda subject, x, targets: integrated_gradients(subject, x, targets).abs(),
    "SmoothGrad": smooth_gradient,
    "Grad-CAM": grad_cam,
    "Grad-CAM++": grad_cam_plus_plus,
    "occlusion": occlusion,
    "random": uninformed,
    "excitation": excitation,
    "guided backprop": guided_backprop,
    "LRP-alpha-beta": lrp,
    "deep Taylor": deep_taylor,
    "LIME": lime,
    "SHAP": shap_partition,
}
SLOW = ("LIME", "SHAP")  # of libraries that may not be installed


def attribution(name: str) -> Attribution:
    """Return a method by name: one of `METHODS`, or ``captum:CLASS`` and ``zennit:COMPOSITE`` for these libraries' own.

    >>> attribution("Grad-CAM") is grad_cam
    True
    """
    if name in METHODS:
        return METHODS[name]
    library, sign, method = name.partition(":")
    if sign and library in LIBRARIES:
        return LIBRARIES[library](method)
    near = [n for n in METHODS if n.lower() == name.lower()] or get_close_matches(name, METHODS, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}" if near else f"the methods are {', '.join(METHODS)}"
    raise OptionError(
        f"maps: no method is called {name!r}; {hint}; captum:CLASS and zennit:COMPOSITE are these libraries'."
    )


LIBRARIES: dict[str, Callable[[str], Attribution]] = {"captum": from_captum, "zennit": from_zennit}
