"""One page per concept basis: top images with heatmaps, contribution by class, names; the latent space of ``coupled``.

HTML is self-contained (pictures inside, no scripts, nothing loaded from elsewhere); PNG is one sheet of the same.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from auditor.errors import OptionError
from auditor.explainers.base import Explainer
from auditor.explainers.gallery import Shot
from auditor.attribution.heatmap import BLUE, RED, overlay, to_rgb
from auditor.explainers.coupled.latent_space import distinctness, mask_of, neighbours
from auditor.naming import concept_count
from auditor.subject.subject import Subject
from auditor.explainers.tree.explainer import TreeExplainer
from auditor.explainers.tree.page import write_tree_page

SIDE = 96  # pixels of a picture on the page
STYLE = """body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1150px;padding:0 1em;color:#1e1e1e}
h1{font-size:1.5em}h2{font-size:1.15em;margin:1.6em 0 .4em;border-top:1px solid #ddd;padding-top:.8em}
.shots img{margin:0 4px 4px 0;border-radius:3px;image-rendering:pixelated}.pale{color:#777}
.bars{display:grid;grid-template-columns:10em 1fr 5em;gap:2px 8px;font-size:13px;max-width:640px}
.bar{height:12px;align-self:center;border-radius:2px}figure{display:inline-block;margin:0 8px 8px 0}
figcaption{font-size:12px;color:#777;max-width:200px}td,th{padding:2px 10px;text-align:right}"""


def write_page(explainer: Explainer, subject: Subject, path: str | Path) -> Path:
    """Write the page of a fitted concept basis to ``path`` (.html or .png; a tree: .html or .svg) and return it."""
    path = Path(path)
    if isinstance(explainer, TreeExplainer):
        if path.suffix.lower() not in (".html", ".svg"):
            raise OptionError(f"page {path}: a tree is drawn to a name that ends in .html or .svg.")
        return write_tree_page(explainer, path)
    if path.suffix.lower() not in (".html", ".png"):
        raise OptionError(f"page {path}: want a name that ends in .html or .png.")
    if concept_count(explainer) == 0 or not hasattr(explainer, "gallery_"):
        raise OptionError(f"the {explainer.kind} explainer {explainer.name!r} has no concept basis to draw.")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".png":
        _sheet(explainer, subject).save(path)
    else:
        path.write_text(page_html(explainer, subject), encoding="utf-8")
    return path


def page_html(explainer: Any, subject: Subject) -> str:
    """Return the page as one HTML document."""
    name, n = explainer.name or explainer.kind, concept_count(explainer)
    model = f"{subject.name}/{subject.version}" if subject.name else f"digest {subject.digest[:12]}"
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{_esc(name)}: concepts</title>",
        f"<style>{STYLE}</style><h1>{n} concepts of {_esc(model)}, layer {_esc(explainer.layer_ or '')}</h1>",
        f"<p class='pale'>explainer {_esc(name)} of kind {_esc(explainer.kind)}; "
        + _esc(", ".join(f"{k} {v:.3g}" for k, v in sorted(explainer.metrics.items()) if "/" not in k))
        + "</p>",
    ]
    for k in range(n):
        parts.append(f"<section id='concept-{k}'><h2>{k}. {_esc(explainer.label(k))}</h2>")
        if explainer.kind == "coupled" and explainer.latent_image(k).numel():
            parts.append(_figure(_latent_picture(explainer.latent_image(k)), "latent image"))
        shots = "".join(_img(_picture(explainer, k, s), _caption(s, subject)) for s in explainer.gallery_.shots[k])
        parts.append(f"<div class='shots'>{shots or 'no image shows it'}</div>{_bars(explainer.by_class_[k], subject)}")
        parts.append("</section>")
    if explainer.kind == "coupled":
        parts += _latent_sections(explainer, subject)
    return "\n".join(parts) + "</html>\n"


def _picture(explainer: Any, k: int, shot: Shot) -> Image.Image:
    """Return a shot with its heatmap; for ``coupled`` with the mask of the latent image."""
    crop = shot.crop.float() / 255
    if explainer.kind == "coupled":
        latent = explainer.latent_image(k)
        heat = mask_of(latent.mean(0)).float() if latent.numel() else torch.zeros(1, 1)
        return overlay(crop, heat, side=SIDE, top=1.6)
    return overlay(crop, shot.heat.float() / 255, side=SIDE, top=1.0)


def _latent_sections(explainer: Any, subject: Subject) -> list[str]:
    parts = ["<h2>How distinct the concepts are in each layer</h2>"]
    for block, basis in zip(explainer.blocks_, explainer.P_, strict=True):
        if block.layer is not None:
            seen = distinctness(basis)
            text = f"{block.name}: top eigenvalues {seen.top_mean:.2f}, off-diagonal {seen.off_diagonal:.2f}"
            parts.append(_figure(_matrix(seen.cosines), text))
    table = {k.partition("/")[2]: v for k, v in explainer.metrics.items() if k.startswith("cka_lambda/")}
    if table:
        cells = "".join(f"<tr><td>{_esc(k)}</td><td>{v:.3f}</td></tr>" for k, v in sorted(table.items(), reverse=True))
        parts.append(
            f"<h2>CKA of the latent when its penalty is scaled</h2><table><tr><th>by<th>CKA</tr>{cells}</table>"
        )
    parts.append(
        "<h2>TCAV: share of a class's images whose logit rises with the concept</h2>" + _tcav(explainer, subject)
    )
    parts.append("<h2>Neighbours in the latent space</h2>")
    for i in _examples(explainer.labels_):
        near = neighbours(explainer.F_[:, i], explainer.F_, 10, skip=i)
        strongest = max(range(len(near.concepts)), key=near.concepts.__getitem__)
        row = _img(_small(explainer.thumbs_[i]), explainer.ids_[i]) + " → "
        row += "".join(_img(_small(explainer.thumbs_[j]), explainer.ids_[j]) for j in near.index)
        text = f"{near.concepts[strongest]:.0%} of them: {explainer.label(strongest)}"
        parts.append(f"<div class='shots'>{row} <span class='pale'>{_esc(text)}</span></div>")
    return parts


def _examples(labels: Tensor, most: int = 8) -> list[int]:
    """Return the first example of each of a few classes, or just the first ones."""
    found = [int((labels == c).nonzero()[0, 0]) for c in sorted(set(labels.tolist())) if c >= 0][:most]
    return found or list(range(min(most, labels.numel())))


def _tcav(explainer: Any, subject: Subject) -> str:
    shown = [c for c in range(subject.n_classes) if not bool(explainer.tcav_[:, c].isnan().all())][:20]
    head = "".join(f"<th>{_esc(subject.class_names[c][:14])}</th>" for c in shown)
    rows = "".join(
        f"<tr><td>{_esc(explainer.label(k))}</td>" + "".join(f"<td>{float(row[c]):.2f}</td>" for c in shown) + "</tr>"
        for k, row in enumerate(explainer.tcav_)
    )
    return f"<table><tr><th></th>{head}</tr>{rows}</table>"


def _bars(values: Tensor, subject: Subject, most: int = 5) -> str:
    order = values.abs().argsort(descending=True, stable=True)[:most].tolist()
    top = max(float(values.abs().max()), 1e-12)
    cells = []
    for c in order:
        v = float(values[c])
        colour = f"rgb{RED if v >= 0 else BLUE}"
        width = 100 * abs(v) / top
        cells.append(
            f"<span>{_esc(subject.class_names[c][:24])}</span>"
            f"<span class='bar' style='width:{width:.1f}%;background:{colour}'></span><span>{v:+.3f}</span>"
        )
    return f"<div class='bars'>{''.join(cells)}</div>"


def _caption(shot: Shot, subject: Subject) -> str:
    known = 0 <= shot.label < subject.n_classes
    return f"{shot.id}{' (' + subject.class_names[shot.label] + ')' if known else ''}, score {shot.score:.3g}"


def _matrix(C: Tensor) -> Image.Image:
    grey = 255 - (C.clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(grey.numpy()).resize((160, 160), Image.Resampling.NEAREST).convert("RGB")


def _latent_picture(latent: Tensor) -> Image.Image:
    top = float(latent.max())
    return _sized(latent / top if top > 0 else latent, SIDE)


def _small(thumb: Tensor) -> Image.Image:
    return _sized(thumb.float() / 255, 48)


def _sized(image: Tensor, side: int) -> Image.Image:
    return Image.fromarray(to_rgb(image)).resize((side, side), Image.Resampling.NEAREST)


def _figure(picture: Image.Image, text: str) -> str:
    return f"<figure>{_img(picture, text)}<figcaption>{_esc(text)}</figcaption></figure>"


def _img(picture: Image.Image, text: str) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    source = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return f"<img alt='{_esc(text)}' title='{_esc(text)}' src='{source}'>"


def _esc(text: str) -> str:
    return html.escape(text, quote=True)


def _sheet(explainer: Any, subject: Subject) -> Image.Image:
    """Return the same rows as one picture: name and classes on the left, the top images on the right."""
    n, n_top, text, gap = concept_count(explainer), explainer.gallery_.n_top, 300, 10
    latent = _latent_rows(explainer) if explainer.kind == "coupled" else []
    below = sum(max(p.height for p in row) + 44 for _, row in latent)
    width = text + (SIDE + gap) * (n_top + (explainer.kind == "coupled"))
    width = max([width, *(gap + sum(p.width + gap for p in row) for _, row in latent)])
    picture = Image.new("RGB", (width, 44 + n * (SIDE + gap) + below), (255, 255, 255))
    draw = ImageDraw.Draw(picture)
    font, small = ImageFont.load_default(16), ImageFont.load_default(12)
    draw.text(
        (gap, 12), f"{explainer.name or explainer.kind}: {n} concepts of layer {explainer.layer_}", (30, 30, 30), font
    )
    for k in range(n):
        y = 44 + k * (SIDE + gap)
        draw.text((gap, y), f"{k}. {explainer.label(k)[:34]}", (30, 30, 30), font)
        values = explainer.by_class_[k]
        for row, c in enumerate(values.abs().argsort(descending=True, stable=True)[:3].tolist()):
            colour = RED if float(values[c]) >= 0 else BLUE
            draw.text(
                (gap, y + 24 + 16 * row), f"{float(values[c]):+.3f}  {subject.class_names[c][:30]}", colour, small
            )
        tiles: Sequence[Image.Image] = [_picture(explainer, k, shot) for shot in explainer.gallery_.shots[k]]
        if explainer.kind == "coupled" and explainer.latent_image(k).numel():
            tiles = [_latent_picture(explainer.latent_image(k)), *tiles]
        for column, tile in enumerate(tiles):
            picture.paste(tile, (text + column * (SIDE + gap), y))
    y = 44 + n * (SIDE + gap)
    for caption, pictures in latent:
        draw.text((gap, y + 16), caption, (30, 30, 30), small)
        x = gap
        for tile in pictures:
            picture.paste(tile, (x, y + 36))
            x += tile.width + gap
        y += max(p.height for p in pictures) + 44
    return picture


def _latent_rows(explainer: Any) -> list[tuple[str, list[Image.Image]]]:
    """Return captioned rows of pictures: how distinct the concepts are in each layer, and neighbours of examples."""
    layers = [(b, p) for b, p in zip(explainer.blocks_, explainer.P_, strict=True) if b.layer is not None]
    seen = [distinctness(p) for _, p in layers]
    said = [f"{b.name} (off-diagonal {d.off_diagonal:.2f})" for (b, _), d in zip(layers, seen, strict=True)]
    rows = [(f"cosines between the concepts in {', '.join(said)}", [_matrix(d.cosines) for d in seen])] if seen else []
    for i in _examples(explainer.labels_):
        near = neighbours(explainer.F_[:, i], explainer.F_, 10, skip=i)
        strongest = max(range(len(near.concepts)), key=near.concepts.__getitem__)
        text = f"{explainer.ids_[i]} and its neighbours; {near.concepts[strongest]:.0%} of them: "
        rows.append((text + explainer.label(strongest), [_small(explainer.thumbs_[j]) for j in (i, *near.index)]))
    return rows
