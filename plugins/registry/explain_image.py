"""Explain one image file by everything attached to a version: what ``auditor explain`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from auditor.errors import DataError, ModelError
from auditor.plugins.registry.subjects import load_subject
from auditor.plugins.registry.attachments import load
from auditor.plugins.registry.attachments import names as attached_names


def explain_image(
    uri: str,
    image: Path,
    *,
    names: Sequence[str] = (),
    target: str | None = None,
    samples: int = 8,
    seed: int = 0,
    out: Path | None = None,
    allow_pickle: bool | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the answer of DESIGN.md's ``explain``; with ``out`` also write heatmaps and a contact sheet as PNG.

    A tree is written there as a page, too, with the image's path in colour.

    ``options`` (``timeout_s``, ``max_steps``) reach the explainers that take them per request.
    """
    import torch

    from auditor.explainers.explanation import class_scores
    from auditor.subject.preprocessing import read_image
    from auditor.stability.decision import stability

    if not image.exists():
        raise DataError(f"image {image}: no such file; give the path of a PNG, JPEG or other image.")
    known = attached_names(uri)
    if not known:
        raise ModelError(f"nothing is attached to {uri}; fit something first: auditor fit nmf {uri} --data DATA.")
    subject = load_subject(uri, allow_pickle=allow_pickle)
    x = torch.from_numpy(read_image(image, subject.preprocessing))[None]
    if target is not None:
        subject.class_index(target)
    explainers = [load(uri, name, subject=subject) for name in names or known]
    explanations = []
    for explainer in explainers:
        taken = {k: v for k, v in options.items() if k in explainer.per_request and v is not None}
        explanations.append(explainer.explain(subject, x, target, **taken)[0])
    with torch.no_grad():
        logits = subject.logits(x)
    index = subject.class_index(target) if target is not None else int(logits.argmax())
    (prediction,), (wanted,) = class_scores(logits, subject.class_names, [index])
    layer = next((e.layer_ for e in explainers if e.layer_), None) or subject.default_layer()
    if out is not None:
        _draw(x, explainers, explanations, out)
    return {
        "prediction": {"index": prediction.index, "label": prediction.label, "probability": prediction.probability},
        "target": {"index": wanted.index, "label": wanted.label, "logit": wanted.logit},
        "explanations": [e.to_json() for e in explanations],
        "stability": stability(subject, x[0], layer, index, samples=samples, seed=seed).to_json(),
        "model": {"name": subject.name, "version": subject.version, "digest": subject.digest},
    }


def _draw(x: Any, explainers: Sequence[Any], explanations: Sequence[Any], out: Path) -> None:
    from auditor.attribution.heatmap import overlay
    from auditor.explainers.contact_sheet import contact_sheet
    from auditor.explainers.tree.explainer import TreeExplainer
    from auditor.explainers.tree.page import write_tree_page

    out.mkdir(parents=True, exist_ok=True)
    for explainer, e in zip(explainers, explanations, strict=True):
        if isinstance(explainer, TreeExplainer):
            write_tree_page(explainer, out / f"{e.name}.html", e, x[0])
        for c in e.concepts:
            if c.heatmap is not None:
                picture = overlay(x[0], c.heatmap, positive=c.contribution is None or c.contribution >= 0, side=256)
                picture.save(out / f"{e.name}-{c.index:02d}.png")
        contact_sheet(x, [e], out / f"{e.name}.png", n_concepts=6)
