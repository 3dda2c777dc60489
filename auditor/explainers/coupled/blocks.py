"""Blocks: what the coupled factorization sees of an image: its pixels, one block per channel, and chosen layers.

Large maps are average-pooled first; ``unpooled`` spreads a basis of a pooled layer over the layer's own cells again.
Every block is divided by a scale, so that the largest one does not decide the shared latent alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as nf

from auditor.subject.layers import Layout


@dataclass(frozen=True, slots=True)
class Block:
    """One block: its name, layer (None for pixels), channels and grid after pooling, sign and scale."""

    name: str
    layer: str | None
    channels: int
    grid: tuple[int, int]
    signed: bool = False
    scale: float = 1.0

    @property
    def rows(self) -> int:
        """Values per example."""
        return self.channels * self.grid[0] * self.grid[1]

    def to_json(self) -> dict[str, Any]:
        """Return plain Python for the manifest."""
        return {
            "name": self.name,
            "layer": self.layer,
            "channels": self.channels,
            "grid": list(self.grid),
            "signed": self.signed,
            "scale": self.scale,
        }

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Block:
        """Restore what ``to_json`` gave."""
        return cls(**{**row, "grid": (int(row["grid"][0]), int(row["grid"][1]))})


def pooled_grid(grid: tuple[int, int], side: int) -> tuple[int, int]:
    """Return the grid, no side of it longer than ``side``."""
    return min(grid[0], side), min(grid[1], side)


def pixel_rows(images: Tensor, channel: int, grid: tuple[int, int]) -> Tensor:
    """Return one channel of images in [0, 1], pooled to the grid, as (pixels, examples)."""
    return nf.adaptive_avg_pool2d(images[:, channel : channel + 1], grid).flatten(1).T.contiguous()


def layer_rows(z: Tensor, layout: Layout, grid: tuple[int, int]) -> Tensor:
    """Return a layer's activations, pooled to the grid, as (neurons, examples)."""
    p = layout.to_positions(z)
    maps = p.reshape(p.shape[0], p.shape[1], *layout.grid)
    return nf.adaptive_avg_pool2d(maps, grid).flatten(1).T.contiguous()


def unpooled(basis: Tensor, channels: int, grid: tuple[int, int], full: tuple[int, int]) -> Tensor:
    """Return a basis (neurons, concepts) of a pooled layer on its full grid, (channels * positions, concepts)."""
    maps = basis.T.reshape(basis.shape[1], channels, *grid)
    if grid != full:
        maps = nf.interpolate(maps, size=full, mode="nearest")
    return maps.flatten(1).T.contiguous()


@dataclass(frozen=True, slots=True)
class WholeLayout(Layout):
    """A layer read as one position that holds all its neurons."""

    def to_positions(self, z: Tensor) -> Tensor:
        """Return the activation ``z`` as (batch, neurons, 1)."""
        return Layout.to_positions(self, z).flatten(1).unsqueeze(-1)

    def from_positions(self, p: Tensor, like: Tensor) -> Tensor:
        """Put (batch, neurons, 1) back into the shape of ``like``."""
        return Layout.from_positions(self, p.reshape(p.shape[0], self.channels, self.n_positions), like)


def scale_of(X: Tensor, how: str) -> float:
    """Return what a block is divided by: its norm per example, its mean, or nothing; a zero block is left alone."""
    if how == "none":
        return 1.0
    value = float(X.double().norm()) / X.shape[1] ** 0.5 if how == "norm" else float(X.double().abs().mean())
    return value if value > 0 else 1.0
