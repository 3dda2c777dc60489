"""Heatmaps as pictures: a layer's coarse grid upsampled and laid over the image, red for, blue against."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

RED, BLUE = (214, 39, 40), (31, 90, 200)
Array = np.ndarray[Any, Any]


def upsample(heatmap: Tensor, size: tuple[int, int]) -> Tensor:
    """Return a grid (h, w) as (height, width) by bilinear interpolation, non-negative values staying so.

    >>> upsample(torch.eye(2), (4, 4)).shape
    torch.Size([4, 4])
    """
    grid = heatmap[None, None].float()
    return torch.nn.functional.interpolate(grid, size=size, mode="bilinear", align_corners=False)[0, 0]


def is_density(heatmap: Tensor) -> bool:
    """Whether the map shares out mass 1 over many pixels, so that what counts is the mass of a neighbourhood."""
    return heatmap.numel() >= 64 * 64 and abs(float(heatmap.sum()) - 1) < 1e-2


def smoothed(density: Tensor, share: float = 0.015) -> Tensor:
    """Blur a density (height, width) with a Gaussian whose deviation is ``share`` of its longer side.

    >>> dot = torch.zeros(70, 90)
    >>> dot[30, 40] = 1.0
    >>> soft = smoothed(dot)
    >>> round(float(soft.sum()), 4), bool(soft.max() == soft[30, 40]), bool(soft.max() < 0.2)
    (1.0, True, True)
    """
    sigma = max(density.shape) * share
    reach = max(1, round(3 * sigma))
    at = torch.arange(-reach, reach + 1, dtype=torch.float32)
    bell = torch.exp(-(at**2) / (2 * sigma**2))
    bell = bell / bell.sum()
    x = density[None, None].float()
    x = torch.nn.functional.conv2d(x, bell.view(1, 1, -1, 1), padding=(reach, 0))
    return torch.nn.functional.conv2d(x, bell.view(1, 1, 1, -1), padding=(0, reach))[0, 0]


def to_rgb(image: Tensor) -> Array:
    """Return pixels (channels, height, width) in [0, 1] as uint8 (height, width, 3)."""
    array = (image.detach().cpu().float().clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    if array.shape[0] == 1:
        array = np.repeat(array, 3, axis=0)
    if array.shape[0] != 3:
        array = np.repeat(array.mean(0, keepdims=True).astype(np.uint8), 3, axis=0)
    return np.ascontiguousarray(array.transpose(1, 2, 0))


def overlay(
    image: Tensor, heatmap: Tensor, *, positive: bool | None = True, top: float | None = None, side: int | None = None
) -> Image.Image:
    """Lay a heatmap over an image: full colour at ``top`` (default: the map's own maximum), nothing at zero.

    Red where it is ``positive``, blue where not; None: it speaks neither for nor against, and nothing is painted.
    Mass shared out over single pixels is too thin to be seen: such a map is smoothed, with full colour from its highest
    two percent on.
    """
    rgb = to_rgb(image)
    height, width = rgb.shape[:2]
    if side is not None:
        scale = side / max(height, width)
        height, width = max(1, round(height * scale)), max(1, round(width * scale))
        rule = Image.Resampling.NEAREST if scale > 4 else Image.Resampling.BILINEAR
        rgb = np.asarray(Image.fromarray(rgb).resize((width, height), rule))
    heatmap = heatmap.detach().cpu().clamp_min(0)
    if top is None and is_density(heatmap):
        heatmap = smoothed(heatmap)
        top = float(heatmap.flatten().kthvalue(max(1, round(0.98 * heatmap.numel()))).values)
    heat = upsample(heatmap, (height, width)).numpy()
    peak = 0.0 if positive is None else float(heatmap.max()) if top is None else top
    alpha = np.clip(heat / peak, 0, 1)[..., None] * 0.75 if peak > 0 else np.zeros((height, width, 1))
    grey = rgb.astype(np.float32) * 0.6 + 60.0  # dimmed, so that colour is seen on black and on white
    colour = np.array(RED if positive else BLUE, dtype=np.float32)
    return Image.fromarray((grey * (1 - alpha) + colour * alpha).clip(0, 255).astype(np.uint8))


def overlay_signed(image: Tensor, heatmap: Tensor, *, side: int) -> Image.Image:
    """Lay a signed map over an image: red speaks for the class, blue against, full colour from the top percent on.

    >>> overlay_signed(torch.zeros(3, 6, 8), torch.randn(6, 8), side=80).size
    (80, 60)
    """
    heat = upsample(heatmap, (image.shape[1], image.shape[2])) if heatmap.shape != image.shape[1:] else heatmap.float()
    size = heat.abs().flatten()
    peak = float(size.kthvalue(max(1, round(0.99 * size.numel()))).values) or float(size.max()) or 1.0
    both = [overlay(image, part, positive=sign, top=peak, side=side) for part, sign in ((heat, True), (-heat, False))]
    against = upsample(heat, both[0].size[::-1]).lt(0).numpy()
    return Image.composite(both[1], both[0], Image.fromarray(against.astype(np.uint8) * 255))
