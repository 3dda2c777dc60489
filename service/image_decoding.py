"""Images as callers send them: bytes of a file or base64, decoded within limits, as pixels for the model.

Only formats that decode in plain library code are opened (no PostScript, no PDF). The number of pixels is read off the
header and checked before anything is decoded. Of an animation the first frame counts.
"""

from __future__ import annotations

import base64
import binascii
import io
import logging
from typing import Any

import torch
from PIL import Image, ImageFile
from torch import Tensor

from auditor.errors import AuditError, ShapeError
from auditor.service.problems import Problem
from auditor.subject.preprocessing import Preprocessing, from_array, from_pil

log = logging.getLogger(__name__)

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM")
ImageFile.LOAD_TRUNCATED_IMAGES = False
logging.getLogger("PIL").setLevel(logging.WARNING)


def from_base64(text: str) -> bytes:
    """Return the bytes behind base64 or a data URL.

    >>> from_base64("data:image/png;base64,aGk=")
    b'hi'
    """
    if text.startswith("data:"):
        head, comma, text = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise Problem(400, "image: a data URL must be base64: data:image/png;base64,…", code="bad_base64")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        pass
    try:  # line breaks, as the command base64 writes them, and the alphabet of URLs
        plain = "".join(text.split()).replace("-", "+").replace("_", "/")
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise Problem(
            400, "image: this is not base64; send the image file's bytes in base64.", code="bad_base64"
        ) from None


def decode(content: bytes, pre: Preprocessing, max_pixels: int) -> Tensor:
    """Return an image file as pixels (channels, height, width) in [0, 1] for the model."""
    if not content:
        raise Problem(400, "the image is empty; send a PNG, JPEG or other image file.", code="bad_image")
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise Problem(
                    413,
                    f"the image has {width} x {height} pixels, {max_pixels:,} are allowed; make it smaller.",
                    code="too_many_pixels",
                )
            image.load()
            return torch.from_numpy(from_pil(image, pre))
    except Problem:
        raise
    except Image.DecompressionBombError:
        raise Problem(413, "the image has far too many pixels; make it smaller.", code="too_many_pixels") from None
    except ShapeError as error:
        raise Problem(422, " ".join(str(error).split()), code="bad_image") from None
    except (Exception, RecursionError) as error:  # decoders of broken files raise whatever they like
        log.debug("an image was refused: %s", type(error).__name__)
        raise Problem(
            400, "the image cannot be read; send a whole PNG, JPEG or other image file.", code="bad_image"
        ) from None


def from_numbers(values: Any, pre: Preprocessing) -> Tensor:
    """Return nested lists (height, width, channels) of numbers in [0, 1] as pixels."""
    import numpy as np

    try:
        array = np.asarray(values, dtype=np.float32)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise Problem(422, "pixels must be nested lists of numbers of one size.", code="bad_image") from None
    try:
        if array.ndim not in (2, 3):
            raise ShapeError(f"pixels must be (height, width, channels), got {array.ndim} dimensions.")
        return torch.from_numpy(from_array(array[None], pre, "pixels"))[0]
    except AuditError as error:
        raise Problem(422, " ".join(str(error).split()), code="bad_image") from None
