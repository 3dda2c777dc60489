"""Pixels: from any usual form of an image to checked tensors in [0, 1], and the preprocessing that follows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from auditor.errors import DataError, OptionError, ShapeError
from auditor.subject.image_pixels import Resizing, model_pixels, unit_interval


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """What stands between an image file and the network: channels, size, resize rule, mean and std.

    >>> Preprocessing.of((3, 32, 32), mean=0.5, std=0.25, resize="stretch").mean
    (0.5, 0.5, 0.5)
    """

    input_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: str = "stretch"  # a rule of `Resizing`: stretch to the size, or scale the short side and crop the centre

    @classmethod
    def of(
        cls,
        input_shape: tuple[int, ...],
        mean: float | Sequence[float] | None,
        std: float | Sequence[float] | None,
        resize: str,
    ) -> Preprocessing:
        """Fill in defaults and check every value."""
        c, h, w = input_shape
        Resizing.of(resize, (h, w))
        means, stds = _per_channel("mean", mean, c, 0.0), _per_channel("std", std, c, 1.0)
        if min(stds) <= 0:
            raise OptionError(
                f"std must be positive in every channel, got {stds}; mean and std are those of pixels in [0, 1]."
            )
        return cls((c, h, w), means, stds, resize)

    @property
    def shows_all(self) -> bool:
        """Whether the model gets the whole image, stretched to its size, and not its middle."""
        rule = Resizing.of(self.resize, self.input_shape[1:])
        return rule.way == "stretch" and rule.side is None

    def normalise(self, x: Tensor) -> Tensor:
        """Apply mean and std to pixels in [0, 1]."""
        mean = torch.tensor(self.mean, dtype=x.dtype, device=x.device)[:, None, None]
        std = torch.tensor(self.std, dtype=x.dtype, device=x.device)[:, None, None]
        return (x - mean) / std

    def to_json(self) -> dict[str, Any]:
        """Return the fields of ``subject.json``."""
        return {
            "input_shape": list(self.input_shape),
            "mean": list(self.mean),
            "std": list(self.std),
            "resize": self.resize,
        }


def _per_channel(what: str, value: float | Sequence[float] | None, channels: int, default: float) -> tuple[float, ...]:
    if value is None:
        return (default,) * channels
    values = (float(value),) if isinstance(value, (int, float)) else tuple(float(v) for v in value)
    if len(values) == 1:
        values *= channels
    if len(values) != channels or not np.isfinite(values).all():
        raise OptionError(f"{what} must be one finite number or {channels} (one per channel), got {values}.")
    return values


def read_image(path: Path, pre: Preprocessing) -> np.ndarray[Any, Any]:
    """Return an image file as float32 (channels, height, width) in [0, 1], converted and resized for the model."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                image.load()
                return from_pil(image, pre)
    except FileNotFoundError:
        raise DataError(f"image {path}: no such file; give the path of a PNG, JPEG or other image.") from None
    except IsADirectoryError:
        raise DataError(f"image {path}: this is a folder; give the path of one image.") from None
    except (
        UnidentifiedImageError,
        OSError,
        ValueError,
        SyntaxError,
        EOFError,
        Image.DecompressionBombError,
        Image.DecompressionBombWarning,
    ) as error:
        raise DataError(
            f"image {path}: not a readable image ({type(error).__name__}: {str(error)[:100]}); "
            "give a PNG, JPEG or other image."
        ) from error


def from_pil(image: Image.Image, pre: Preprocessing) -> np.ndarray[Any, Any]:
    """Return a PIL image as float32 (channels, height, width) in [0, 1]; 16-bit, palette and CMYK images included."""
    return unit_interval(model_pixels(image, pre.input_shape, pre.resize))


def from_array(array: np.ndarray[Any, Any], pre: Preprocessing, where: str) -> np.ndarray[Any, Any]:
    """Return a batch of arrays as float32 (batch, channels, height, width) in [0, 1]; the size must be the model's.

    uint8 is divided by 255; floats must lie in [0, 1] already. (N, H, W), (N, H, W, C) and (N, C, H, W) are understood.
    """
    c, h, w = pre.input_shape
    shape = tuple(array.shape)
    if array.ndim == 3 and c == 1:
        array = array[:, None]
    elif array.ndim == 4 and shape[1:] == (c, h, w):
        pass
    elif array.ndim == 4 and shape[1:] == (h, w, c):
        array = array.transpose(0, 3, 1, 2)
    if tuple(array.shape[1:]) != (c, h, w):
        raise ShapeError(
            f"{where}: images must be (N, {h}, {w}, {c}) or (N, {c}, {h}, {w}) for this model, got {shape}; "
            "resize or convert them, or give an image folder, which is resized on the way."
        )
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array, dtype=np.float32) / 255.0
    if array.dtype == np.bool_ or np.issubdtype(array.dtype, np.number):
        out = np.array(array, dtype=np.float32, order="C")  # a copy: streamed arrays are read-only
        low, high = (float(out.min()), float(out.max())) if out.size else (0.0, 0.0)
        if not (np.isfinite(low) and np.isfinite(high)):
            raise DataError(f"{where}: images hold NaN or infinite values; clean them first.")
        if low < 0 or high > 1:
            raise DataError(
                f"{where}: float images must lie in [0, 1], got {low:.3g} to {high:.3g}; undo mean and std (the "
                "model's own preprocessing applies them to pixels; open_data(…, mean=…, std=…) does it), or store "
                "uint8."
            )
        return out
    raise DataError(f"{where}: images must be uint8 or float, got {array.dtype}.")


def as_pixels(images: Any, pre: Preprocessing) -> Tensor:
    """Return tensors, arrays, PIL images or lists of them as pixels (batch, channels, height, width) in [0, 1]."""
    if isinstance(images, Image.Image):
        images = [images]
    if isinstance(images, Tensor):
        x = images if images.ndim == 4 else images[None]
        if x.dtype == torch.uint8:
            return torch.from_numpy(from_array(x.numpy(force=True), pre, "images"))
        if tuple(x.shape[1:]) != pre.input_shape:
            raise ShapeError(
                f"images must be (batch, {', '.join(map(str, pre.input_shape))}) like the model's input, "
                f"got {tuple(x.shape)}."
            )
        low, high = (float(x.min()), float(x.max())) if x.numel() else (0.0, 0.0)
        if not (low >= 0 and high <= 1):  # NaN lands here too
            raise DataError(
                f"images must be pixels in [0, 1], got {low:.3g} to {high:.3g}; the subject applies mean and std."
            )
        return x.to(torch.float32)
    if isinstance(images, np.ndarray):
        batch = images[None] if images.ndim in (2, 3) and images.shape in _single_shapes(pre) else images
        return torch.from_numpy(from_array(batch, pre, "images"))
    if isinstance(images, (list, tuple)) and images and all(isinstance(x, Image.Image) for x in images):
        return torch.from_numpy(np.stack([from_pil(x, pre) for x in images]))
    if isinstance(images, (list, tuple)) and images:
        return torch.cat([as_pixels(x, pre) for x in images])
    raise DataError(f"images must be a tensor, an array, PIL images or a list of them, got {type(images).__name__}.")


def _single_shapes(pre: Preprocessing) -> set[tuple[int, ...]]:
    c, h, w = pre.input_shape
    return {(h, w), (h, w, c), (c, h, w)} if c == 1 else {(h, w, c), (c, h, w)}
