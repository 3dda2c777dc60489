"""Transforms: what the field's libraries put before a model, read as our preprocessing.

torchvision's transforms and presets of weights, timm's ``data_config`` and the image processors of transformers each
say in their own way to which size an image is brought, how, and which mean and std follow. What cannot be said by
`Preprocessing` is refused in a sentence; nothing is left out silently.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from auditor.errors import OptionError
from auditor.subject.preprocessing import Preprocessing

RANDOM = ("Random", "Jitter", "Augment", "AugMix", "MixUp", "CutMix", "Erasing")
PLAIN = ("ToTensor", "PILToTensor", "ToImage", "ToPureTensor", "MaybeToTensor", "MaybePILToTensor", "Identity", "ToRGB")
NEAR = 1e-6


@dataclass(frozen=True, slots=True)
class Steps:
    """What transforms do to an image: channels and size it ends with, how it comes to that size, mean and std."""

    size: tuple[int, int] | None = None
    resize: str = "stretch"
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    channels: int | None = None
    class_names: tuple[str, ...] | None = None

    @property
    def input_shape(self) -> tuple[int, int, int] | None:
        """Channels, height and width, where the transforms say a size."""
        if self.size is None:
            return None
        channels = self.channels or (len(self.mean) if self.mean and len(self.mean) > 1 else 3)
        return (channels, *self.size)


def steps_of(transforms: Any) -> Steps:
    """Read transforms of torchvision, a ``data_config`` of timm or an image processor of transformers.

    >>> steps_of({"input_size": (3, 224, 224), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 0.875}).resize
    'crop-256'
    """
    if isinstance(transforms, Preprocessing):
        pre = transforms
        return Steps(pre.input_shape[1:], pre.resize, pre.mean, pre.std, pre.input_shape[0])
    if isinstance(transforms, Mapping) or (hasattr(transforms, "input_size") and hasattr(transforms, "crop_pct")):
        return _of_timm(transforms if isinstance(transforms, Mapping) else vars(transforms))
    if hasattr(transforms, "meta") and callable(getattr(transforms, "transforms", None)):  # torchvision's weights
        names = transforms.meta.get("categories")
        return replace(steps_of(transforms.transforms()), class_names=None if names is None else tuple(names))
    if hasattr(transforms, "crop_size") and hasattr(transforms, "resize_size"):
        return _of_preset(transforms)
    if hasattr(transforms, "image_mean") or hasattr(transforms, "do_rescale"):
        return _of_processor(transforms)
    inner = getattr(transforms, "image_processor", None)  # a processor of text and images
    if inner is not None:
        return _of_processor(inner)
    return _of_chain(_chain(transforms))


def normalisation_in(transforms: Any) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return mean and std that transforms apply to images; None where there are none, or none that can be read."""
    if transforms is None:
        return None
    for step in _chain(transforms):
        mean, std = getattr(step, "mean", None), getattr(step, "std", None)
        if mean is not None and std is not None and not callable(mean):
            return _numbers(mean), _numbers(std)
    return None


def random_step(transforms: Any) -> str | None:
    """Return the name of a transform that draws at random, None where none is known to.

    >>> from torchvision import transforms
    >>> random_step(transforms.Compose([transforms.RandomHorizontalFlip(), transforms.ToTensor()]))
    'RandomHorizontalFlip'
    """
    steps = [] if transforms is None else _chain(transforms)
    return next((name for name in (type(s).__name__ for s in steps) if any(part in name for part in RANDOM)), None)


def _chain(transforms: Any) -> list[Any]:
    """Return the single steps of transforms, those inside compositions included."""
    inner = getattr(transforms, "transforms", None)
    if inner is None and type(transforms).__name__ in ("Sequential", "StandardTransform"):
        inner = getattr(transforms, "transform", None) or list(transforms)
    if inner is None:
        return [transforms]
    parts = inner if isinstance(inner, Iterable) else [inner]
    return [step for part in parts for step in _chain(part)]


def _of_chain(steps: Sequence[Any]) -> Steps:
    """Read torchvision's transforms (v1 and v2), one after the other."""
    read, short, stretched, way, crop = Steps(), None, None, "bilinear", None
    for step in steps:
        name = type(step).__name__
        if name == "Resize":
            size = _pair_or_one(step.size)
            short, stretched = (size, None) if isinstance(size, int) else (None, size)
            way = _way(getattr(step, "interpolation", "bilinear"))
            if getattr(step, "max_size", None) is not None:
                raise OptionError("preprocessing: Resize with max_size cannot be repeated here; leave max_size out.")
        elif name == "CenterCrop":
            size = _pair_or_one(step.size)
            crop = (size, size) if isinstance(size, int) else size
        elif name == "Normalize":
            read = replace(read, mean=_numbers(step.mean), std=_numbers(step.std))
        elif name == "Grayscale":
            read = replace(read, channels=int(step.num_output_channels))
        elif name in ("ConvertImageDtype", "ToDtype"):
            _check_scales(step)
        elif name not in PLAIN:
            what = "draws at random" if any(part in name for part in RANDOM) else "is none that is known here"
            raise OptionError(
                f"preprocessing: transform {name} {what}; give Resize, CenterCrop, Grayscale, ToTensor and Normalize, "
                "or say input_shape, mean, std and resize."
            )
    if short is None and stretched is None:
        return replace(read, size=crop, resize="crop" if crop else "stretch")
    return replace(read, size=crop or stretched or None, resize=_rule(short, stretched, crop, way))


def _rule(short: int | None, stretched: tuple[int, int] | None, crop: tuple[int, int] | None, way: str) -> str:
    """Return the rule that brings an image to size, as `Preprocessing.resize` says it."""
    if short is not None and crop is None:
        raise OptionError(
            f"preprocessing: Resize({short}) keeps proportions, so images have different sizes; add CenterCrop, or "
            "resize to (height, width)."
        )
    if stretched is not None and crop is not None and crop != stretched:
        if stretched[0] != stretched[1]:
            raise OptionError(
                f"preprocessing: Resize{stretched} before CenterCrop{crop} cannot be said here; resize to the size."
            )
        head = f"stretch-{stretched[0]}"
    else:
        head = "stretch" if stretched is not None else f"crop-{short}"
    return head if way == "bilinear" else f"{head}-{way}"


def _of_preset(preset: Any) -> Steps:
    """Read the preset that ``weights.transforms()`` of torchvision gives."""
    size, crop = _pair_or_one(preset.resize_size), _pair_or_one(preset.crop_size)
    short, stretched = (size, None) if isinstance(size, int) else (None, size)
    both = (crop, crop) if isinstance(crop, int) else crop
    rule = _rule(short, stretched, both, _way(preset.interpolation))
    return Steps(both, rule, _numbers(preset.mean), _numbers(preset.std), len(preset.mean))


def _of_timm(config: Mapping[str, Any]) -> Steps:
    """Read a ``data_config`` of timm, as its own evaluation transforms do."""
    if "input_size" not in config:
        raise OptionError(
            f"preprocessing: want timm's data_config with input_size, got {', '.join(map(str, config)) or 'nothing'}; "
            "timm.data.resolve_model_data_config(model) gives one."
        )
    channels, height, width = (int(n) for n in config["input_size"])
    way = _way(config.get("interpolation") or "bilinear")
    share, mode = float(config.get("crop_pct") or 1.0), str(config.get("crop_mode") or "center")
    if mode not in ("center", "squash") or (mode == "center" and height != width and share != 1.0):
        raise OptionError(f"preprocessing: crop_mode {mode!r} at {height} x {width} cannot be repeated here.")
    scaled = [math.floor(n / share) for n in (height, width)]
    crop, short = (height, width), scaled[0]
    if mode == "squash":
        rule = _rule(None, (scaled[0], scaled[1]), crop, way)
    else:
        rule = _rule(short, None, crop, way) if height == width else "crop" + ("" if way == "bilinear" else f"-{way}")
    mean, std = config.get("mean"), config.get("std")
    return Steps(crop, rule, None if mean is None else _numbers(mean), None if std is None else _numbers(std), channels)


def _of_processor(processor: Any) -> Steps:
    """Read an image processor of transformers (``AutoImageProcessor``)."""
    name = type(processor).__name__
    scale = getattr(processor, "rescale_factor", 1 / 255)
    offset = bool(getattr(processor, "offset", False) or getattr(processor, "rescale_offset", False))
    if getattr(processor, "do_rescale", True) and (abs(scale - 1 / 255) > NEAR or offset):
        raise OptionError(f"preprocessing: {name} rescales by {scale:g}; here pixels are divided by 255.")
    if not getattr(processor, "do_rescale", True):
        raise OptionError(f"preprocessing: {name} does not rescale pixels to [0, 1]; set do_rescale=True.")
    mean = std = None
    if getattr(processor, "do_normalize", False):
        mean, std = _numbers(processor.image_mean), _numbers(processor.image_std)
    way = _way(getattr(processor, "resample", None) if getattr(processor, "resample", None) is not None else "bilinear")
    size = _sizes(getattr(processor, "size", None)) if getattr(processor, "do_resize", False) else None
    crop = _sizes(getattr(processor, "crop_size", None)) if getattr(processor, "do_center_crop", False) else None
    share = getattr(processor, "crop_pct", None)
    if isinstance(size, int) and share is not None and crop is None:  # ConvNeXt's own rule
        crop, size = (size, size), (int(size / share) if size < 384 else (size, size))
    if isinstance(crop, int):
        crop = (crop, crop)
    if size is None:
        return Steps(crop, "crop" if crop else "stretch", mean, std)
    if isinstance(size, int) and crop is None:
        raise OptionError(f"preprocessing: {name} keeps proportions without a crop, so images have different sizes.")
    short, stretched = (size, None) if isinstance(size, int) else (None, size)
    return Steps(crop or stretched, _rule(short, stretched, crop, way), mean, std)


def _sizes(size: Any) -> int | tuple[int, int] | None:
    """Return a processor's size: of the shorter side, or height and width."""
    read = size.get if isinstance(size, Mapping) else partial(getattr, size)
    entries: dict[str, Any] = {key: read(key, None) for key in _SIZE_KEYS}
    if entries.get("shortest_edge") is not None:
        return int(entries["shortest_edge"])
    if entries.get("height") is not None and entries.get("width") is not None:
        return int(entries["height"]), int(entries["width"])
    return None if size is None else _pair_or_one(size)


_SIZE_KEYS = ("shortest_edge", "height", "width")


def _pair_or_one(size: Any) -> int | tuple[int, int]:
    if isinstance(size, int):
        return size
    values = [int(n) for n in size]
    return values[0] if len(values) == 1 else (values[0], values[1])


def _way(interpolation: Any) -> str:
    """Return the name of an interpolation that PIL, torchvision, timm or transformers name in their way."""
    text = str(getattr(interpolation, "value", interpolation)).lower()
    by_number = {"0": "nearest", "1": "lanczos", "2": "bilinear", "3": "bicubic", "4": "box", "5": "hamming"}
    name = by_number.get(text, text.rpartition(".")[2])
    if name not in by_number.values():
        raise OptionError(f"preprocessing: interpolation {text!r} is not known here; use bilinear or bicubic.")
    return name


def _check_scales(step: Any) -> None:
    kind = str(getattr(step, "dtype", ""))
    if "float" not in kind or getattr(step, "scale", True) is False:
        raise OptionError(
            f"preprocessing: {type(step).__name__}({kind}) leaves pixels as they are; scale them to [0, 1]."
        )


def _numbers(values: Any) -> tuple[float, ...]:
    flat = values.tolist() if hasattr(values, "tolist") else values
    return tuple(float(v) for v in np.ravel(flat))
