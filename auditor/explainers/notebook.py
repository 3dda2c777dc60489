"""Notebook: what a cell of a notebook shows of explanations, explainers, audits and gates, as HTML without a script."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

    from auditor.explainers.base import Explainer
    from auditor.explainers.explanation import Explanation

SIDE = 160  # pixels of an image that an explanation keeps to be shown
SHOWN_CONCEPTS, SHOWN_SHOTS = 12, 6


def cell(value: Any) -> str:
    """Return a value as text of a cell; numbers in four digits.

    >>> cell(0.123456), cell("<b>"), cell(None)
    ('0.1235', '&lt;b&gt;', '')
    """
    if value is None:
        return ""
    return html.escape(f"{value:.4g}" if isinstance(value, float) else str(value))


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table; cells that begin with ``<img`` are pictures and stand as they are."""
    head = "".join(f"<th style='text-align:left'>{cell(name)}</th>" for name in header)
    body = "".join(
        "<tr>"
        + "".join(f"<td style='text-align:left'>{v if str(v).startswith('<img ') else cell(v)}</td>" for v in row)
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def picture(image: Image, text: str) -> str:
    """Return an image with a text for those who do not see it."""
    stream = io.BytesIO()
    image.save(stream, "PNG")
    data = base64.b64encode(stream.getvalue()).decode()
    return f"<img src='data:image/png;base64,{data}' alt='{html.escape(text, quote=True)}' style='max-width:100%'>"


def shown(pixels: Tensor) -> Tensor:
    """Return pixels (channels, height, width) in [0, 1] as small bytes, for an explanation to keep."""
    scale = SIDE / max(pixels.shape[1:])
    x = pixels.detach().float().cpu().clamp(0, 1)[None]
    if scale < 1:
        x = torch.nn.functional.interpolate(x, scale_factor=scale, mode="area")
    return (x[0] * 255).round().to(torch.uint8)


def explanation_html(explanation: Explanation) -> str:
    """Return the row of a contact sheet: image, prediction, the strongest concepts with heatmaps, the rest."""
    from auditor.explainers.contact_sheet import sheet_of

    pixels = torch.full((3, SIDE, SIDE), 0.85) if explanation.image is None else explanation.image.float() / 255
    return picture(sheet_of(pixels[None], [explanation]), repr(explanation))


def explainer_html(explainer: Explainer) -> str:
    """Return the headline metrics and the gallery: a row per concept with the images that show it best."""
    figures = [(name, explainer.metrics[name]) for name in explainer.headline if name in explainer.metrics]
    parts = [f"<p><b>{cell(repr(explainer))}</b></p>", table(["metric", "value"], figures) if figures else ""]
    gallery = explainer.gallery
    if gallery is not None:
        from PIL import Image

        for index, shots in enumerate(gallery.shots[:SHOWN_CONCEPTS]):
            if not shots:
                continue
            pictures = [explainer.picture(index, shot) for shot in shots[:SHOWN_SHOTS]]
            strip = Image.new("RGB", (sum(p.width + 4 for p in pictures), max(p.height for p in pictures)), "white")
            left = 0
            for one in pictures:
                strip.paste(one, (left, 0))
                left += one.width + 4
            label = explainer.gallery_label(index)
            parts.append(f"<div>{cell(label)}<br>{picture(strip, f'images that show {label} best')}</div>")
        if len(gallery.shots) > SHOWN_CONCEPTS:
            parts.append(f"<p>and {len(gallery.shots) - SHOWN_CONCEPTS} more concepts</p>")
    return "".join(parts)
