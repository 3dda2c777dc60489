"""Fills: what a hidden region is replaced by. A fill is itself a signal, so a finding must hold for two of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from auditor.perturbation.inpainting_test import inpaint

FILLS = ("blur", "mean", "inpaint")


def blurred(images: Tensor) -> Tensor:
    """Return images without detail: three passes of a window of a quarter of the side, mirrored at the border.

    Large images are blurred at a quarter of their size, which takes a tenth of the time and cannot be distinguished.
    """
    size = (images.shape[2], images.shape[3])
    factor = 4 if min(size) >= 48 else 1
    x = F.interpolate(images, tuple(-(-n // factor) for n in size), mode="area") if factor > 1 else images
    window = max(3, min(x.shape[2:]) // 4) | 1
    for _ in range(3):
        x = F.avg_pool2d(F.pad(x, (window // 2,) * 4, mode="reflect"), window, stride=1)
    return F.interpolate(x, size, mode="bilinear", align_corners=False) if factor > 1 else x


def filled(images: Tensor, masks: Tensor, fill: str) -> Tensor:
    """Return images with the pixels of ``masks`` (images, 1, height, width; 1 is hidden) replaced.

    >>> x = torch.rand(2, 3, 8, 8)
    >>> hidden = torch.zeros(2, 1, 8, 8)
    >>> torch.equal(filled(x, hidden, "mean"), x)
    True
    """
    if fill == "blur":
        return images * (1 - masks) + blurred(images) * masks
    if fill == "mean":
        return images * (1 - masks) + images.mean((2, 3), keepdim=True) * masks
    if fill == "inpaint":
        return inpaint(images * (1 - masks), 1 - masks)
    raise ValueError(f"fill must be one of {', '.join(FILLS)}, got {fill!r}")


def combined(below: Tensor, above: Tensor, masks: Tensor) -> Tensor:
    """Return ``above`` where ``masks`` is 1 and ``below`` elsewhere."""
    return torch.where(masks > 0, above, below)
