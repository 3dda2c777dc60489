"""Moved and mirrored copies of images, so that few photos train a network for more than a few steps per pass."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as nf

SHARE = 0.1  # of the side: how far a copy is moved at most


def copies_of(images: Tensor, n: int, *, mirror: bool, seed: int = 0) -> Tensor:
    """Return ``n`` copies of each image (n images, …): the images themselves first, then moved ones.

    A copy is moved by up to a tenth of the side in both directions, what comes in at the border is the image mirrored
    there; every second copy is mirrored where ``mirror`` says that left and right do not matter.

    >>> copies_of(torch.rand(5, 3, 20, 30), 3, mirror=True).shape
    torch.Size([15, 3, 20, 30])
    """
    generator = torch.Generator().manual_seed(seed)
    height, width = images.shape[2:]
    dy, dx = max(1, round(SHARE * height)), max(1, round(SHARE * width))
    copies = [images]
    for k in range(1, n):
        turned = images.flip(3) if mirror and k % 2 else images
        around = nf.pad(turned, (dx, dx, dy, dy), mode="reflect" if min(height, width) > max(dx, dy) else "replicate")
        rows = torch.randint(0, 2 * dy + 1, (len(images),), generator=generator).tolist()
        columns = torch.randint(0, 2 * dx + 1, (len(images),), generator=generator).tolist()
        copies.append(
            torch.stack(
                [one[:, y : y + height, x : x + width] for one, y, x in zip(around, rows, columns, strict=True)]
            )
        )
    return torch.cat(copies)
