"""Relevance maps of other schools, for comparison on the same images: gradients, class activation maps, occlusion.

Every method takes a subject, pixels and target classes, and returns a map (batch, C, H, W); a map without channels is
the same in each. What we do not have ourselves comes from Captum when it is installed (``captum:DeepLift``).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor.errors import LayerError, OptionError
from auditor.subject.subject import Subject

Attribution = Callable[[Subject, Tensor, Tensor], Tensor]


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
    """Return x * mean of d logit / d x along the way from black, at the midpoints of ``n_steps`` pieces."""
    points = (torch.arange(n_steps) + 0.5) / n_steps
    total = torch.zeros_like(x)
    for a in points.tolist():
        total += _slope(subject, a * x, targets)
    return x * total / n_steps


def smooth_gradient(subject: Subject, x: Tensor, targets: Tensor, n_samples: int = 16, sigma: float = 0.15) -> Tensor:
    """Return the mean of |d logit / d x| over noisy copies (SmoothGrad)."""
    random = torch.Generator().manual_seed(0)
    total = torch.zeros_like(x)
    for _ in range(n_samples):
        total += gradient(subject, x + sigma * torch.randn(x.shape, generator=random), targets)
    return total / n_samples


def grad_cam(subject: Subject, x: Tensor, targets: Tensor, layer: str | None = None) -> Tensor:
    """Return relu(sum_c mean-gradient_c * activation_c) of a layer, enlarged to the image."""
    layer = layer or last_map(subject)
    with torch.no_grad():
        z = subject.activations(x, [layer])[layer]
    if z.dim() == 4:
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            logits = subject.forward_from(layer, z)
            (g,) = torch.autograd.grad(logits.gather(1, targets.to(logits.device)[:, None]).sum(), z)
    else:
        raise LayerError(
            f"Grad-CAM: layer {layer!r} puts out {tuple(z.shape)}, wanted (batch, channels, height, width)."
        )
    cam = F.relu((g.mean((2, 3), keepdim=True) * z.detach()).sum(1, keepdim=True))
    cam = F.interpolate(cam.cpu(), x.shape[2:], mode="bilinear", align_corners=False)
    return cam.expand_as(x).contiguous()


def last_map(subject: Subject) -> str:
    """Return the last explainable layer that still has a height and a width."""
    maps = [
        item.name for item in subject.layers() if item.explainable and len(item.shape) == 3 and min(item.shape[1:]) > 1
    ]
    if not maps:
        raise LayerError("Grad-CAM: the model has no explainable layer with height and width; leave this map out.")
    return maps[-1]


def occlusion(subject: Subject, x: Tensor, targets: Tensor, window: int | None = None) -> Tensor:
    """Return how much the logit falls when a grey square covers the pixel, averaged over the squares that do."""
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
    """Return noise: the map that knows nothing."""
    return torch.rand(x.shape, generator=torch.Generator().manual_seed(0))


METHODS: dict[str, Attribution] = {
    "gradient": gradient,
    "gradient x input": gradient_times_input,
    "integrated gradients": integrated_gradients,
    "|integrated gradients|": lambda subject, x, targets: integrated_gradients(subject, x, targets).abs(),
    "SmoothGrad": smooth_gradient,
    "Grad-CAM": grad_cam,
    "occlusion": occlusion,
    "random": uninformed,
}


def attribution(name: str) -> Attribution:
    """Return a method by name: one of `METHODS`, ``excitation``, or ``captum:CLASS`` for Captum's own.

    ``captum:`` takes any attribution class that needs no further argument than input and target (DeepLift,
    GuidedBackprop, Deconvolution, InputXGradient).
    """
    if name in METHODS:
        return METHODS[name]
    if name == "excitation" and has_excitation():
        return _excitation
    if name.startswith("captum:"):
        return _from_captum(name.removeprefix("captum:"))
    known = [*METHODS, *(["excitation"] if has_excitation() else []), "captum:CLASS"]
    raise OptionError(f"attribution: no method is called {name!r}; the methods are {', '.join(known)}.")


def has_excitation() -> bool:
    """Whether this version of the package has excitation backprop."""
    return importlib.util.find_spec("auditor.attribution.excitation") is not None


def _excitation(subject: Subject, x: Tensor, targets: Tensor) -> Tensor:
    """Return contrastive excitation backprop down to the pixels."""
    pre, z = subject.preprocessing, subject.normalise(x)
    floor = [-m / s for m, s in zip(pre.mean, pre.std, strict=True)]  # what a black pixel becomes
    module: Any = importlib.import_module("auditor.attribution.excitation")
    engine = module.ExcitationBackprop(subject.module, torch.cat([z, z])[:2], floor=floor)
    maps: Tensor = engine.maps(z, targets[:, None]).maps
    return maps.detach().cpu().expand_as(x).contiguous()


def _from_captum(name: str) -> Attribution:
    if importlib.util.find_spec("captum") is None:
        raise OptionError(f"attribution: captum:{name} needs Captum; pip install captum, or leave this map out.")
    method: Any = getattr(importlib.import_module("captum.attr"), name, None)
    if method is None:
        raise OptionError(f"attribution: Captum has no method {name!r}; see captum.attr for the names.")

    def run(subject: Subject, x: Tensor, targets: Tensor) -> Tensor:
        with torch.enable_grad():
            found: Tensor = method(_Logits(subject)).attribute(x.detach().clone().requires_grad_(), target=targets)
        return found.detach()

    return run


class _Logits(nn.Module):
    """The subject as a module from pixels to logits."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.inner, self.subject = subject.module, subject

    def forward(self, x: Tensor) -> Tensor:
        return self.subject.logits(x)
