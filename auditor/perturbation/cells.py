"""How an image of C x H x W components is cut into the cells of a relevance map.

One cell per component, per pixel (all channels together), per field of a coarser grid, or per superpixel. A mask over
m cells is expanded to the image, and a gradient on the image is gathered back onto the cells: the two are adjoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from auditor.errors import OptionError


@dataclass(frozen=True, eq=False)
class Partition:
    """``labels`` (1 or batch, C*H*W) name the cell of each component; None when every component is its own cell."""

    shape: tuple[int, int, int]
    size: int
    labels: Tensor | None = None
    layout: tuple[int, int] | None = None  # rows and columns, where the cells are a grid

    def expand(self, s: Tensor, images: Tensor) -> Tensor:
        """Return masks (rows, C, H, W) for cell masks ``s`` (rows, m); ``images`` (rows,) says whose cells they are."""
        flat = s if self.labels is None else s.gather(1, self._labels_of(images))
        return flat.view(-1, *self.shape)

    def gather(self, grad: Tensor, images: Tensor) -> Tensor:
        """Return (rows, m): the sum of ``grad`` (rows, C, H, W) over each cell."""
        flat = grad.reshape(len(grad), -1)
        if self.labels is None:
            return flat
        return flat.new_zeros(len(flat), self.size).scatter_add_(1, self._labels_of(images), flat)

    def heatmap(self, s: Tensor, image: int = 0, side: int = 64) -> Tensor:
        """Return an (m,) map as a picture: the grid of cells, else pixels (channels averaged) thinned to ``side``."""
        if self.layout is not None:
            return s.view(self.layout)
        full = self.expand(s[None], torch.tensor([image]))[0].mean(0)
        small = (min(full.shape[0], side), min(full.shape[1], side))
        return full if small == full.shape else F.adaptive_avg_pool2d(full[None, None], small)[0, 0]

    def _labels_of(self, images: Tensor) -> Tensor:
        assert self.labels is not None
        return self.labels.expand(len(images), -1) if len(self.labels) == 1 else self.labels[images]


@dataclass(frozen=True, eq=False)
class Regions(Partition):
    """Cells of a grid, mixed: a coefficient stands for a soft region around its cell, and a mask is a sum of regions.

    ``rows`` and ``columns`` are symmetric and doubly stochastic, so masks stay in [0, 1] and keep their sum, and
    spreading is its own adjoint.
    """

    rows: Tensor | None = None
    columns: Tensor | None = None

    @classmethod
    def around(cls, cells: Partition, width: float) -> Regions:
        """Return soft regions, Gaussians of ``width`` cells, over a grid of cells."""
        if cells.layout is None:
            raise OptionError("relevance regions: soft regions need cells in a grid; take cells=grid or smooth=0.")
        rows, columns = (_spreading(n, width) for n in cells.layout)
        return cls(cells.shape, cells.size, cells.labels, cells.layout, rows, columns)

    def spread(self, s: Tensor) -> Tensor:
        """Return masks of cells (…, m) for coefficients of regions (…, m)."""
        assert self.layout is not None
        assert self.rows is not None
        assert self.columns is not None
        on_grid = self.rows.to(s) @ s.reshape(-1, *self.layout) @ self.columns.to(s)
        return on_grid.reshape(s.shape)

    def expand(self, s: Tensor, images: Tensor) -> Tensor:
        """Return masks (rows, C, H, W) for coefficients (rows, m)."""
        return super().expand(self.spread(s), images)

    def gather(self, grad: Tensor, images: Tensor) -> Tensor:
        """Return the gradient by the coefficients (rows, m) of one by the image."""
        return self.spread(super().gather(grad, images))


def _spreading(n: int, width: float) -> Tensor:
    """Return a Gaussian over n cells in a row, mirrored at the ends; rows and columns sum to one."""
    reach = min(n, max(1, math.ceil(4 * width)))
    bell = torch.exp(-torch.arange(-reach, reach + 1, dtype=torch.float64).square() / (2 * width**2))
    bell /= bell.sum()
    matrix = torch.zeros(n, n, dtype=torch.float64)
    for shift, weight in zip(range(-reach, reach + 1), bell, strict=True):
        at = (torch.arange(n) + shift) % (2 * n)  # a row of cells and its mirror image, again and again
        matrix[torch.arange(n), torch.where(at < n, at, 2 * n - 1 - at)] += weight
    return matrix.float()


def components(shape: tuple[int, int, int]) -> Partition:
    """Return one cell per component (pixel and channel)."""
    return Partition(shape, math.prod(shape), layout=shape[1:] if shape[0] == 1 else None)


def pixels(shape: tuple[int, int, int]) -> Partition:
    """Return one cell per pixel, its channels kept or lost together."""
    c, h, w = shape
    return components(shape) if c == 1 else Partition(shape, h * w, torch.arange(h * w).repeat(c)[None], (h, w))


def grid(shape: tuple[int, int, int], rows: int, columns: int) -> Partition:
    """Return rows x columns rectangular cells, as even as the size allows."""
    c, h, w = shape
    if not (1 <= rows <= h and 1 <= columns <= w):
        raise OptionError(
            f"relevance grid: {rows}x{columns} cells do not fit an image of {h}x{w} pixels; ask for at most {h}x{w}."
        )
    if (rows, columns) == (h, w):
        return pixels(shape)
    row, column = torch.arange(h) * rows // h, torch.arange(w) * columns // w
    labels = (row[:, None] * columns + column).flatten().repeat(c)[None]
    return Partition(shape, rows * columns, labels, (rows, columns))


def superpixels(images: Tensor, count: int, compactness: float = 0.2, n_steps: int = 8) -> Partition:
    """Return about ``count`` cells per image that follow its colours: k-means on colour and position (after SLIC).

    ``images`` is (batch, C, H, W) in [0, 1]; ``compactness`` weighs one cell width against a full swing of one channel.
    A pixel chooses among the nine centres around its position, so the work does not grow with ``count``. Cells need not
    be connected, and one may come out empty: its gradient is zero, so it is never switched on.
    """
    b, c, h, w = images.shape
    if not 1 <= count <= h * w:
        raise OptionError(f"superpixels: {count} cells do not fit an image of {h}x{w} pixels; ask for 1 to {h * w}.")
    rows = max(1, min(h, round(math.sqrt(count * h / w))))
    columns = max(1, min(w, round(count / rows)))
    start = grid((1, h, w), rows, columns)
    m = rows * columns
    position = torch.stack(torch.meshgrid(torch.arange(h) * rows / h, torch.arange(w) * columns / w, indexing="ij"))
    features = torch.cat([images.detach(), compactness * position.to(images)[None].expand(b, -1, -1, -1)], 1).flatten(2)
    home = torch.arange(h * w) if start.labels is None else start.labels[0]
    steps = torch.tensor([[i, j] for i in (-1, 0, 1) for j in (-1, 0, 1)])
    near_row = (home // columns)[:, None] + steps[:, 0]
    near_column = (home % columns)[:, None] + steps[:, 1]
    inside = (near_row >= 0) & (near_row < rows) & (near_column >= 0) & (near_column < columns)
    near = torch.where(inside, near_row * columns + near_column, home[:, None])  # (pixels, 9)
    labels = home.repeat(b, 1)
    for _ in range(n_steps):
        index = labels[:, None].expand(-1, c + 2, -1)
        total = features.new_zeros(b, c + 2, m).scatter_add_(2, index, features)
        weight = features.new_zeros(b, m).scatter_add_(1, labels, torch.ones_like(features[:, 0]))
        centre = torch.where(weight[:, None] > 0, total / weight[:, None].clamp_min(1), torch.inf)
        distance = (features[..., None] - centre[:, :, near]).square().sum(1)  # (batch, pixels, 9)
        labels = near.expand(b, -1, -1).gather(2, distance.argmin(2, keepdim=True)).squeeze(2)
    return Partition((c, h, w), m, labels.repeat(1, c))


def refined(coarse: Partition, fine: Partition, s: Tensor, images: Tensor, k: Tensor) -> Tensor:
    """Carry masks ``s`` (rows, m) over to a finer partition, scaled down where the sum would exceed ``k`` (rows,)."""
    mask = coarse.expand(s, images)
    share = fine.gather(torch.ones_like(mask), images).clamp_min(1)
    finer = fine.gather(mask, images) / share
    total = finer.double().sum(1)
    return finer * (k / total.clamp_min(1e-12)).clamp_max(1).to(finer.dtype)[:, None]
