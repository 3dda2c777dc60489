"""Contact sheet like figure 3.8 of [Khorram2020]: image, 1-Heatmap, then the x-features, sorted, their number above."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from auditor.attribution.excitation import ExcitationBackprop
from auditor.attribution.heatmap import BLUE, RED, overlay, to_rgb
from auditor.explainers.explanation import Explanation
from auditor.explainers.xnn.explainer import XnnExplainer
from auditor.network.aten_graph import graph_of
from auditor.subject.subject import Subject

INK = (30, 30, 30)


def xnn_sheet(
    subject: Subject, explainer: XnnExplainer, images: Tensor, path: str | Path, *, target: int | None = None,
    side: int = 132,
) -> Path:  # fmt: skip
    """Explain pixels ``images`` and draw a row for each: red heat where an x-feature adds, blue where it takes."""
    explanations = explainer.explain(subject, images, target)
    p = subject.preprocessing
    engine = ExcitationBackprop(graph_of(subject), floor=[-m / s for m, s in zip(p.mean, p.std, strict=True)])
    classes = torch.tensor([[e.target.index] for e in explanations])
    whole = engine.maps(subject.normalise(images), classes)
    return draw(images, explanations, [whole.heatmap(i, 0) for i in range(len(images))], path, side)


def _fitting(
    text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int, pen: ImageDraw.ImageDraw
) -> str:
    """Return the text, shortened with an ellipsis where it is wider than its column."""
    if pen.textlength(text, font) <= width:
        return text
    return next((t for n in range(len(text) - 1, 0, -1) if pen.textlength(t := text[:n] + "…", font) <= width), "…")


def draw(
    images: Tensor, explanations: Sequence[Explanation], whole: Sequence[Tensor | None], path: str | Path, side: int
) -> Path:
    """Draw the sheet to a PNG; ``whole`` are the heatmaps of the logits themselves."""
    gap, head = 12, 26
    n = max(len(e.concepts) for e in explanations)
    sheet = Image.new("RGB", (gap + (side + gap) * (n + 2), (side + head + gap) * len(explanations) + gap), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for row, e in enumerate(explanations):
        top = gap + row * (side + head + gap)
        grey = images[row].mean(0, keepdim=True)  # colour belongs to the heat
        first = overlay(grey, grey[0] * 0, side=side)
        plain = Image.fromarray(to_rgb(images[row])).resize(first.size)
        cells: list[tuple[Image.Image, str, tuple[int, int, int]]] = [
            (plain, _fitting(e.target.label, font, side, pen), INK)
        ]
        one = whole[row]
        cells.append((first if one is None else overlay(grey, one, side=side), "1-Heatmap", INK))
        for c in sorted(e.concepts, key=lambda c: -(c.contribution or 0.0)):
            plus = (c.contribution or 0.0) >= 0
            picture = first if c.heatmap is None else overlay(grey, c.heatmap, positive=c.counts_for, side=side)
            quiet = c.note.partition(":")[0] in ("inactive", "dead")  # its map shows potential, not evidence
            text = f"#{c.index + 1}  {c.note.partition(':')[0] if quiet else f'{c.contribution:+.2f}'}"
            cells.append((first if quiet else picture, text, INK if quiet else RED if plus else BLUE))
        for column, (picture, text, colour) in enumerate(cells):
            left = gap + column * (side + gap)
            pen.text((left, top + 4), text, colour, font)
            sheet.paste(picture, (left, top + head))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)
    return path
