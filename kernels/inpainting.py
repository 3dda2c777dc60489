"""Inpainting: fill missing pixels smoothly from the known ones by solving the Laplace equation.

Missing pixels become the harmonic function with the known pixels as boundary values: every one is the mean of its
neighbours. Solved coarse to fine, a pyramid giving the start and red-black relaxation the rest.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def inpaint(images: Tensor, known: Tensor, *, sweeps: int = 60) -> Tensor:
    """Return ``images`` (batch, channels, height, width) with pixels filled where ``known`` (batch, 1, h, w) is 0.

    Known pixels stay exactly as they are; an image without any known pixel becomes zero.

    >>> ramp = torch.arange(5.0).view(1, 1, 1, 5)
    >>> known = torch.tensor([1.0, 0, 0, 0, 1]).view(1, 1, 1, 5)
    >>> inpaint(ramp * known, known, sweeps=400).flatten().round(decimals=3).tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0]
    """
    k = known.to(images.dtype)
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
