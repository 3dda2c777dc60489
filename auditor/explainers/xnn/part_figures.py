"""Figures 3.6 and 3.7 of [Khorram2020]: parts of an image, their cells, its heatmaps, and the heat on every part."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from auditor.attribution.heatmap import overlay, to_rgb
from auditor.explainers.xnn.table_methods import Heat, Shown
from auditor.metrics.locality import part_masses

MOST = 5  # features shown, those with most heat that counts
INK, CONTEXT = "#444444", (0.85, 0.85, 0.85)


def write_part_figure(
    heat: Heat, shown: Shown, folder: str | Path, method: str, label: str, names: Sequence[str] = ()
) -> Path:
    """Draw the first image that has heat and return the path, ``FOLDER/CLASS-METHOD.png``.

    The bars of (a) are the heat at a part's own pixel, those of (b) the heat on its cell, as the locality counts it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    i = int(heat.counts.any(1).int().argmax())
    image, masks = shown.x[i], shown.parts[i].double()
    maps = heat.counted[i]
    features = maps.flatten(1).sum(1).argsort(descending=True, stable=True)[:MOST].tolist()
    features = [f for f in features if float(maps[f].sum()) > 0]
    figure = Figure(figsize=(11, 8.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{label}, {method}", fontsize=11)
    rows: Any = figure.subfigures(3, 1, height_ratios=(2.2, 1, 1.3))
    pictures, first, second = rows
    axes = pictures.subplots(2, MOST)
    for ax in axes.flat:
        ax.axis("off")
    _show(axes[0, 0], to_rgb(image), "image")
    _show(axes[0, 1], to_rgb(image), "parts")
    for p in (masks.flatten(1).amax(1) > 0).nonzero()[:, 0].tolist():
        y, x = peak(masks[p])
        if is_point(masks[p]):
            axes[0, 1].plot(x, y, "o", color="#d62728", markersize=4)
            axes[0, 1].annotate(_name(names, p), (x, y), fontsize=6, color="white", xytext=(3, 3),
                                textcoords="offset points")  # fmt: skip
    _show(axes[0, 2], cells(masks), "cells")
    for column, f in enumerate(features):
        _show(axes[1, column], overlay(image.mean(0, keepdim=True), maps[f].float()), f"x{f + 1}")
    at_points, on_cells = heat_per_part(maps, masks, features)
    _bars(first, at_points, features, [], "(a) heat at the part's pixel")
    _bars(second, on_cells, features, [_name(names, p) for p in range(len(masks))], "(b) heat on its cell")
    path = Path(folder) / f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', f'{label}-{method}')}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def heat_per_part(maps: Tensor, masks: Tensor, features: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return S at the pixel of every part, and S_p on its cell, both (features, parts), of maps with mass 1.

    A part that is not visible, or is a region, has no pixel of its own: 0.

    >>> maps, masks = torch.tensor([[[1.0, 3.0]]]), torch.tensor([[[1.0, 0.0]], [[0.0, 0.5]]])
    >>> [t.tolist() for t in heat_per_part(maps, masks, [0])]
    [[[0.0, 0.75]], [[0.25, 0.375]]]
    """
    points = [peak(mask) for mask in masks]
    has_point = torch.tensor([is_point(mask) for mask in masks])
    at_points, on_cells = [], []
    for f in features:
        share = maps[f].double() / maps[f].double().sum()
        at_points.append(torch.stack([share[y, x] for y, x in points]) * has_point)
        on_cells.append(part_masses(share, masks))
    none = torch.zeros(0, len(masks), dtype=torch.float64)
    return (torch.stack(at_points), torch.stack(on_cells)) if features else (none, none)


def peak(mask: Tensor) -> tuple[int, int]:
    """Return row and column where a mask is largest: the part's own point of a Voronoi cell."""
    return divmod(int(mask.flatten().argmax()), mask.shape[1])


def is_point(mask: Tensor) -> bool:
    """Whether a mask falls off from a point, as that of a Voronoi cell does, and is no region."""
    return bool(((mask > 0) & (mask < 1)).any())


def cells(masks: Tensor) -> Any:
    """Return (height, width, 3): a colour per part; what belongs to none is white, the last part pale if a region."""
    from matplotlib import colormaps

    owner, is_any = masks.argmax(0), masks.amax(0) > 0
    colours = torch.tensor([colormaps["tab20"](p % 20)[:3] for p in range(len(masks))])
    if not is_point(masks[-1]):
        colours[-1] = torch.tensor(CONTEXT)
    strength = (0.35 + 0.65 * masks.amax(0)).clamp(0, 1)[..., None]
    picture = strength * colours[owner] + (1 - strength)
    picture[~is_any] = 1
    return picture.numpy()


def _name(names: Sequence[str], p: int) -> str:
    return names[p] if p < len(names) else f"part {p + 1}"


def _show(ax: Any, picture: Any, title: str) -> None:
    ax.imshow(picture)
    ax.set_title(title, fontsize=8)


def _bars(part: Any, values: Tensor, features: Sequence[int], names: Sequence[str], title: str) -> None:
    ax = part.subplots()
    width = 0.8 / max(1, len(features))
    at = torch.arange(values.shape[1]).double()
    for row, f in enumerate(features):
        ax.bar((at + (row - (len(features) - 1) / 2) * width).tolist(), values[row].tolist(), width, label=f"x{f + 1}")
    ax.set_title(title, fontsize=9, loc="left")
    ax.tick_params(labelsize=7)
    ax.set_xticks(at.tolist(), names or [""] * len(at), rotation=40, ha="right")
    ax.spines[["top", "right"]].set_visible(False)
    if names and features:
        ax.legend(fontsize=7, frameon=False, ncols=len(features))
