"""Small networks by name, in blocks that every optimizer can train: ``mlp:128,128``, ``cnn``, ``resnet20``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from auditor.errors import OptionError
from auditor.training.learning_curves import stack


@dataclass(frozen=True, slots=True)
class Architecture:
    """A network for images of ``channels``; ``make(shape, classes, seed)`` gives its blocks."""

    name: str
    channels: int
    side: int
    make: Callable[[tuple[int, int, int], int, int], list[nn.Module]]


def architecture(spec: str) -> Architecture:
    """Return the architecture of a name.

    >>> architecture("mlp:32,16").name, architecture("resnet20").channels
    ('mlp:32,16', 3)
    """
    name, _, rest = spec.partition(":")
    if name == "mlp":
        widths = _widths(rest, spec)
        return Architecture(spec, 1, 28, lambda shape, classes, seed: mlp(shape, widths, classes, seed))
    if name in ("cnn", "resnet20") and not rest:
        make = cnn if name == "cnn" else resnet20
        return Architecture(name, 1 if name == "cnn" else 3, 28 if name == "cnn" else 32, make)
    raise OptionError(
        f"train: want a registered model (models:/name/1) or an architecture (mlp:128,128, cnn, resnet20), got "
        f"{spec!r}."
    )


def _widths(text: str, spec: str) -> list[int]:
    parts = text.split(",") if text else ["128", "128"]
    if not all(part.strip().isdecimal() and 0 < int(part) <= 100_000 for part in parts):
        raise OptionError(f"train: mlp wants the widths of its hidden layers, as in mlp:128,128, got {spec!r}.")
    return [int(part) for part in parts]


def mlp(shape: tuple[int, int, int], widths: Sequence[int], classes: int, seed: int) -> list[nn.Module]:
    """Return fully connected layers, one per block; the first flattens the image."""
    with torch.random.fork_rng(devices=[]):
        blocks = stack([shape[0] * shape[1] * shape[2], *widths, classes], seed)
    first = blocks[0]
    parts = list(first) if isinstance(first, nn.Sequential) else [first]
    return [nn.Sequential(nn.Flatten(), *parts), *blocks[1:]]


def cnn(shape: tuple[int, int, int], classes: int, seed: int) -> list[nn.Module]:
    """Return two convolutions and two fully connected layers, in four blocks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        features = (shape[1] // 4) * (shape[2] // 4) * 32
        return [
            nn.Sequential(nn.Conv2d(shape[0], 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Flatten(), nn.Linear(features, 64), nn.ReLU()),
            nn.Linear(64, classes),
        ]


class Residual(nn.Module):
    """Two 3 x 3 convolutions and a shortcut; a new width goes through a 1 x 1 convolution."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        same = before == width and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(before, width, 1, stride, bias=False)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both ways, after a ReLU."""
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


def resnet20(shape: tuple[int, int, int], classes: int, seed: int) -> list[nn.Module]:
    """Return ResNet-20 in two blocks, cut after the second stage."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        stem = [nn.Conv2d(shape[0], 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        first = [Residual(16, 16, 1) for _ in range(3)]
        second = [Residual(16, 32, 2), Residual(32, 32, 1), Residual(32, 32, 1)]
        third = [Residual(32, 64, 2), Residual(64, 64, 1), Residual(64, 64, 1)]
        top = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)]
        return [nn.Sequential(*stem, *first, *second), nn.Sequential(*third, *top)]
