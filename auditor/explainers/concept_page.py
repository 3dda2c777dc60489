"""The page of a concept basis: top images with heatmaps, contribution by class and name of every concept.

HTML is self-contained (pictures inside, no scripts, nothing loaded from elsewhere); PNG is one sheet of the same.
A kind with more to show derives from `ConceptPage` and adds figures to a concept, or sections and rows to the end.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from auditor.attribution.heatmap import BLUE, RED, to_rgb
from auditor.errors import OptionError
from auditor.explainers.base import Explainer
from auditor.explainers.gallery import Gallery, Shot
from auditor.pages.templates import render
from auditor.subject.subject import Subject

SIDE = 96  # pixels of a picture on the page
MOST_ROWS = 150  # concepts on one sheet; a page has them all
WIDE = 300  # pixels from which a picture is a plot
MANY = 100  # concepts above which pictures of a page are stored as JPEG, which is a fifth of PNG
TEXT, GAP, TOP = 300, 10, 44  # pixels of the sheet's text column, between pictures, and of its heading
INK = (30, 30, 30)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page after the concepts: captioned rows of pictures, and a table."""

    title: str
    text: str = ""
    rows: Sequence[tuple[str, Sequence[tuple[Image.Image, str]]]] = ()
    columns: Sequence[str] = ()
    table: Sequence[Sequence[str]] = ()

    def values(self) -> dict[str, Any]:
        """Return what the template reads."""
        rows = [{"title": title, "figures": [figure(*f) for f in figures]} for title, figures in self.rows]
        table = {"columns": self.columns, "rows": self.table} if self.table else None
        return {"title": self.title, "text": self.text, "rows": rows, "table": table}


class ConceptPage:
    """The page of one explainer that has concepts and a gallery."""

    def __init__(self, explainer: Explainer, subject: Subject) -> None:
        if explainer.n_concepts == 0 or explainer.gallery is None:
            missing = "no fixed list of concepts" if explainer.n_concepts == 0 else "no gallery of images"
            raise OptionError(
                f"concepts: {explainer.name or explainer.kind} is of kind {explainer.kind}, which keeps {missing}, so "
                "there is no page of them; auditor explain MODEL IMAGE --out FOLDER draws what it says of one image."
            )
        self.explainer, self.subject = explainer, subject
        self.gallery: Gallery = explainer.gallery

    # what a kind may add

    def figures(self, concept: int) -> list[tuple[Image.Image, str]]:
        """Return captioned pictures that come before the top images of a concept."""
        return []

    def sections(self) -> list[Section]:
        """Return what comes after the concepts."""
        return []

    def rows(self) -> list[tuple[str, list[Image.Image]]]:
        """Return captioned rows of pictures that come after the concepts of the sheet."""
        return []

    # the page

    def write(self, path: str | Path) -> Path:
        """Write the page to a name that ends in .html or .png and return its path."""
        path = checked_suffix(path, self.explainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() == ".png":
            self.sheet().save(path)
        else:
            path.write_text(self.html(), encoding="utf-8")
        return path

    def html(self) -> str:
        """Return the page as one HTML document."""
        e, subject = self.explainer, self.subject
        name = e.name or e.kind
        model = f"{subject.name}/{subject.version}" if subject.name else f"digest {subject.digest[:12]}"
        figures = ", ".join(f"{k} {v:.3g}" for k, v in sorted(e.metrics.items()) if "/" not in k)
        return render(
            "concepts.html",
            title=f"{name}: concepts",
            heading=f"{e.n_concepts} concepts of {model}, layer {e.layer_ or ''}",
            about=f"explainer {name} of kind {e.kind}; {figures}",
            remarks=e.remarks(),
            runs=[{"title": title, "groups": self._groups(concepts)} for title, concepts in e.sections],
            sections=[section.values() for section in self.sections()],
        )

    def sheet(self) -> Image.Image:
        """Return the same rows as one picture: name and classes on the left, the top images on the right."""
        e, rows = self.explainer, self.rows()
        order = [(number, k) for number, group in enumerate(e.groups) for k in group][:MOST_ROWS]
        tiles = [self._tiles(k) for _, k in order]
        widths = [TEXT + (SIDE + GAP) * max(self.gallery.n_top, *map(len, tiles))]
        widths += [GAP + sum(p.width + GAP for p in pictures) for _, pictures in rows]
        below = sum(max(p.height for p in pictures) + 44 for _, pictures in rows)
        sheet = Image.new("RGB", (max(widths), TOP + len(order) * (SIDE + GAP) + below), (255, 255, 255))
        draw = ImageDraw.Draw(sheet)
        font, small = ImageFont.load_default(16), ImageFont.load_default(12)
        left_out = "" if len(order) == e.n_concepts else f", the first {len(order)} (the .html page has all)"
        draw.text((GAP, 12), f"{e.name or e.kind}: {e.n_concepts} concepts of layer {e.layer_}{left_out}", INK, font)
        y = TOP
        for (number, k), pictures in zip(order, tiles, strict=True):
            draw.text((GAP, y), f"{k}. {e.label(k)[:34]}", INK, font)
            if len(e.groups[number]) > 1:
                draw.text((GAP, y + 24 + 16 * 3), f"group {number}", INK, small)
            for line, (c, value) in enumerate(self._top_classes(k, 3)):
                text = f"{value:+.3f}  {self.subject.class_names[c][:30]}"
                draw.text((GAP, y + 24 + 16 * line), text, RED if value >= 0 else BLUE, small)
            for column, tile in enumerate(pictures):
                sheet.paste(tile, (TEXT + column * (SIDE + GAP), y))
            y += SIDE + GAP
        for caption, pictures in rows:
            draw.text((GAP, y + 16), caption, INK, small)
            x = GAP
            for tile in pictures:
                sheet.paste(tile, (x, y + 36))
                x += tile.width + GAP
            y += max(p.height for p in pictures) + 44
        return sheet

    def _groups(self, concepts: range) -> list[dict[str, Any]]:
        """Return a run of concepts by groups, under one heading where there are several in a group."""
        rows = [(number, group) for number, group in enumerate(self.explainer.groups) if group[0] in concepts]
        return [
            {
                "heading": f"Group {number}: concepts {', '.join(map(str, group))} fire together in the same places"
                if len(group) > 1
                else "",
                "concepts": [self._concept(k) for k in group],
            }
            for number, group in rows
        ]

    def _concept(self, k: int) -> dict[str, Any]:
        small = self.explainer.n_concepts > MANY
        values = self._top_classes(k, 5)
        top = max([1e-12, *(abs(v) for _, v in values)])
        return {
            "index": k,
            "label": self.explainer.label(k),
            "figures": [figure(picture, text) for picture, text in self.figures(k)],
            "shots": [
                figure(self.explainer.picture(k, shot, SIDE), self._caption(shot), small)
                for shot in self.gallery.shots[k]
            ],
            "classes": [
                {
                    "name": self.subject.class_names[c][:24],
                    "value": v,
                    "text": f"{v:+.3f}",
                    "width": f"{100 * abs(v) / top:.1f}",
                }
                for c, v in values
            ],
        }

    def _tiles(self, k: int) -> list[Image.Image]:
        shots = [self.explainer.picture(k, shot, SIDE) for shot in self.gallery.shots[k]]
        return [picture for picture, _ in self.figures(k)] + shots

    def _top_classes(self, k: int, most: int) -> list[tuple[int, float]]:
        """Return the classes to which a concept contributes most, with its mean contribution."""
        by_class = self.explainer.contributions_by_class
        if by_class is None:
            return []
        order = by_class[k].abs().argsort(descending=True, stable=True)[:most].tolist()
        return [(c, float(by_class[k, c])) for c in order if float(by_class[k, c]) != 0]

    def _caption(self, shot: Shot) -> str:
        label = self.gallery.label_of(shot, self.subject.class_names)
        return f"{shot.id}{f' ({label})' if label else ''}, score {shot.score:.3g}"


def checked_suffix(path: str | Path, explainer: Explainer) -> Path:
    """Return the path when the explainer can write a page of its suffix."""
    path = Path(path)
    if path.suffix.lower() not in explainer.page_suffixes:
        raise OptionError(
            f"page {path}: the page of kind {explainer.kind} goes to a name that ends in "
            f"{' or '.join(explainer.page_suffixes)}."
        )
    return path


def sized(image: Tensor, side: int) -> Image.Image:
    """Return pixels (channels, height, width) in [0, 1] as a square picture."""
    return Image.fromarray(to_rgb(image)).resize((side, side), Image.Resampling.NEAREST)


def figure(picture: Image.Image, text: str, small: bool = False) -> dict[str, Any]:
    """Return a captioned picture for a template: its bytes as PNG or, to be small, as JPEG; a plot is shown wide."""
    buffer = io.BytesIO()
    kind = "JPEG" if small else "PNG"
    picture.convert("RGB").save(buffer, kind, quality=85)
    source = f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"src": source, "text": text, "wide": picture.width >= WIDE}
