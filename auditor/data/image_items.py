"""Image items: one image as a program holds it, as pixels for a model and as bytes for a digest.

An item is a PIL image, an array or tensor of (height, width), (height, width, channels) or (channels, height, width), a
path, an encoded file as bytes, or a mapping with ``bytes`` or ``path`` (as tables of images have).
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from auditor.errors import AuditError, DataError, OptionError
from auditor.subject.image_pixels import ORIENTATION
from auditor.subject.preprocessing import Preprocessing, from_array, from_pil, read_image

Array = np.ndarray[Any, Any]
ROUNDING = 1e-3  # by how much pixels may leave [0, 1] when mean and std are undone: float16 rounds so much
LONGEST_PATH = 4096


@dataclass(frozen=True, slots=True)
class Normalisation:
    """Mean and std, per channel, that images have had applied to them already.

    >>> Normalisation((0.5,), (0.25,)).undone(np.array([[[[-2.0, 0.0, 2.0]]]])).ravel().tolist()
    [0.0, 0.5, 1.0]
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, mean: Any, std: Any) -> Normalisation | None:
        """Return it from numbers or sequences; None where neither is given."""
        if mean is None and std is None:
            return None
        means, stds = (
            tuple(float(v) for v in np.ravel(np.asarray(default if x is None else x)))
            for x, default in ((mean, 0.0), (std, 1.0))
        )
        n = max(len(means), len(stds))
        means, stds = (x * n if len(x) == 1 else x for x in (means, stds))
        if len(means) != len(stds) or min(stds) <= 0 or not np.isfinite((*means, *stds)).all():
            raise OptionError(
                f"mean and std that images have had applied: want a finite number per channel and std above 0, got "
                f"{means} and {stds}."
            )
        return cls(means, stds)

    def undone(self, images: Array) -> Array:
        """Return images (batch, channels, height, width), or with the channels last, as pixels."""
        images = images if images.ndim == 4 else images[:, None]
        axis = 1 if len(self.mean) in (1, images.shape[1]) or images.shape[-1] != len(self.mean) else 3
        if len(self.mean) not in (1, images.shape[axis]):
            raise DataError(
                f"mean and std of {len(self.mean)} channels cannot be undone in images of shape {images.shape[1:]}."
            )
        shape = [-1 if k == axis else 1 for k in range(4)]
        mean, std = (np.asarray(v, dtype=np.float64).reshape(shape) for v in (self.mean, self.std))
        pixels = images * std + mean
        outside = (pixels < 0) & (pixels > -ROUNDING) | (pixels > 1) & (pixels < 1 + ROUNDING)
        return np.where(outside, pixels.clip(0, 1), pixels).astype(np.float32)


def as_array(item: Any) -> Array:
    """Return an array or tensor as numpy, wherever it lies and whatever its precision."""
    if isinstance(item, torch.Tensor):
        item = item.detach()
        numbers: Array = (item.float() if item.dtype is torch.bfloat16 else item).numpy(force=True)
        return numbers
    return np.asarray(item)


def is_array(item: Any) -> bool:
    """Whether it is an array or tensor of numbers."""
    return isinstance(item, torch.Tensor) or (isinstance(item, np.ndarray) and item.dtype.kind in "buif")


def is_image(item: Any) -> bool:
    """Whether an item can be an image."""
    if isinstance(item, Image.Image):
        return True
    if is_array(item):
        return item.ndim in (2, 3) and min(item.shape) > 0
    if isinstance(item, Mapping):
        return not item.keys() - {"bytes", "path"} and any(is_image(part) for part in item.values())
    if isinstance(item, (bytes, bytearray)):
        return len(item) > 8
    if isinstance(item, Path):
        return True
    return isinstance(item, str) and len(item) < LONGEST_PATH and Path(item).expanduser().is_file()


def pixels_of(item: Any, pre: Preprocessing, applied: Normalisation | None, where: str) -> Array:
    """Return an item as float32 (channels, height, width) in [0, 1], as large as the model takes it."""
    if isinstance(item, Mapping):
        item = item.get("bytes") or item.get("path")
    if isinstance(item, (str, Path)):
        return read_image(Path(item).expanduser(), pre)
    if isinstance(item, (bytes, bytearray)):
        return _decoded(bytes(item), pre, where)
    if isinstance(item, Image.Image):
        return from_pil(item, pre)
    if isinstance(item, (list, tuple)):  # rows of a table that went through a file
        item = np.stack([np.stack([np.asarray(cell) for cell in row]) for row in item])
    batch = as_array(item)[None]
    if applied is not None and batch.dtype.kind == "f":
        batch = applied.undone(batch)
    pixels: Array = from_array(batch, pre, where)[0]
    return pixels


def _decoded(content: bytes, pre: Preprocessing, where: str) -> Array:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content)) as picture:
                picture.load()
                return from_pil(picture, pre)
    except AuditError:
        raise
    except Exception as error:  # a damaged file fails in the decoder's own way
        raise DataError(f"{where}: not a readable image ({str(error)[:100]}).") from error


def content_of(item: Any, label: str) -> Iterator[bytes]:
    """Yield every byte of an item that matters, its label with it."""
    if isinstance(item, Mapping):
        item = item.get("bytes") or item.get("path")
    if isinstance(item, Image.Image):
        yield f"{item.mode}|{item.size}|{label}".encode()
        yield item.tobytes()
        if item.mode == "P":
            yield bytes(item.getpalette() or ())
        if item.getexif().get(ORIENTATION, 1) != 1:
            yield f"orientation {item.getexif()[ORIENTATION]}".encode()
    elif isinstance(item, (str, Path, bytes, bytearray)):
        yield f"file|{label}".encode()
        try:
            yield Path(item).expanduser().read_bytes() if isinstance(item, (str, Path)) else bytes(item)
        except OSError:
            yield b"missing"
    else:
        array = as_array(item)
        yield f"{array.dtype}|{array.shape}|{label}".encode()
        yield np.ascontiguousarray(array).tobytes()


def size_of(item: Any) -> tuple[int, int] | None:
    """Return width and height of an image before it is resized for a model; None where that is not known."""
    if isinstance(item, Image.Image):
        return item.size
    if isinstance(item, (str, Path)):
        try:
            with Image.open(Path(item).expanduser()) as image:
                return image.size
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            return None
    return None


def is_same(a: Any, b: Any) -> bool:
    """Whether two readings of an item gave the same image."""
    return list(content_of(a, "")) == list(content_of(b, ""))


def bytes_of(item: Any) -> int:
    """Return how much memory an item takes, about."""
    if isinstance(item, Image.Image):
        return item.width * item.height * len(item.getbands())
    if is_array(item):
        return int(as_array(item).nbytes)
    return len(item) if isinstance(item, (bytes, bytearray)) else 1024
