"""Image pixels: a decoded image file converted and resized to what a model takes. Needs numpy and Pillow only.

The service decodes in small processes that never load torch; they and everything else get their pixels here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from auditor.errors import OptionError, ShapeError

ORIENTATION = 0x0112  # tag of EXIF
RULE = re.compile(r"(stretch|crop)(?:-(\d{1,5}))?(?:-(nearest|bilinear|bicubic|lanczos|box|hamming))?")
LARGEST = 4  # times the model's size, to which an image is scaled before it is cropped


@dataclass(frozen=True, slots=True)
class Resizing:
    """How an image comes to a model's size: stretched to it, or cropped from the middle, maybe of a larger image.

    ``crop`` scales as little as fills the size. ``crop-256`` scales the short side to 256 first, ``stretch-256`` both;
    a name of an interpolation may follow, ``bilinear`` otherwise.

    >>> Resizing.of("crop-256-bicubic", (224, 224))
    Resizing(way='crop', side=256, filter='bicubic')
    """

    way: str
    side: int | None
    filter: str

    @classmethod
    def of(cls, rule: str, size: tuple[int, int]) -> Resizing:
        """Parse a rule for a model's (height, width); anything else is an error that lists the rules."""
        match = RULE.fullmatch(rule)
        side = int(match[2]) if match and match[2] else None
        if match is None or (side is not None and not max(size) <= side <= LARGEST * max(size)):
            raise OptionError(
                "resize must be one of stretch, crop, crop-N or stretch-N with N pixels from the model's size to "
                f"{LARGEST} times that, with -bicubic or another interpolation behind it, got {rule!r}."
            )
        return cls(match[1], side, match[3] or "bilinear")

    def apply(self, image: Image.Image, size: tuple[int, int]) -> Image.Image:
        """Return an image of (height, width) = ``size``."""
        height, width = size
        resample = Image.Resampling[self.filter.upper()]
        if self.side is None:
            if image.size == (width, height):
                return image
            if self.way == "crop":
                return ImageOps.fit(image, (width, height), resample)
            return image.resize((width, height), resample)
        w, h = image.size
        short = min(w, h)
        scaled = (self.side,) * 2
        if self.way == "crop":  # the long side is rounded down, as torchvision does
            scaled = (self.side, self.side * h // w) if w <= h else (self.side * w // h, self.side)
        if (short, scaled) != (self.side, image.size):
            image = image.resize(scaled, resample)
        left, top = round((scaled[0] - width) / 2.0), round((scaled[1] - height) / 2.0)
        return image.crop((left, top, left + width, top + height))


def model_pixels(image: Image.Image, input_shape: tuple[int, int, int], resize: str) -> np.ndarray[Any, Any]:
    """Return a PIL image as bytes (height, width) or (height, width, 3 or 4); 16-bit, palette and CMYK images included.

    ``input_shape`` is the model's (channels, height, width); ``resize`` is a rule of `Resizing`.
    """
    channels = input_shape[0]
    if image.getexif().get(ORIENTATION, 1) != 1:  # what stands upright is not copied: copies of large images cost
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):  # 16- and 32-bit grey: PIL's own conversion to 8 bits clips
        image = _eight_bits(image)
    if channels == 4:
        return _sized(_in_mode(image, "RGBA"), input_shape, resize)
    if image.mode in ("RGBA", "LA", "PA") or (image.mode == "P" and "transparency" in image.info):
        ground = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(ground, _in_mode(image, "RGBA"))
        del ground
    if channels not in (1, 3):
        raise ShapeError(
            f"the model takes {channels} channels and image files have 1, 3 or 4; give arrays (an .npz) instead."
        )
    return _sized(_in_mode(image, "L" if channels == 1 else "RGB"), input_shape, resize)


def _sized(image: Image.Image, input_shape: tuple[int, int, int], resize: str) -> np.ndarray[Any, Any]:
    size = input_shape[1:]
    return np.asarray(Resizing.of(resize, size).apply(image, size))


def unit_interval(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return bytes (height, width) or (height, width, 3) as float32 (channels, height, width) in [0, 1].

    >>> unit_interval(np.array([[0, 51, 255]], np.uint8)).round(3).tolist()
    [[[0.0, 0.20000000298023224, 1.0]]]
    """
    array = pixels.astype(np.float32) / 255.0
    return np.ascontiguousarray(array[None] if array.ndim == 2 else array.transpose(2, 0, 1))


def _in_mode(image: Image.Image, mode: str) -> Image.Image:
    return image if image.mode == mode else image.convert(mode)


def _eight_bits(image: Image.Image) -> Image.Image:
    """Return 16- or 32-bit grey, or floats, as 8-bit grey."""
    grey = np.array(image, dtype=np.float32)
    grey /= 65535.0 if image.mode.startswith("I") else max(1.0, float(grey.max()))
    np.clip(grey, 0, 1, out=grey)
    grey *= 255
    return Image.fromarray(grey.round(out=grey).astype(np.uint8))
