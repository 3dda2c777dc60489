"""Masking test: keep only the pixels a heatmap points at, inpaint the rest, and see if the decision survives.

Inpainting solves the Laplace equation: missing pixels become the harmonic function with the remaining pixels as
boundary values, so that each is the mean of its neighbours. A pyramid gives the start, damped relaxation the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from auditor.errors import OptionError, ShapeError
from auditor.subject.subject import Subject


@dataclass(frozen=True, slots=True)
class MaskingTest:
    """Share of images whose class (``labels``) is still predicted, with ``n_pixels`` remaining pixels and in full."""

    n_pixels: int
    accuracy: float
    full_accuracy: float


def keep_top(images: Tensor, heatmaps: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Return images with all but the ``m`` hottest pixels black, and the mask (batch, 1, height, width) of these."""
    if heatmaps.shape != (len(images), *images.shape[2:]):
        raise ShapeError(
            f"masking: heatmaps must be (batch, height, width) like the images, got {tuple(heatmaps.shape)} for images "
            f"{tuple(images.shape)}. Upsample them first."
        )
    if not 1 <= m <= heatmaps[0].numel():
        raise OptionError(f"masking: pixels kept must be 1 to {heatmaps[0].numel()}, got {m}.")
    flat = heatmaps.flatten(1)
    mask = torch.zeros_like(flat).scatter_(1, flat.topk(m, dim=1).indices, 1.0).view(len(images), 1, *images.shape[2:])
    return images * mask, mask


def masking_test(subject: Subject, images: Tensor, heatmaps: Tensor, labels: Tensor, m: int) -> MaskingTest:
    """Keep the ``m`` hottest pixels of every image, inpaint, classify, and compare with ``labels``."""
    masked, mask = keep_top(images, heatmaps, m)
    with torch.no_grad():
        after = subject.logits(inpaint(masked, mask)).argmax(1)
        before = subject.logits(images).argmax(1)
    want = labels.to(after)
    return MaskingTest(m, float((after == want).float().mean()), float((before == want).float().mean()))


def inpaint(images: Tensor, mask: Tensor, *, sweeps: int = 60) -> Tensor:
    """Return ``images`` (batch, channels, height, width) with pixels filled where ``mask`` (batch, 1, h, w) is 0.

    Known pixels stay exactly as they are; an image without any known pixel becomes zero.

    >>> ramp = torch.arange(5.0).view(1, 1, 1, 5)
    >>> mask = torch.tensor([1.0, 0, 0, 0, 1]).view(1, 1, 1, 5)
    >>> inpaint(ramp * mask, mask, sweeps=400).flatten().round(decimals=3).tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0]
    """
    k = mask.to(images.dtype)
    filled = _start(images * k, k)
    for _ in range(sweeps):
        filled = torch.where(k > 0, images, _mean_of_neighbours(filled))
        filled = torch.where(k > 0, images, 0.4 * filled + 0.6 * _mean_of_neighbours(filled))
    return filled


def _start(weighted: Tensor, k: Tensor) -> Tensor:
    """Return a first guess: the mean of known pixels in the finest pyramid cell that has some."""
    height, width = k.shape[-2:]
    if max(height, width) <= 1:
        return torch.where(k > 0, weighted / k.clamp(min=1e-12), torch.zeros_like(weighted))
    coarse_k = F.avg_pool2d(k, 2, ceil_mode=True, count_include_pad=False)
    coarse = F.avg_pool2d(weighted, 2, ceil_mode=True, count_include_pad=False)
    below = _start(coarse, coarse_k)
    up = F.interpolate(below, size=(height, width), mode="bilinear", align_corners=False)
    return torch.where(k > 0, weighted / k.clamp(min=1e-12), up)


def _mean_of_neighbours(x: Tensor) -> Tensor:
    total, count = torch.zeros_like(x), torch.zeros_like(x[:1, :1])
    for dim in (-1, -2):
        n = x.shape[dim]
        if n > 1:
            total.narrow(dim, 1, n - 1).add_(x.narrow(dim, 0, n - 1))
            count.narrow(dim, 1, n - 1).add_(1)
            total.narrow(dim, 0, n - 1).add_(x.narrow(dim, 1, n - 1))
            count.narrow(dim, 0, n - 1).add_(1)
    return total / count.clamp(min=1)
