"""Activations of a real network on real photos, for the benchmarks: squeezenet1_1 (ImageNet) on CUB photos."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torchvision.models import squeezenet1_1
from torchvision.transforms import functional as tv

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def add_data_root(parser: argparse.ArgumentParser) -> None:
    """Add ``--data-root`` with the environment's AUDITOR_DATA as its default."""
    parser.add_argument("--data-root", type=Path, default=os.environ.get("AUDITOR_DATA"), help="default: $AUDITOR_DATA")


def need(root: Path | None, *parts: str) -> Path:
    """Return root (a Path) when all ``parts`` exist below it, else leave with the reason."""
    missing = [part for part in parts if root is None or not (Path(root) / part).exists()]
    if root is None or missing:
        print(f"skipped: needs {', '.join(missing)} below --data-root (or AUDITOR_DATA)")
        sys.exit(0)
    return Path(root)


def photos(root: Path, n: int, split: str = "train") -> Tensor:
    """Return the first ``n`` CUB photos as normalised (n, 3, 224, 224), going through the classes in turn."""
    files = sorted((root / "cub20" / split).rglob("*.jpg"))
    files = [files[(i * 37) % len(files)] for i in range(min(n, len(files)))]
    images = [tv.center_crop(tv.to_tensor(Image.open(f).convert("RGB")), [224, 224]) for f in files]
    return tv.normalize(torch.stack(images), MEAN, STD)


@torch.no_grad()
def squeezenet_activations(root: Path, channels: int, positions: int, split: str = "train") -> Tensor:
    """Return X (channels, positions): fire9 for 512 channels, fire6 to fire9 side by side for 1792."""
    model = squeezenet1_1()
    model.load_state_dict(torch.load(root / "squeezenet1_1_imagenet.pth", weights_only=True))
    model.eval()
    expected = {512: (12,), 1792: (9, 10, 11, 12)}[channels]
    parts = []
    for batch in photos(root, -(-positions // 169), split).split(32):
        maps, x = [], batch
        for i, layer in enumerate(model.features):
            x = layer(x)
            if i in expected:
                maps.append(x)
        parts.append(torch.cat(maps, dim=1).permute(1, 0, 2, 3).flatten(1))
    X = torch.cat(parts, dim=1)[:, :positions].float().contiguous()
    assert X.shape == (channels, positions), f"only {X.shape[1]} positions in the photos"
    return X
