"""What stands in for the pixels a mask does not keep: noise with the statistics of the data, a blur, or other images.

The statistics are gathered shard by shard and merged (`Statistics.of`, `merge`), so a data set of any size streams.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from auditor.errors import DataError, OptionError

Kind = Literal["gaussian", "uniform", "blur", "reference"]


@dataclass(frozen=True, eq=False)
class Statistics:
    """Sufficient statistics of images (C, H, W), float64: what every obfuscation but the blur is made of."""

    count: int
    mean: Tensor
    scatter: Tensor  # sum of squared deviations per component
    low: Tensor
    high: Tensor
    factor: Tensor  # (rank, C, H, W): its Gram matrix approximates the full scatter matrix
    sample: Tensor  # up to `keep` images, a uniform draw
    keys: Tensor  # the random keys that chose them
    rank: int
    keep: int

    @classmethod
    def of(cls, images: Tensor, generator: torch.Generator, rank: int = 0, keep: int = 64) -> Statistics:
        """Return the statistics of one shard (N, C, H, W)."""
        if len(images) == 0:
            raise DataError("obfuscation statistics: the data has no images; give a source with at least two.")
        x = images.double()
        mean = x.mean(0)
        away = x - mean
        keys = torch.rand(len(images), generator=generator, dtype=torch.float64)
        chosen = keys.argsort()[:keep]
        factor = _compressed(away.flatten(1), rank).view(-1, *mean.shape)
        low, high = x.amin(0), x.amax(0)
        scatter = away.square().sum(0)
        return cls(len(images), mean, scatter, low, high, factor, images[chosen].float(), keys[chosen], rank, keep)

    def merge(self, other: Statistics) -> Statistics:
        """Return the statistics of both shards together."""
        n = self.count + other.count
        apart = other.mean - self.mean
        shift = math.sqrt(self.count * other.count / n) * apart
        rows = torch.cat([self.factor, other.factor, shift[None]]).flatten(1)
        keys = torch.cat([self.keys, other.keys])
        chosen = keys.argsort()[: self.keep]
        return Statistics(
            n,
            self.mean + apart * other.count / n,
            self.scatter + other.scatter + shift.square(),
            torch.minimum(self.low, other.low),
            torch.maximum(self.high, other.high),
            _compressed(rows, self.rank).view(-1, *self.mean.shape),
            torch.cat([self.sample, other.sample])[chosen],
            keys[chosen],
            self.rank,
            self.keep,
        )


def _compressed(rows: Tensor, rank: int) -> Tensor:
    """Return at most ``rank`` rows with nearly the same Gram matrix: the leading part of the singular values."""
    if rank == 0 or len(rows) <= rank:
        return rows[:rank]
    # Through the small Gram matrix of the rows: they are few and long.
    size, vectors = torch.linalg.eigh(rows @ rows.T)
    del size  # the singular values are already in vectors^T rows
    leading: Tensor = vectors.T[-rank:] @ rows
    return leading


@dataclass(frozen=True, eq=False)
class Obfuscation:
    """A distribution over replacement images. ``centre`` is mean or lower end, ``spread`` variance or upper end."""

    kind: Kind
    centre: Tensor  # (C, H, W)
    spread: Tensor  # (C, H, W)
    factor: Tensor  # (rank, C, H, W), for gaussian with covariance  factor^T factor; rank 0: independent components
    reference: Tensor  # (M, C, H, W)
    blur_sigma: float = 4.0

    @classmethod
    def fitted(
        cls,
        kind: Kind,
        statistics: Statistics,
        *,
        spread: Literal["pixel", "global"] = "pixel",
        blur_sigma: float = 4.0,
    ) -> Obfuscation:
        """Return the obfuscation of this kind for data with these statistics.

        ``spread="global"`` replaces the per-pixel mean and variance by their averages, as published for photographs.
        """
        if kind == "reference" and len(statistics.sample) < 2:
            raise DataError("obfuscation by a reference set: wanted at least 2 images, got fewer; give more data.")
        mean, variance = statistics.mean, statistics.scatter / max(statistics.count - 1, 1)
        factor = statistics.factor / math.sqrt(max(statistics.count - 1, 1))
        if kind == "uniform":
            mean, variance, factor = statistics.low, statistics.high, factor[:0]
        if spread == "global":
            mean, variance = (part.mean().expand_as(part).clone() for part in (mean, variance))
        reference = statistics.sample if kind == "reference" else statistics.sample[:0]
        return cls(kind, mean.float(), variance.float(), factor.float(), reference, blur_sigma)

    def draw(self, images: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Return replacements: (1, count, C, H, W) shared by all images, or (batch, count, ...) for the blur.

        Gaussian and uniform draws come in mirrored pairs, which leaves their mean exact and halves the noise of
        nearly linear networks.
        """
        shape = tuple(images.shape[1:])
        if self.kind == "blur":
            widths = self.blur_sigma * (0.5 + torch.rand(count, generator=generator))
            return torch.stack([_blurred(images, float(width)) for width in widths], 1)
        if self.kind == "reference":
            order = torch.randperm(len(self.reference), generator=generator)
            return self.reference[order.repeat(-(-count // len(order)))[:count]][None]
        half = -(-count // 2)
        if self.kind == "uniform":
            u = torch.rand(half, *shape, generator=generator) - 0.5
            away = u * (self.spread - self.centre)
            middle = (self.centre + self.spread) / 2
        else:
            middle = self.centre
            if len(self.factor):
                z = torch.randn(half, len(self.factor), generator=generator)
                away = torch.einsum("kr,rchw->kchw", z, self.factor)
            else:
                away = torch.randn(half, *shape, generator=generator) * self.spread.sqrt()
        return (middle + torch.cat([away, -away])[:count])[None]

    def moments(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return mean and variance (1 or batch, C, H, W), and the covariance factor (rank, C, H, W) if there is one."""
        if self.kind == "blur":
            mean = _blurred(images, self.blur_sigma)
            return mean, torch.zeros_like(mean), None
        if self.kind == "reference":
            away = (self.reference - self.reference.mean(0)) / math.sqrt(len(self.reference) - 1)
            return self.reference.mean(0)[None], away.square().sum(0)[None], away
        if self.kind == "uniform":
            return (self.centre + self.spread)[None] / 2, (self.spread - self.centre)[None].square() / 12, None
        if len(self.factor):
            return self.centre[None], self.factor.square().sum(0)[None], self.factor
        return self.centre[None], self.spread[None], None


def _blurred(images: Tensor, sigma: float) -> Tensor:
    """Return a Gaussian blur with reflected borders, one axis after the other."""
    if sigma <= 0:
        raise OptionError(
            f"blur obfuscation: the width must be positive, got {sigma}; give a number of pixels above 0."
        )
    for axis in (-2, -1):
        reach = min(math.ceil(3 * sigma), images.shape[axis] - 1)
        t = torch.arange(-reach, reach + 1, dtype=images.dtype)
        kernel = torch.exp(-0.5 * (t / sigma) ** 2)
        shape = [1, 1, 1, 1]
        shape[axis] = len(kernel)
        padding = (reach, reach, 0, 0) if axis == -1 else (0, 0, reach, reach)
        flat = F.pad(images, padding, mode="reflect").flatten(0, 1)[:, None]
        images = F.conv2d(flat, (kernel / kernel.sum()).view(shape)).view(*images.shape)
    return images
