"""Heatmaps as transparent PNG layers, to be laid over the image by whatever shows it.

A heatmap becomes a palette PNG whose colour is one (red for, blue against) and whose opacity is the heat. It is written
straight from the bytes at zlib's fastest level: many small pictures per answer, and no library call per picture.
"""

from __future__ import annotations

import base64
import struct
import zlib
from functools import cache

import torch
from torch import Tensor

from auditor.attribution.heatmap import BLUE, RED

SIGNATURE = b"\x89PNG\r\n\x1a\n"
SIDE = 64  # a coarse grid is drawn this fine; browsers smooth the rest
OPACITY = 0.75
LEVELS = 64  # of opacity: nobody sees more, and the palette travels with every picture


def heat_layers(maps: Tensor, against: list[bool], size: tuple[int, int]) -> list[str]:
    """Return heatmaps (concepts, h, w) as transparent PNG layers of the proportions of ``size`` (height, width).

    Each map's own maximum is full colour; ``against`` says which are blue. A grid finer than the layer stays as it is.
    """
    h, w = maps.shape[1:]
    scale = SIDE / max(size)
    height, width = max(h, round(size[0] * scale)), max(w, round(size[1] * scale))
    heat = maps.detach().float().clamp_min(0)
    heat = torch.nan_to_num(heat / heat.amax((1, 2), keepdim=True).clamp_min(1e-30))
    if (height, width) != (h, w):
        grid = torch.nn.functional.interpolate(heat[:, None], (height, width), mode="bilinear", align_corners=False)
        heat = grid[:, 0]
    rows = torch.zeros(len(heat), height, width + 1, dtype=torch.uint8)  # each row begins with its filter: none
    rows[:, :, 1:] = (heat * (LEVELS - 1)).round().clamp_(0, LEVELS - 1).cpu()
    packed = rows.numpy()
    return [png_url(_layer_png(packed[k].tobytes(), height, width, against[k])) for k in range(len(heat))]


def _layer_png(rows: bytes, height: int, width: int, is_against: bool) -> bytes:
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0))
    return SIGNATURE + header + _palette(is_against) + _chunk(b"IDAT", zlib.compress(rows, 1)) + _chunk(b"IEND", b"")


@cache
def _palette(is_against: bool) -> bytes:
    colour = bytes(BLUE if is_against else RED)
    opacity = bytes(round(255 * OPACITY * i / (LEVELS - 1)) for i in range(LEVELS))
    return _chunk(b"PLTE", colour * LEVELS) + _chunk(b"tRNS", opacity)


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png_url(png: bytes) -> str:
    """Return a PNG as a data URL."""
    return "data:image/png;base64," + base64.b64encode(png).decode()
