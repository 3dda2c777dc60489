"""Image pixels: a decoded image file converted and resized to what a model takes. Needs numpy and Pillow only.

The service decodes in small processes that never load torch; they and everything else get their pixels here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image, ImageOps

from auditor.errors import ShapeError

ORIENTATION = 0x0112  # tag of EXIF


def model_pixels(image: Image.Image, input_shape: tuple[int, int, int], resize: str) -> np.ndarray[Any, Any]:
    """Return a PIL image as bytes (height, width) or (height, width, 3); 16-bit, palette and CMYK images included.

    ``input_shape`` is the model's (channels, height, width); ``resize`` is ``stretch`` or ``crop``.
    """
    channels, height, width = input_shape
    if image.getexif().get(ORIENTATION, 1) != 1:  # what stands upright is not copied: copies of large images cost
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):  # 16- and 32-bit grey: PIL's own conversion to 8 bits clips
        image = _eight_bits(image)
    if image.mode in ("RGBA", "LA", "PA") or (image.mode == "P" and "transparency" in image.info):
        ground = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(ground, _in_mode(image, "RGBA"))
        del ground
    if channels not in (1, 3):
        raise ShapeError(
            f"the model takes {channels} channels and image files have 1 or 3; give an .npz with arrays instead."
        )
    image = _in_mode(image, "L" if channels == 1 else "RGB")
    if image.size != (width, height):
        if resize == "crop":
            image = ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)
        else:
            image = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(image)


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
