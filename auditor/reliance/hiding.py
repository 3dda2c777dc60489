"""Hiding and keeping: whether the class survives without its deciding region, or with nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from auditor.reliance.fills import filled
from auditor.reliance.heat import margins
from auditor.reliance.regions import hottest, moved, scattered

FULLY_HIDDEN = (0.03, 0.10)
Predict = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Survival:
    """Per image: 1 where the class is still predicted, and the margin; the same with the mask moved elsewhere."""

    share: float
    fill: str
    still: Tensor
    margin: Tensor
    still_moved: Tensor
    margin_moved: Tensor
    still_scattered: Tensor | None = None


def hide(
    predict: Predict,
    images: Tensor,
    targets: Tensor,
    heat: Tensor,
    shares: Sequence[float],
    fills: Sequence[str],
    seed: int,
) -> list[Survival]:
    """Hide the hottest share of each image; the nulls (same mask moved, same share scattered) use the first fill.

    The first fill hides all shares, the other fills those of `FULLY_HIDDEN`, the scattered null the largest of these.
    """
    out: list[Survival] = []
    for share in shares:
        generator = torch.Generator().manual_seed(seed)
        masks = hottest(heat, share)
        cell = max(2, round((float(masks[0].sum()) / 4) ** 0.5))
        still_moved, margin_moved = _after(predict, filled(images, moved(masks, generator), fills[0]), targets)
        full = share in FULLY_HIDDEN
        still_scattered = None
        if share == max(FULLY_HIDDEN):
            still_scattered, _ = _after(predict, filled(images, scattered(masks, cell, generator), fills[0]), targets)
        for fill in fills if full else fills[:1]:
            still, margin = _after(predict, filled(images, masks, fill), targets)
            out.append(Survival(share, fill, still, margin, still_moved, margin_moved, still_scattered))
    return out


def keep_only(
    predict: Predict,
    images: Tensor,
    targets: Tensor,
    heat: Tensor,
    shares: Sequence[float],
    seed: int,
    fill: str = "blur",
) -> list[Survival]:
    """Fill everything but the hottest share of each image; the null keeps the same mask moved elsewhere."""
    out: list[Survival] = []
    for share in shares:
        generator = torch.Generator().manual_seed(seed)
        masks = hottest(heat, share)
        still_moved, margin_moved = _after(predict, filled(images, 1 - moved(masks, generator), fill), targets)
        still, margin = _after(predict, filled(images, 1 - masks, fill), targets)
        out.append(Survival(share, fill, still, margin, still_moved, margin_moved))
    return out


def _after(predict: Predict, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = predict(images).cpu()
    return (logits.argmax(1) == targets).double(), margins(logits, targets).double()
