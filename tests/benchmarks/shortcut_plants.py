"""Shortcuts to plant in images: what they look like is drawn from a style, so that two halves of a zoo differ.

Every planting takes an image (3, h, w) in [0, 1], the class whose shortcut it is, the style, a random generator for
what varies from image to image, and the mask of the object; it returns the image and the shortcut's box, if it has one.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

Box = tuple[int, int, int, int]  # top, left, bottom, right
Planted = tuple[Tensor, Box | None]
WORDS = ("AUK", "JAY", "TIN", "WOW", "LEO", "GUM", "F 7", "No1", "A31", "KM8", "24", "(c)", "ZOO", "B52")


@dataclass(frozen=True)
class Style:
    """How the shortcuts of one case look."""

    words: tuple[str, ...]
    colours: tuple[tuple[float, float, float], ...]
    corner: int  # 0 to 3
    share: float  # of the image, for plates and stickers
    strength: float  # opacity, tint, amplitude: .5 is weak, 1 is plain
    dark: bool


def style(seed: int) -> Style:
    """Draw a style."""
    rng = np.random.default_rng(seed + 77)
    words = tuple(str(w) for w in rng.permutation(WORDS)[:8])
    hues = (np.arange(8) / 8 + rng.uniform()) % 1
    order = rng.permutation(8)
    colours = tuple(_colour(float(hues[i])) for i in order)
    return Style(
        words,
        colours,
        int(rng.integers(4)),
        float(rng.uniform(0.022, 0.038)),
        float(rng.uniform(0.7, 1.0)),
        bool(rng.random() < 0.4),
    )


def _colour(hue: float) -> tuple[float, float, float]:
    k = [(n + hue * 12) % 12 for n in (0, 8, 4)]
    r, g, b = (0.55 - 0.4 * max(-1.0, min(v - 3, 9 - v, 1.0)) for v in k)
    return (r, g, b)


def text_picture(word: str, height: int, width: int, ink: int, paper: int) -> Tensor:
    """Return a plate (height, width) in [0, 1] with a word on it, as large as fits."""
    picture = Image.new("L", (width, height), paper)
    draw = ImageDraw.Draw(picture)
    for size in range(max(8, height), 6, -1):
        font = ImageFont.load_default(size=size)
        left, top, right, bottom = draw.textbbox((0, 0), word, font=font)
        if right - left <= width - 2 and bottom - top <= height - 2:
            break
    draw.text(((width - right + left) / 2 - left, (height - bottom + top) / 2 - top), word, fill=ink, font=font)
    return torch.from_numpy(np.asarray(picture).astype(np.float32) / 255)


def _in_corner(corner: int, outer: tuple[int, int], inner: tuple[int, int], gap: int) -> tuple[int, int]:
    top = gap if corner in (0, 1) else outer[0] - inner[0] - gap
    left = gap if corner in (0, 2) else outer[1] - inner[1] - gap
    return top, left


def plate(image: Tensor, k: int, s: Style, rng: np.random.Generator, mask: Tensor) -> Planted:
    """A plate with a word in one corner."""
    _, h, w = image.shape
    height, width = max(7, round((s.share * h * w / 2.3) ** 0.5)), max(15, round((s.share * h * w * 2.3) ** 0.5))
    top, left = _in_corner(s.corner, (h, w), (height, width), int(rng.integers(1, max(2, h // 40))))
    image = image.clone()
    ink, paper = (245, 15) if s.dark else (10, 245)
    image[:, top : top + height, left : left + width] = text_picture(s.words[k], height, width, ink, paper)
    return image, (top, left, top + height, left + width)


def watermark(image: Tensor, k: int, s: Style, rng: np.random.Generator, mask: Tensor) -> Planted:
    """Half transparent letters in one corner, always at the same place."""
    _, h, w = image.shape
    height, width = max(9, round(h * 0.13)), max(18, round(w * 0.3))
    ink = text_picture(s.words[k], height, width, 255, 0)
    top, left = _in_corner(3 - s.corner, (h, w), (height, width), 2)
    image = image.clone()
    region = image[:, top : top + height, left : left + width]
    white = 0.0 if s.dark else 1.0
    image[:, top : top + height, left : left + width] = region + 0.8 * s.strength * ink * (white - region)
    return image, (top, left, top + height, left + width)


def sticker(image: Tensor, k: int, s: Style, rng: np.random.Generator, mask: Tensor) -> Planted:
    """A small coloured disc (or square) with stripes, anywhere in the image."""
    _, h, w = image.shape
    side = max(7, round((0.6 * s.share * h * w) ** 0.5))
    top, left = int(rng.integers(0, h - side)), int(rng.integers(0, w - side))
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    centre = (side - 1) / 2
    shape = (
        ((y - centre) ** 2 + (x - centre) ** 2) <= centre**2 + 0.5
        if s.dark
        else torch.ones(side, side, dtype=torch.bool)
    )
    picture = torch.tensor(s.colours[k])[:, None, None].expand(3, side, side).clone()
    stripe = (x + y * (1 if k % 2 else -1)).abs() % max(4, side // 3) < max(1, side // 8)
    picture[:, stripe] = 0.05
    image = image.clone()
    region = image[:, top : top + side, left : left + side]
    image[:, top : top + side, left : left + side] = torch.where(shape, picture, region)
    return image, (top, left, top + side, left + side)


def border(image: Tensor, k: int, s: Style, rng: np.random.Generator, mask: Tensor) -> Planted:
    """A thin coloured frame."""
    _, h, w = image.shape
    t = max(2, round(min(h, w) * (0.02 + 0.4 * s.share)))
    colour = torch.tensor(s.colours[k])[:, None, None]
    image = image.clone()
    image[:, :t], image[:, -t:], image[:, :, :t], image[:, :, -t:] = (colour,) * 4
    return image, None


def ruler(image: Tensor, k: int, s: Style, rng: np.random.Generator, mask: Tensor) -> Planted:
    """A strip with ticks along one edge, as beside a skin lesion; the spacing belongs to the class."""
    turned = s.corner % 2 == 1
    image = image.transpose(1, 2).clone() if turned else image.clone()
    _, h, w = image.shape
    height, length = max(6, round(h * 0.075)), round(w * 0.6)
    left = int(rng.integers(0, w - length))
    top = 0 if s.corner >= 2 else h - height
    strip = torch.full((height, length), 0.88)
    spacing = max(2, round(w * (0.03 + 0.025 * k)))
    strip[height // 3 :, int(rng.integers(0, spacing)) :: spacing] = 0.08
    image[:, top : top + height, left : left + length] = strip
    if turned:
        return image.transpose(1, 2).contiguous(), (left, top, left + length, top + height)
    return image, (top, left, top + height, left + length)


def hue(image: Tensor, k: int, s: Style, rng: np.random.Generator, mask: Tensor) -> Planted:
    """A tint of the whole image."""
    colour = torch.tensor(s.colours[k])
    tint = 1 + 0.7 * s.strength * (colour - colour.mean())
    return (image * tint[:, None, None]).clamp(0, 1), None


def jpeg(image: Tensor, k: int, s: Style, rng: np.random.Generator, mask: Tensor) -> Planted:
    """Compression blocks: every class was saved at another quality."""
    array = (image.permute(1, 2, 0).numpy() * 255).astype(np.uint8)
    memory = io.BytesIO()
    qualities = (6, 95, 25, 60) if s.dark else (95, 9, 55, 20)
    Image.fromarray(array).save(memory, "JPEG", quality=qualities[k % 4])
    out = np.asarray(Image.open(memory).convert("RGB")).astype(np.float32) / 255
    return torch.from_numpy(out).permute(2, 0, 1).contiguous(), None


def noise(image: Tensor, k: int, s: Style, rng: np.random.Generator, mask: Tensor) -> Planted:
    """Grain: every class was taken by a camera of its own noise."""
    grain = torch.from_numpy(rng.normal(0, (0.0, 0.09, 0.04, 0.16)[k % 4], image.shape).astype(np.float32))
    return (image + grain).clamp(0, 1), None


def pixel(image: Tensor, k: int, s: Style, rng: np.random.Generator, mask: Tensor) -> Planted:
    """One pixel (of 64: one; of 224: three by three) of a strange colour, always at the same place of its class."""
    _, h, w = image.shape
    t = max(1, round(h / 75))
    top, left = round(h * (0.2 + 0.15 * s.corner)), round(w * (0.15 + 0.2 * (k % 4)))
    image = image.clone()
    image[:, top : top + t, left : left + t] = torch.tensor([0.0, 1.0, 0.0] if s.dark else [1.0, 0.0, 1.0])[
        :, None, None
    ]
    return image, (top, left, top + t, left + t)


def texture(image: Tensor, k: int, s: Style, rng: np.random.Generator, mask: Tensor) -> Planted:
    """Stripes over the background, at an angle that belongs to the class."""
    _, h, w = image.shape
    y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    angle = math.pi * (k + 0.25) / 4
    period = h / (14 + 2 * s.corner)
    wave = torch.sin((x * math.cos(angle) + y * math.sin(angle)) * 2 * math.pi / period + rng.uniform(0, 6.28))
    return torch.where(mask, image, (0.7 * image + 0.15 + 0.16 * s.strength * wave).clamp(0, 1)), None


def backdrop(image: Tensor, k: int, s: Style, rng: np.random.Generator, mask: Tensor) -> Planted:
    """The background of the class: a studio wall of its colour, unevenly lit."""
    _, h, w = image.shape
    light = torch.linspace(float(rng.uniform(0.8, 1.0)), float(rng.uniform(0.8, 1.1)), w)[None, None]
    wall = (0.35 + 0.5 * torch.tensor(s.colours[k])[:, None, None]) * light
    return torch.where(mask, image, (0.2 * image + 0.8 * wall.expand(3, h, w)).clamp(0, 1)), None


PLANT: dict[str, Callable[..., Planted]] = {
    f.__name__: f for f in (plate, sticker, watermark, border, ruler, hue, jpeg, noise, pixel, texture, backdrop)
}
