"""Contact sheet: a row per image: the image with its prediction, its strongest concepts with their heatmaps, the rest.

The rest is what makes the sum whole: bias, the concepts that are not shown, residual, and the share that is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from auditor.attribution.heatmap import BLUE, RED, overlay
from auditor.explainers.explanation import Concept, Explanation

INK, PAPER, PALE = (30, 30, 30), (255, 255, 255), (120, 120, 120)


def contact_sheet(
    images: Tensor, explanations: Sequence[Explanation], path: str | Path, *, n_concepts: int = 5, side: int = 132
) -> Path:
    """Draw images (batch, channels, height, width) with their explanations to a PNG and return its path."""
    path = Path(path)
    sheet = sheet_of(images, explanations, n_concepts=n_concepts, side=side)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)
    return path


def sheet_of(
    images: Tensor, explanations: Sequence[Explanation], *, n_concepts: int = 5, side: int = 132
) -> Image.Image:
    """Draw images (batch, channels, height, width) with their explanations, a row each."""
    gap, head, foot = 14, 34, 40
    n_concepts = min(n_concepts, max((len(e.concepts) for e in explanations), default=0))
    width = gap + (side + gap) * (n_concepts + 2)
    height = head + (side + foot + gap) * len(explanations)
    sheet = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(sheet)
    font, small = ImageFont.load_default(14), ImageFont.load_default(12)
    draw.text((gap, 10), "image and prediction", INK, font)
    draw.text((gap * 2 + side, 10), "what made it, with its contribution", INK, font)
    for row, explanation in enumerate(explanations):
        top = head + row * (side + foot + gap)
        picture = overlay(images[row], images[row].mean(0) * 0, side=side)
        sheet.paste(_bright(images[row], side, picture.size), (gap, top))
        p, t = explanation.prediction, explanation.target
        draw.text((gap, top + side + 2), f"{_short(p.label)}  {p.probability:.0%}", INK, font)
        total = f"{explanation.target_value_of} {_short(t.label, 8)} = {explanation.target_value:.2f}"
        draw.text((gap, top + side + 20), total, PALE, small)
        ranked = explanation.ranked()[:n_concepts]
        for column, concept in enumerate(ranked):
            left = gap + (side + gap) * (column + 1)
            c, counts_for = concept.contribution, concept.counts_for
            if concept.heatmap is not None:
                sheet.paste(overlay(images[row], concept.heatmap, positive=counts_for, side=side), (left, top))
            colour = INK if c is None or counts_for is None else RED if counts_for else BLUE
            value = f"{concept.activation:.3g}" if c is None else f"{c:+.2f}"
            draw.text((left, top + side + 2), value, colour, font)
            draw.text((left, top + side + 20), _short(concept.label, 20), PALE, small)
        for line, text in enumerate(rest_of(explanation, ranked)):
            draw.text((gap + (side + gap) * (len(ranked) + 1), top + 18 * line), text, PALE, small)
    return sheet


def rest_of(explanation: Explanation, shown: Sequence[Concept]) -> list[str]:
    """Return what stands beside the concepts shown: bias, the other concepts, residual, and the share explained."""
    if explanation.bias is None or explanation.residual is None:
        return ["this kind gives", "no contributions"]
    others = [c for c in explanation.concepts if c not in shown]
    lines = [f"bias {explanation.bias:+.2f}"]
    if others:
        lines.append(f"{len(others)} more {sum(c.contribution or 0.0 for c in others):+.2f}")
    lines.append(f"residual {explanation.residual:+.2f}")
    share = explanation.explained_share(shown)
    return [*lines, *([] if share is None else [f"shown explain {share:.0%}"])]


def _bright(image: Tensor, side: int, size: tuple[int, int]) -> Image.Image:
    from auditor.attribution.heatmap import to_rgb

    rule = Image.Resampling.NEAREST if max(image.shape[1:]) * 4 < side else Image.Resampling.BILINEAR
    return Image.fromarray(to_rgb(image)).resize(size, rule)


def _short(text: str, most: int = 16) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
