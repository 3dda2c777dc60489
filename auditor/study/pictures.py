"""Pictures of a study: images as the model sees them, heatmaps as transparent layers, and shapes to practise on."""

from __future__ import annotations

import base64
import io
import math

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from auditor.attribution.heatmap import is_density, smoothed, to_rgb
from auditor.attribution.heatmap_png import heat_layers

SMALLEST_SIDE = 160  # images below are enlarged, pixel by pixel
SHAPES = 8  # images of the practice batch
FULL_AT = 0.98  # a density's colour is full from this quantile on
FEWEST_CELLS = 100  # of a grid whose quantile says something


def image_png(image: Tensor) -> bytes:
    """Return pixels (channels, height, width) in [0, 1] as a PNG; small images are enlarged by a whole factor."""
    rgb = to_rgb(image)
    times = max(1, math.ceil(SMALLEST_SIDE / max(rgb.shape[:2])))
    picture = Image.fromarray(rgb)
    if times > 1:
        picture = picture.resize((rgb.shape[1] * times, rgb.shape[0] * times), Image.Resampling.NEAREST)
    return _png(picture)


def heat_png(heatmap: Tensor, size: tuple[int, int], against: bool) -> bytes:
    """Return a heatmap as a transparent layer over an image of ``size``: red for, blue against.

    Mass that is shared out over single pixels is smoothed first, as everywhere in this package. Mass on a coarser grid
    has its full colour where that of pixels has: people compare conditions, and must see all heatmaps equally well.
    """
    heat = heatmap.detach().float().cpu().clamp_min(0)
    is_fine = is_density(heat)
    if is_fine:
        heat = smoothed(heat)
    if is_fine or (heat.numel() >= FEWEST_CELLS and abs(float(heat.sum()) - 1) < 1e-2):
        top = heat.flatten().kthvalue(max(1, round(FULL_AT * heat.numel()))).values.clamp_min(1e-30)
        heat = (heat / top).clamp_max(1.0)
        scale = max(1, max(heat.shape) // 96)
        if scale > 1:
            heat = torch.nn.functional.avg_pool2d(heat[None, None], scale, ceil_mode=True)[0, 0]
    (url,) = heat_layers(heat[None], [against], size)
    return base64.b64decode(url.partition(",")[2])


def practice_pictures(n_groups: int) -> dict[str, bytes]:
    """Return drawn shapes to practise on, by their names: nothing of the study's data is shown beforehand."""
    pictures = {}
    for k in range(SHAPES):
        picture = Image.new("RGB", (SMALLEST_SIDE, SMALLEST_SIDE), (238, 240, 243))
        draw = ImageDraw.Draw(picture)
        corners = (k * 7 + 3) % SHAPES % n_groups  # sorts of shapes in a mixed order
        x, y, r = 80 + 14 * ((k * 5) % 3 - 1), 80 + 12 * ((k * 3) % 3 - 1), 34 + 5 * (k % 3)
        colour = [(66, 92, 138), (122, 84, 130), (70, 120, 92)][(k * 2) % 3]
        if corners == 0:
            draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)
        else:
            draw.regular_polygon((x, y, r), n_sides=corners + 2, rotation=15 * k, fill=colour)
        pictures[f"practice-{k}"] = _png(picture)
    return pictures


def _png(picture: Image.Image) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "PNG", optimize=True)
    return stream.getvalue()
