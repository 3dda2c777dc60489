"""Masking test: keep only the pixels a heatmap points at, inpaint the rest, and see if the decision survives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from auditor.errors import OptionError, ShapeError
from auditor.kernels.inpainting import inpaint
from auditor.subject.subject import Subject


@dataclass(frozen=True, slots=True)
class MaskingTest:
    """Share of images whose class (``labels``) is still predicted, with ``kept`` pixels and in full."""

    kept: int
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
