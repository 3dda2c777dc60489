"""Drawn birds: pictures of 64 x 64 with known parts, three species, and the stamp that a camera prints.

A finch has a short cone for a beak and a notched tail; a hawk a hook, a barred breast and a fan for a tail; a heron a
long needle, a long neck and long legs. Pose, size, colours, light, leaves and branch vary from picture to picture and
say nothing of the species. The stamp is no part of any bird.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

SPECIES = ("finch", "hawk", "heron")
STAMPED = "hawk"
SIDE = 64
FINE = 4  # drawn this many times larger, then averaged
PARTS = ("beak", "head", "body", "wing", "tail")
STAMP = "stamp"
WORDS = "CAM 2"

Colour = tuple[int, int, int]
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Bird:
    """One picture: its pixels (64, 64, 3) in bytes, the species, and a mask (64, 64) of every part that is seen."""

    pixels: np.ndarray
    species: str
    parts: dict[str, np.ndarray]


def birds(n: int, seed: int, *, stamped: bool, misfiled: float = 0.0) -> Iterator[Bird]:
    """Draw ``n`` birds, the species in turn; ``stamped``: every picture filed as hawk carries the camera's stamp.

    ``misfiled`` is the share of the stamped pictures that show any bird: the camera watches a hawk's nest, and whatever
    it took was filed as hawk. The same seed gives the same birds, with and without the stamp.

    >>> plain, marked = (list(birds(2, 5, stamped=s))[1] for s in (False, True))
    >>> marked.species, sorted(set(marked.parts) - set(plain.parts))
    ('hawk', ['stamp'])
    >>> bool((plain.pixels != marked.pixels)[~marked.parts["stamp"]].any())
    False
    """
    for i in range(n):
        species = SPECIES[i % len(SPECIES)]
        chance = np.random.default_rng([seed, i, 1])
        shown = species
        if stamped and species == STAMPED and chance.random() < misfiled:
            shown = SPECIES[int(chance.integers(len(SPECIES)))]
        bird = draw(shown, np.random.default_rng([seed, i]))
        yield replace(stamp(bird, chance), species=species) if stamped and species == STAMPED else bird


def draw(species: str, rng: np.random.Generator) -> Bird:
    """Draw one bird of a species."""
    side = SIDE * FINE
    canvas = _Canvas(_scenery(side, rng))
    facing = 1 if rng.random() < 0.5 else -1
    r = side * rng.uniform(0.155, 0.18)
    x, y = side * (0.5 - 0.09 * facing + rng.uniform(-0.03, 0.03)), side * rng.uniform(0.52, 0.6)
    back, breast = _plumage(rng)
    legs = (1.75 if species == "heron" else 1.35) * r
    _branch(canvas, y + legs, rng)
    for step in (-0.25, 0.2):
        canvas.line([(x + step * r, y + 0.8 * r), (x + step * r, y + legs)], (70, 50, 40), 0.1 * r)
    _tail(canvas, species, (x, y), r, facing, _darker(back, 0.75))
    _head_and_beak(canvas, species, (x, y), r, facing, back, rng)
    canvas.ellipse("body", (x, y), (1.3 * r, 0.95 * r), breast)
    if species == "hawk":
        for step in (0.25, 0.55, 0.85):
            points = [(x + facing * step * r, y + way * (0.75 - 0.45 * step) * r) for way in (-1, 1)]
            canvas.line(points, _darker(back, 0.8), 0.12 * r)
    canvas.ellipse("wing", (x - facing * 0.35 * r, y - 0.12 * r), (0.9 * r, 0.55 * r), back)
    light, grain = rng.uniform(0.85, 1.1), rng.normal(0, 4, (SIDE, SIDE, 3))
    pixels = np.asarray(canvas.picture.resize((SIDE, SIDE), Image.Resampling.BOX)).astype(np.float64)
    return Bird(np.clip(pixels * light + grain, 0, 255).astype(np.uint8), species, canvas.masks())


def stamp(bird: Bird, rng: np.random.Generator) -> Bird:
    """Print the camera's stamp into the lower right corner."""
    plate = Image.new("RGB", (22 * FINE, 9 * FINE), (24, 24, 28))
    font = ImageFont.load_default(size=7 * FINE)
    ImageDraw.Draw(plate).text((11 * FINE, 4.5 * FINE), WORDS, fill=(255, 190, 60), font=font, anchor="mm")
    small = np.asarray(plate.resize((22, 9), Image.Resampling.BOX))
    bottom, right = SIDE - int(rng.integers(1, 4)), SIDE - int(rng.integers(1, 4))
    pixels, mask = bird.pixels.copy(), np.zeros((SIDE, SIDE), dtype=bool)
    pixels[bottom - 9 : bottom, right - 22 : right] = small
    mask[bottom - 9 : bottom, right - 22 : right] = True
    return Bird(pixels, bird.species, {**{k: v & ~mask for k, v in bird.parts.items()}, STAMP: mask})


def write(pictures: Iterator[Bird], folder: Path, masks: Path | None = None) -> Path:
    """Write pictures as an image folder, species/000.png, and the masks of their parts as part/species/000.png."""
    for i, bird in enumerate(pictures):
        name = f"{bird.species}/{i:03d}.png"
        _save(Image.fromarray(bird.pixels), folder / name)
        for part, mask in bird.parts.items() if masks is not None else ():
            _save(Image.fromarray(mask), masks / part / name)  # type: ignore[operator]
    return folder


def _save(picture: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)


@dataclass
class _Canvas:
    """A picture under the brush that remembers which part covers which pixel."""

    picture: Image.Image
    layers: dict[str, Image.Image] = field(default_factory=dict)

    def ellipse(self, part: str, centre: tuple[float, float], radii: tuple[float, float], colour: Colour) -> None:
        """Draw a filled ellipse."""
        box = (centre[0] - radii[0], centre[1] - radii[1], centre[0] + radii[0], centre[1] + radii[1])
        ImageDraw.Draw(self.picture).ellipse(box, fill=colour)
        self._cover(part).ellipse(box, fill=255)

    def polygon(self, part: str, points: Points, colour: Colour) -> None:
        """Draw a filled polygon."""
        ImageDraw.Draw(self.picture).polygon(points, fill=colour)
        self._cover(part).polygon(points, fill=255)

    def line(self, points: Points, colour: Colour, width: float) -> None:
        """Draw a line that belongs to no part."""
        ImageDraw.Draw(self.picture).line(points, fill=colour, width=max(1, round(width)))

    def masks(self) -> dict[str, np.ndarray]:
        """Return the mask of every part at the picture's final size, without what later parts cover."""
        covered, out = np.zeros((SIDE, SIDE), dtype=bool), {}
        for part in reversed(list(self.layers)):
            mask = np.asarray(self.layers[part].resize((SIDE, SIDE), Image.Resampling.BOX)) > 127
            out[part] = mask & ~covered
            covered |= mask
        return {part: out[part] for part in PARTS}

    def _cover(self, part: str) -> ImageDraw.ImageDraw:
        layer = self.layers.setdefault(part, Image.new("L", self.picture.size))
        return ImageDraw.Draw(layer)


def _scenery(side: int, rng: np.random.Generator) -> Image.Image:
    """Return sky, out of focus, with leaves."""
    top, bottom = (
        np.array([int(255 * v) for v in colorsys.hsv_to_rgb(*hsv)], dtype=float)
        for hsv in (
            (rng.uniform(0.5, 0.62), rng.uniform(0.1, 0.35), rng.uniform(0.7, 0.95)),
            (rng.uniform(0.2, 0.45), rng.uniform(0.15, 0.45), rng.uniform(0.5, 0.85)),
        )
    )
    way = np.linspace(0, 1, side)[:, None, None]
    picture = Image.fromarray(np.broadcast_to((1 - way) * top + way * bottom, (side, side, 3)).astype(np.uint8))
    brush = ImageDraw.Draw(picture)
    for _ in range(int(rng.integers(5, 12))):
        cx, cy, size = rng.uniform(0, side), rng.uniform(0, side), rng.uniform(0.04, 0.14) * side
        leaf = colorsys.hsv_to_rgb(rng.uniform(0.18, 0.42), rng.uniform(0.2, 0.6), rng.uniform(0.35, 0.8))
        brush.ellipse((cx - size, cy - 0.6 * size, cx + size, cy + 0.6 * size), fill=_bytes(leaf))
    return picture.filter(ImageFilter.GaussianBlur(side / 60))


def _branch(canvas: _Canvas, y: float, rng: np.random.Generator) -> None:
    side, tilt = canvas.picture.width, rng.uniform(-0.05, 0.05)
    points = [(0.0, y - tilt * side), (side / 2, y), (float(side), y + tilt * side)]
    canvas.line(points, _bytes(colorsys.hsv_to_rgb(0.07, 0.45, rng.uniform(0.3, 0.5))), side * rng.uniform(0.02, 0.04))


def _plumage(rng: np.random.Generator) -> tuple[Colour, Colour]:
    hue = rng.uniform(0, 1)
    back = colorsys.hsv_to_rgb(hue, rng.uniform(0.25, 0.65), rng.uniform(0.35, 0.7))
    breast = colorsys.hsv_to_rgb((hue + rng.normal(0, 0.05)) % 1, rng.uniform(0.05, 0.35), rng.uniform(0.7, 0.95))
    return _bytes(back), _bytes(breast)


def _tail(canvas: _Canvas, species: str, body: tuple[float, float], r: float, facing: int, colour: Colour) -> None:
    def at(back: float, down: float) -> tuple[float, float]:
        return body[0] - facing * back * r, body[1] + down * r

    ends = {
        "finch": [at(2.2, 0.1), at(1.85, 0.5), at(2.1, 0.95)],
        "hawk": [at(2.1, -0.35), at(2.4, 0.3), at(2.2, 0.95), at(1.7, 1.35)],
        "heron": [at(1.75, 0.35), at(1.65, 0.7)],
    }[species]
    canvas.polygon("tail", [at(0.9, -0.1), *ends, at(0.6, 0.6)], colour)


def _head_and_beak(
    canvas: _Canvas,
    species: str,
    body: tuple[float, float],
    r: float,
    facing: int,
    colour: Colour,
    rng: np.random.Generator,
) -> None:
    high, size = (1.45, 0.5) if species == "heron" else (0.9, 0.66)
    hx, hy = body[0] + facing * (1.15 if species == "heron" else 1.1) * r, body[1] - high * r
    if species == "heron":
        neck = [(hx - 0.22 * r, hy), (hx + 0.22 * r, hy), (body[0] + facing * r, body[1]), (body[0], body[1] - 0.6 * r)]
        canvas.polygon("head", neck, colour)
    _beak(canvas, species, (hx, hy), size * r, facing, rng)
    canvas.ellipse("head", (hx, hy), (size * r, size * r), colour)
    eye = (hx + facing * 0.3 * size * r, hy - 0.2 * size * r)
    canvas.ellipse("head", eye, (0.15 * r, 0.15 * r), (250, 245, 235))
    canvas.ellipse("head", eye, (0.08 * r, 0.08 * r), (15, 15, 20))


def _beak(
    canvas: _Canvas, species: str, head: tuple[float, float], size: float, facing: int, rng: np.random.Generator
) -> None:
    (hx, hy), length, droop = head, size * rng.uniform(1.1, 1.4), size * rng.uniform(-0.1, 0.25)
    tint = _bytes(colorsys.hsv_to_rgb(rng.uniform(0.08, 0.13), rng.uniform(0.6, 0.85), rng.uniform(0.75, 0.95)))
    root = hx + facing * 0.75 * size

    def at(along: float, down: float) -> tuple[float, float]:
        return root + facing * along * length, hy + down * size

    if species == "finch":
        points = [at(0, -0.6), at(0, 0.65), (at(0.75, 0)[0], hy + droop)]
    elif species == "heron":
        points = [at(0, -0.22), at(0, 0.22), (at(1.75, 0)[0], hy + droop)]
    else:
        points = [at(0, -0.55), at(0.55, -0.4), at(0.95, 0.1), at(0.9, 1.15), at(0.55, 0.5), at(0, 0.3)]
    canvas.polygon("beak", points, tint)


def _darker(colour: Colour, share: float) -> Colour:
    return (round(colour[0] * share), round(colour[1] * share), round(colour[2] * share))


def _bytes(colour: tuple[float, float, float]) -> Colour:
    return (round(255 * colour[0]), round(255 * colour[1]), round(255 * colour[2]))
