"""Pictures for the page of an audit: each explainer's concepts, and a few images explained."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image, ImageDraw
from torch import Tensor

from auditor.attribution.heatmap import overlay, to_rgb
from auditor.auditing.case import Effort
from auditor.auditing.images import AuditImages, spread
from auditor.auditing.second_opinions import SPOT
from auditor.data.source import Data
from auditor.errors import AuditError
from auditor.explainers.answer import explanations_of
from auditor.explainers.base import Explainer
from auditor.subject.subject import Subject

SIDE = 88
WHOLE_SIDE = 144
BOX_COLOUR = "#d62728"
N_CONCEPTS, N_SHOTS, N_EXAMPLES, N_PARTS = 12, 6, 4, 4


def pictures(
    subject: Subject, explainers: Mapping[str, Explainer], chosen: AuditImages, slow_images: int
) -> dict[str, Any]:
    """Return, per explainer, concept rows and explained examples, pictures as data URLs."""
    shown = {}
    for name, explainer in sorted(explainers.items()):
        effort = Effort.of(explainer, N_EXAMPLES, 0, min(slow_images, 2))
        sample = _varied(chosen, effort.images)
        try:
            targets = [None] * len(sample)
            explanations = explanations_of(explainer, subject, sample.images, targets, **effort.options)
            examples = [_example(subject, sample, i, e) for i, e in enumerate(explanations)]
        except AuditError:  # an explainer that cannot explain these images shows none
            examples = []
        shown[name] = {"concepts": _concepts(subject, explainer), "examples": examples}
    return shown


def finding_pictures(subject: Subject, data: Data, findings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return, per class with a finding to look at, its images with the deciding box, and the box cut out."""
    rows = sorted({row for f in findings if f["verdict"] in ("found", "look") for row in f["rows"]})
    if not rows:
        return {}
    images = images_at(subject, data, rows)
    shown: dict[str, Any] = {}
    for f in findings:
        if f["verdict"] not in ("found", "look"):
            continue
        boxes = f["boxes"] if f["boxes"] and f["cause"] in SPOT else [None] * len(f["rows"])
        shown[f["name"]] = [
            {
                "id": name,
                "whole": data_url(with_box(images[row], box)),
                "spot": None if box is None else data_url(cut_out(images[row], box)),
            }
            for row, name, box in zip(f["rows"], f["images"], boxes, strict=True)
        ]
    return shown


def images_at(subject: Subject, data: Data, rows: Sequence[int], batch_size: int = 64) -> dict[int, Tensor]:
    """Return the pixels of some rows of the data."""
    remaining, start = set(rows), 0
    images: dict[int, Tensor] = {}
    for batch in data.batches(subject, batch_size):
        images |= {start + j: batch.images[j] for j in range(len(batch)) if start + j in remaining}
        start += len(batch)
        if len(images) == len(remaining):
            break
    return images


def with_box(image: Tensor, box: Sequence[float] | None, side: int = WHOLE_SIDE) -> Image.Image:
    """Return an image with a box (top, left, height, width in its pixels) drawn around a region."""
    picture = resized(image, side)
    if box is not None:
        scale = picture.width / image.shape[2], picture.height / image.shape[1]
        top, left, height, width = box[0] * scale[1], box[1] * scale[0], box[2] * scale[1], box[3] * scale[0]
        draw = ImageDraw.Draw(picture)
        for grow, colour in ((1, "white"), (0, BOX_COLOUR)):
            draw.rectangle(
                (
                    max(0, round(left) - grow),
                    max(0, round(top) - grow),
                    min(picture.width - 1, round(left + width) + grow),
                    min(picture.height - 1, round(top + height) + grow),
                ),
                outline=colour,
                width=1 if grow else 2,
            )
    return picture


def cut_out(image: Tensor, box: Sequence[float], side: int = SIDE) -> Image.Image:
    """Return the region inside a box, enlarged."""
    top, left, height, width = (int(v) for v in box[:4])
    return resized(image[:, top : top + max(1, height), left : left + max(1, width)], side)


def _varied(chosen: AuditImages, n: int) -> AuditImages:
    """Return ``n`` images of different predicted classes, as far as there are."""
    first: dict[int, int] = {}
    for i, k in enumerate(chosen.logits.argmax(1).tolist()):
        first.setdefault(k, i)
    rows = [first[k] for k in sorted(first)]
    rows = [rows[j] for j in spread(len(rows), n)]
    rows += [i for i in spread(len(chosen), n) if i not in rows]
    return chosen.rows(rows[:n])


def _concepts(subject: Subject, explainer: Explainer) -> list[dict[str, Any]]:
    gallery, by_class = explainer.gallery, explainer.contributions_by_class
    if gallery is None or by_class is None:
        return []
    rows = []
    for k, shots in enumerate(gallery.shots[:N_CONCEPTS]):
        values: Tensor = by_class[k]
        order = values.abs().argsort(descending=True, stable=True)[:3].tolist()
        rows.append(
            {
                "index": k,
                "label": explainer.label(k),
                "classes": [[subject.class_names[c], float(values[c])] for c in order],
                "shots": [
                    {"src": data_url(explainer.picture(k, s)), "alt": f"image {s.id}, score {s.score:.3g}"}
                    for s in shots[:N_SHOTS]
                ],
            }
        )
    return rows


def _example(subject: Subject, sample: AuditImages, i: int, e: Any) -> dict[str, Any]:
    image = sample.images[i]
    truth = int(sample.labels[i])
    return {
        "id": sample.ids[i],
        "src": data_url(resized(image)),
        "prediction": e.prediction.label,
        "probability": e.prediction.probability,
        "truth": subject.class_names[truth] if 0 <= truth < subject.n_classes else None,
        "target": e.target.label,
        "value": e.target_value,
        "bias": e.bias,
        "residual": e.residual,
        "more": max(0, len(e.concepts) - N_PARTS),
        "explained": e.explained_share(e.ranked()[:N_PARTS]),
        "parts": [
            {
                "label": c.label,
                "contribution": c.contribution,
                "note": c.note,
                "src": None
                if c.heatmap is None
                else data_url(overlay(image, c.heatmap, positive=c.counts_for, side=SIDE)),
            }
            for c in e.ranked()[:N_PARTS]
        ],
    }


def resized(image: Tensor, side: int = SIDE) -> Image.Image:
    """Return pixels as a picture whose longer side is ``side``."""
    _, h, w = image.shape
    scale = side / max(h, w)
    rule = Image.Resampling.NEAREST if scale > 4 else Image.Resampling.BILINEAR
    return Image.fromarray(to_rgb(image)).resize((max(1, round(w * scale)), max(1, round(h * scale))), rule)


def data_url(picture: Image.Image) -> str:
    """Return a picture as a PNG inside a URL."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
