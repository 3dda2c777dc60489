"""Pictures for answers: samples and gallery crops as PNG data URLs."""

from __future__ import annotations

import io
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from auditor.attribution.heatmap import RED
from auditor.attribution.heatmap_png import png_url


def picture(image: Tensor) -> str:
    """Return pixels, float in [0, 1] or uint8, (channels, height, width), as a PNG data URL."""
    pixels = image if image.dtype == torch.uint8 else (image.float().clamp(0, 1) * 255).round().to(torch.uint8)
    array = pixels.cpu().numpy()
    grey: Any = array[0] if array.shape[0] != 3 else array.transpose(1, 2, 0)
    with io.BytesIO() as stream:
        Image.fromarray(grey).save(stream, "PNG", compress_level=6)
        return png_url(stream.getvalue())


def tinted(crop: Tensor, heat: Tensor) -> Tensor:
    """Return a crop (uint8) with the concept laid over it in red; as it is where the heat is the same everywhere."""
    if bool((heat == heat.flatten()[0]).all()):
        return crop
    rgb = crop.float().expand(3, -1, -1) if crop.shape[0] != 3 else crop.float()
    share = heat.float()[None] / 255 * 0.75
    return ((rgb * 0.6 + 60) * (1 - share) + torch.tensor(RED).float()[:, None, None] * share).clamp(0, 255).byte()
