"""Pictures for the page of an audit: each explainer's concepts, and a few images explained."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

from PIL import Image
from torch import Tensor

from auditor.auditing.case import Effort, explain
from auditor.auditing.images import AuditImages, spread
from auditor.explainers.concept_page import _picture
from auditor.errors import AuditError
from auditor.explainers.base import Explainer
from auditor.attribution.heatmap import overlay, to_rgb
from auditor.subject.subject import Subject

SIDE = 88
N_CONCEPTS, N_SHOTS, N_EXAMPLES, N_PARTS = 12, 6, 4, 4


def pictures(
    subject: Subject, explainers: Mapping[str, Explainer], chosen: AuditImages, slow_images: int
) -> dict[str, Any]:
    """Return, per explainer, concept rows and explained examples, pictures as data URLs."""
    found = {}
    for name, explainer in sorted(explainers.items()):
        effort = Effort.of(explainer, N_EXAMPLES, 0, min(slow_images, 2))
        sample = _varied(chosen, effort.images)
        try:
            examples = [
                _example(subject, sample, i, e)
                for i, e in enumerate(explain(explainer, subject, sample.images, None, effort))
            ]
        except AuditError:  # an explainer that cannot speak of these images shows none
            examples = []
        found[name] = {"concepts": _concepts(subject, explainer), "examples": examples}
    return found


def _varied(chosen: AuditImages, n: int) -> AuditImages:
    """Return ``n`` images of different predicted classes, as far as there are."""
    first: dict[int, int] = {}
    for i, k in enumerate(chosen.logits.argmax(1).tolist()):
        first.setdefault(k, i)
    rows = [first[k] for k in sorted(first)]
    rows = [rows[j] for j in spread(len(rows), n)]
    rows += [i for i in spread(len(chosen), n) if i not in rows]
    return chosen.rows(rows[:n])


def _concepts(subject: Subject, explainer: Any) -> list[dict[str, Any]]:
    gallery, by_class = getattr(explainer, "gallery_", None), getattr(explainer, "by_class_", None)
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
                    {"src": data_url(_picture(explainer, k, s)), "alt": f"image {s.id}, score {s.score:.3g}"}
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
        "src": data_url(_plain(image)),
        "prediction": e.prediction.label,
        "probability": e.prediction.probability,
        "truth": subject.class_names[truth] if 0 <= truth < subject.n_classes else None,
        "target": e.target.label,
        "value": e.target_value,
        "bias": e.bias,
        "residual": e.residual,
        "more": max(0, len(e.concepts) - N_PARTS),
        "parts": [
            {
                "label": c.label,
                "contribution": c.contribution,
                "note": c.note,
                "src": None
                if c.heatmap is None
                else data_url(
                    overlay(image, c.heatmap, positive=c.contribution is None or c.contribution >= 0, side=SIDE)
                ),
            }
            for c in e.ranked()[:N_PARTS]
        ],
    }


def _plain(image: Tensor) -> Image.Image:
    _, h, w = image.shape
    scale = SIDE / max(h, w)
    rule = Image.Resampling.NEAREST if scale > 4 else Image.Resampling.BILINEAR
    return Image.fromarray(to_rgb(image)).resize((max(1, round(w * scale)), max(1, round(h * scale))), rule)


def data_url(picture: Image.Image) -> str:
    """Return a picture as a PNG inside a URL."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
