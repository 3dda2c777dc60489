"""Image decoding: the bytes of an image file as pixels for a model, within limits. Needs numpy and Pillow only.

Runs in the processes of the decoder pool. Only formats that decode in plain library code are opened (no PostScript, no
PDF). The number of pixels is read off the header and checked before anything is decoded, and so is the size of a
TIFF's tiles, which may be far larger than the image that they make up. Of an animation the first frame counts.
"""

from __future__ import annotations

import io
import logging
import warnings
from typing import Any

import numpy as np
from PIL import Image, ImageFile

from auditor.errors import ShapeError
from auditor.service.problems import Problem
from auditor.subject.image_pixels import model_pixels

log = logging.getLogger(__name__)

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM")
TILE_WIDTH, TILE_LENGTH = 322, 323  # TIFF's tags
ImageFile.LOAD_TRUNCATED_IMAGES = False
logging.getLogger("PIL").setLevel(logging.WARNING)


def decode_pixels(
    content: bytes, input_shape: tuple[int, int, int], resize: str, max_pixels: int
) -> np.ndarray[Any, Any]:
    """Return an image file as bytes (height, width) or (height, width, 3) for a model of this input shape."""
    if not content:
        raise Problem(400, "the image is empty; send a PNG, JPEG or other image file.", code="bad_image")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                _check_size(image, max_pixels)
                image.load()
                _check_size(image, max_pixels)  # some formats say more once they are read
                return model_pixels(image, input_shape, resize)
    except (Problem, MemoryError):
        raise
    except Image.DecompressionBombError:
        raise Problem(413, "the image has far too many pixels; make it smaller.", code="too_many_pixels") from None
    except ShapeError as error:
        raise Problem(422, " ".join(str(error).split()), code="bad_image") from None
    except (Exception, RecursionError) as error:  # decoders of broken files raise errors of any type
        log.debug("an image was refused: %s", type(error).__name__)
        raise Problem(
            400, "the image cannot be read; send a whole PNG, JPEG or other image file.", code="bad_image"
        ) from None


def _check_size(image: Image.Image, max_pixels: int) -> None:
    """Refuse an image, or a tile of it, with more pixels than allowed."""
    width, height = image.size
    if width * height > max_pixels:
        raise Problem(
            413,
            f"the image has {width} x {height} pixels, {max_pixels:,} are allowed; make it smaller.",
            code="too_many_pixels",
        )
    tags = getattr(image, "tag_v2", {})
    tile = [int(tags.get(tag, 1)) for tag in (TILE_WIDTH, TILE_LENGTH)]
    if tile[0] * tile[1] > max_pixels:
        raise Problem(
            413,
            f"the image has tiles of {tile[0]} x {tile[1]} pixels, {max_pixels:,} are allowed; make them smaller.",
            code="too_many_pixels",
        )
