"""Images of the shortcut zoo: photos of birds, drawn birds, clothes; each with labels and masks of the object."""

from __future__ import annotations

import csv
import gzip
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor

Labelled = tuple[Tensor, Tensor, Tensor]  # images (n, 3, h, w), labels (n,), masks (n, h, w)
CLASSES = {"cub": 20, "fashion": 10, "clothes": 10, "digits": 10}


def data_root() -> Path:
    """Return the folder of the benchmark data."""
    return Path(os.environ["AUDITOR_DATA"])


def cub(classes: tuple[int, ...], split: str, size: int) -> Labelled:
    """Return photos of some classes of CUB, with the boxes of the birds as masks."""
    root = data_root() / "cub20"
    with (root / "boxes.csv").open() as file:
        boxes = {r["image"]: r for r in csv.DictReader(file)}
    folders = sorted(p.name for p in (root / split).iterdir())
    images, labels, masks = [], [], []
    for label, k in enumerate(classes):
        for path in sorted((root / split / folders[k]).glob("*.jpg")):
            picture = Image.open(path).convert("RGB")
            sx, sy = size / picture.width, size / picture.height
            array = np.asarray(picture.resize((size, size), Image.Resampling.BILINEAR)).astype(np.float32) / 255
            images.append(torch.from_numpy(array).permute(2, 0, 1))
            labels.append(label)
            b = {key: float(v) for key, v in boxes[f"{split}/{folders[k]}/{path.name}"].items() if key != "image"}
            mask = torch.zeros(size, size, dtype=torch.bool)
            rows = slice(int(b["y"] * sy), int((b["y"] + b["height"]) * sy) + 1)
            mask[rows, int(b["x"] * sx) : int((b["x"] + b["width"]) * sx) + 1] = True
            masks.append(mask)
    return torch.stack(images), torch.tensor(labels), torch.stack(masks)


def grey(
    name: str, classes: tuple[int, ...], split: str, size: int, per_class: int, seed: int, moved: bool
) -> Labelled:
    """Return clothes or digits: grey and in the middle, or (``moved``) coloured on a ground, at any place."""
    folder = data_root() / ("MNIST" if name == "digits" else "FashionMNIST") / "raw"
    prefix = "train" if split == "train" else "t10k"
    with gzip.open(folder / f"{prefix}-images-idx3-ubyte.gz") as file:
        pixels = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28)
    with gzip.open(folder / f"{prefix}-labels-idx1-ubyte.gz") as file:
        truth = np.frombuffer(file.read(), np.uint8, offset=8)
    rng = np.random.default_rng(seed)
    images, labels, masks = [], [], []
    side = round(size * 0.7) if moved else size
    for label, k in enumerate(classes):
        for i in rng.permutation((truth == k).nonzero()[0])[:per_class]:
            object_ = torch.from_numpy(pixels[i].astype(np.float32) / 255)
            shape = F.interpolate(object_[None, None], (side, side), mode="bilinear")[0, 0]
            light = torch.zeros(size, size)
            if moved:
                top, left = (int(v) for v in rng.integers(0, size - side + 1, 2))
                light[top : top + side, left : left + side] = shape
                ground = torch.from_numpy(rng.normal(0, 0.12, (1, 3, 5, 5)).astype(np.float32))
                ground = F.interpolate(ground, (size, size), mode="bicubic")[0] + float(rng.uniform(0.2, 0.6))
                colour = torch.from_numpy(rng.uniform(0.4, 1, 3).astype(np.float32))[:, None, None]
                images.append((ground * (1 - light) + colour * light).clamp(0, 1))
            else:
                light = shape
                images.append(light.expand(3, size, size).clone())
            masks.append(light > 0.1)
            labels.append(label)
    return torch.stack(images), torch.tensor(labels), torch.stack(masks)


def drawn(n: int, n_classes: int, size: int, seed: int, decides: str) -> Labelled:
    """Return drawn birds on cluttered ground; the class is the shape of the beak, the eye's colour, or the body's.

    Pose, size, colours and light vary; what decides is part of the bird, however small.
    """
    rng = np.random.default_rng(seed)
    images, labels, masks = [], [], []
    for i in range(n):
        k = i % n_classes
        picture, mask = _bird(k, size * 3, rng, decides)
        array = np.asarray(picture.resize((size, size), Image.Resampling.BOX)).astype(np.float32) / 255
        array = np.clip(array * rng.uniform(0.8, 1.15) + rng.normal(0, 0.02, array.shape), 0, 1).astype(np.float32)
        images.append(torch.from_numpy(array).permute(2, 0, 1))
        masks.append(torch.from_numpy(np.asarray(mask.resize((size, size))) > 127))
        labels.append(k)
    return torch.stack(images), torch.tensor(labels), torch.stack(masks)


def _bird(k: int, side: int, rng: np.random.Generator, decides: str) -> tuple[Image.Image, Image.Image]:
    base = rng.uniform(0.25, 0.75, 3).astype(np.float32)
    uneven = torch.from_numpy(rng.normal(0, 0.12, (1, 3, 6, 6)).astype(np.float32))
    ground = (torch.from_numpy(base)[:, None, None] + F.interpolate(uneven, (side, side), mode="bicubic")[0]).clamp(
        0, 1
    )
    picture = Image.fromarray((ground.permute(1, 2, 0).numpy() * 255).astype(np.uint8))
    draw = ImageDraw.Draw(picture)
    for _ in range(int(rng.integers(2, 6))):
        line = [float(v) for v in rng.uniform(0, side, 4)]
        draw.line(line, fill=tuple(int(v) for v in rng.integers(40, 215, 3)), width=int(rng.integers(4, 12)))
    body = tuple(int(v) for v in rng.integers(50, 230, 3))
    if decides == "body":
        tone = np.array(((205, 70, 60), (70, 90, 205), (70, 180, 80), (215, 200, 70))[k])
        body = tuple(int(v) for v in np.clip(tone + rng.normal(0, 22, 3), 0, 255))
    r = side * rng.uniform(0.155, 0.19)
    facing = 1 if rng.random() < 0.5 else -1
    cx, cy = (0.5 - 0.14 * facing + rng.uniform(-0.04, 0.04)) * side, rng.uniform(0.46, 0.66) * side
    draw.ellipse([cx - 1.35 * r, cy - r, cx + 1.35 * r, cy + r], fill=body)
    hx, hy, hr = cx + facing * 1.25 * r, cy - 0.9 * r, 0.78 * r
    draw.ellipse([hx - hr, hy - hr, hx + hr, hy + hr], fill=body)
    _beak(draw, k if decides == "beak" else int(rng.integers(3)), (hx, hy, hr), facing, rng)
    eye, at = (15, 15, 15), (hx + facing * 0.2 * hr, hy - 0.3 * hr)
    radius = 4.5
    if decides == "eye":
        radius = 0.3 * hr
        eye = ((235, 60, 40), (250, 245, 120), (90, 200, 255), (245, 245, 245))[k]
    draw.ellipse([at[0] - radius, at[1] - radius, at[0] + radius, at[1] + radius], fill=eye)
    if decides == "eye":
        draw.ellipse([at[0] - 4, at[1] - 4, at[0] + 4, at[1] + 4], fill=(10, 10, 10))
    mask = Image.new("L", (side, side))
    ImageDraw.Draw(mask).ellipse([cx - 1.6 * r, cy - 1.7 * r, cx + 1.6 * r, cy + 1.2 * r], fill=255)
    return picture, mask


def _beak(
    draw: ImageDraw.ImageDraw, k: int, head: tuple[float, float, float], facing: int, rng: np.random.Generator
) -> None:
    hx, hy, hr = head
    tint = tuple(int(v) for v in np.clip(np.array((220, 140, 40)) + rng.normal(0, 18, 3), 0, 255))
    bx, length, tilt = hx + facing * 0.85 * hr, hr * rng.uniform(1.0, 1.4), rng.uniform(-0.25, 0.25) * hr
    if k == 0:  # a short thick cone
        draw.polygon([(bx, hy - 0.5 * hr), (bx, hy + 0.5 * hr), (bx + facing * 0.8 * length, hy + tilt)], fill=tint)
    elif k == 1:  # a long thin needle
        draw.polygon([(bx, hy - 0.16 * hr), (bx, hy + 0.16 * hr), (bx + facing * 1.5 * length, hy + tilt)], fill=tint)
    else:  # a hook
        tip = (bx + facing * length, hy + tilt)
        draw.polygon([(bx, hy - 0.35 * hr), (bx, hy + 0.2 * hr), tip], fill=tint)
        down = (bx + facing * 0.85 * length, hy + 1.1 * hr)
        draw.polygon([(bx + facing * 0.6 * length, hy), tip, down], fill=tint)
