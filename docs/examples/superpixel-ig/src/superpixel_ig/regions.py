"""Superpixels by k-means in colour and position, started on a grid (the idea of SLIC, without its search windows)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def grid_of(n_regions: int, size: tuple[int, int]) -> tuple[int, int]:
    """Return rows and columns of a grid of about ``n_regions`` cells that are nearly square, at least one pixel each.

    >>> grid_of(16, (8, 8)), grid_of(6, (13, 17)), grid_of(9, (1, 5))
    ((4, 4), (2, 3), (1, 5))
    """
    h, w = size
    rows = min(h, max(1, round(math.sqrt(n_regions * h / w))))
    return rows, min(w, max(1, round(n_regions / rows)))


def superpixels(image: Tensor, n_regions: int, compactness: float = 2.0, steps: int = 5) -> Tensor:
    """Return the region (height, width) of every pixel of an image (channels, height, width) in [0, 1].

    Region ``k`` begins as cell ``k`` of the grid, so equal numbers mean about equal places in all images. A large
    ``compactness`` keeps the grid, a small one follows the colours.
    """
    _, h, w = image.shape
    rows, columns = grid_of(n_regions, (h, w))
    y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    labels = (y * rows // h) * columns + x * columns // w
    place = torch.stack([(y + 0.5) * rows / h, (x + 0.5) * columns / w]) * compactness
    points = torch.cat([image.detach().cpu().double(), place.double()]).flatten(1).T  # (pixels, channels + 2)
    flat = labels.flatten()
    for _ in range(steps):
        sums = torch.zeros(rows * columns, points.shape[1], dtype=torch.float64).index_add_(0, flat, points)
        counts = flat.bincount(minlength=rows * columns)
        distance = torch.cdist(points, sums / counts.clamp_min(1)[:, None])
        distance[:, counts == 0] = math.inf  # an emptied region stays empty
        flat = distance.argmin(1)
    return flat.reshape(h, w)
