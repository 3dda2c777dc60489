"""Small models with a known answer to what they rely on: one block of pixels, a mean colour, nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from auditor import Subject

SIZE = (24, 32)
BLOCK = (slice(15, 21), slice(3, 12))  # 54 of 768 pixels: 7%
BASE = torch.rand(3, 6, 9, generator=torch.Generator().manual_seed(3))


class ReadsBlock(nn.Module):
    """Class 1 where the block at its place looks like BASE, else class 0; anywhere with ``anywhere``."""

    def __init__(self, anywhere: bool = False) -> None:
        super().__init__()
        kernel = BASE - BASE.mean()
        self.conv = nn.Conv2d(3, 1, (6, 9), bias=False)
        self.conv.weight.data = (kernel / kernel.square().sum())[None]
        self.anywhere = anywhere

    def forward(self, x: Tensor) -> Tensor:
        score = self.conv(x)
        score = score.amax((2, 3)) if self.anywhere else score[:, :, BLOCK[0].start, BLOCK[1].start]
        return torch.cat([0.6 - score, score - 0.6], 1) * 20


class ReadsColour(nn.Module):
    """Class 1 where red outweighs blue on average."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(50.0))

    def forward(self, x: Tensor) -> Tensor:
        difference = (x[:, 0] - x[:, 2]).mean((1, 2)) * self.scale
        return torch.stack([-difference, difference], 1)


class ReadsNothing(nn.Module):
    """Says class by a hash of the image that no region decides: the sign of a very fine dither of all pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, *SIZE, generator=torch.Generator().manual_seed(5)))

    def forward(self, x: Tensor) -> Tensor:
        score = (x * self.weight).sum((1, 2, 3))[:, None] * 0
        return torch.cat([score, score + 1.0], 1)


def subject(module: nn.Module) -> Subject:
    return Subject(module, input_shape=(3, *SIZE), class_names=["plain", "marked"])


def images(n: int = 40, marked: bool = True, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return noise, half of it with the block at its place, and labels 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    x = 0.3 + 0.4 * torch.rand(n, 3, *SIZE, generator=generator)
    y = torch.arange(n) % 2
    if marked:
        x[y == 1, :, BLOCK[0], BLOCK[1]] = BASE
    return x, y
