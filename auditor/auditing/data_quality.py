"""Whether the data of an audit can be trusted: labels that the model contradicts, images that a fit has already used.

``data_quality`` gives what the audit's JSON says under ``data``: ``suspicious_labels`` and ``near_duplicates``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from auditor.auditing.images import Answers, HeldOut
from auditor.auditing.performance import both_sides
from auditor.data.near_duplicates import is_plain, near, nearest
from auditor.explainers.base import Explainer
from auditor.metrics.suspicious_labels import suspicious_labels
from auditor.subject.subject import Subject

SHOWN = 12  # images named in the audit


def data_quality(
    subject: Subject, model_answers: Answers, explainers: Mapping[str, Explainer], held: Mapping[str, HeldOut]
) -> dict[str, Any]:
    """Return suspicious labels and, per explainer, held-out images that nearly equal some it was fitted on."""
    return {
        "suspicious_labels": _suspicious(subject, model_answers),
        "near_duplicates": {
            name: _duplicates(subject, model_answers, e, held[name]) for name, e in sorted(explainers.items())
        },
    }


def _suspicious(subject: Subject, model_answers: Answers) -> dict[str, Any]:
    n = int(model_answers.labelled.sum())
    if not n:
        return {"images": 0, "of": 0, "worst": []}
    single = model_answers.logits.shape[1] == 1
    p = both_sides(subject.probabilities(model_answers.logits))
    p = p.flip(1) if single else p  # one logit is that of class 1, which comes first there
    names = subject.class_names if not single else ("0", "1")
    suspicions = suspicious_labels(p, model_answers.labels)
    return {
        "images": len(suspicions),
        "of": n,
        "worst": [
            {
                "id": model_answers.ids[s.row],
                "label": names[s.label],
                "suggested": names[s.suggested],
                "probability": float(p[s.row, s.suggested]),
            }
            for s in suspicions[:SHOWN]
        ],
    }


def _duplicates(subject: Subject, model_answers: Answers, explainer: Explainer, held: HeldOut) -> dict[str, Any]:
    """Return how many held-out images nearly equal an image of an explainer's fit."""
    fitted = explainer.fingerprints_
    rows = held.rows.nonzero()[:, 0]
    if fitted is None or not len(model_answers.fingerprints) or not len(rows):
        return {"images": None, "of": len(rows), "reason": "the fit kept no fingerprints of its images; fit it again"}
    hashes = model_answers.fingerprints[rows]
    distance, _ = nearest(hashes, fitted)
    same = (distance <= near(subject.input_shape)) & ~is_plain(hashes)
    ids = [model_answers.ids[i] for i in rows[same].tolist()]
    return {"images": len(ids), "of": len(rows), "ids": ids[:SHOWN]}


def sentences(data: Mapping[str, Any]) -> list[str]:
    """Return what an audit's ``data`` says of its quality, one sentence per finding; none for an older audit.

    >>> sentences({"near_duplicates": {"concepts": {"images": 3, "of": 60, "ids": ["a.png"]}}})
    ['3 of the 60 images held out of concepts are near-duplicates of images it was fitted on (a.png, …).']
    """
    lines = []
    labels = data.get("suspicious_labels") or {}
    if labels.get("images"):
        worst = "; ".join(
            f"{w['id']} is labelled {w['label']}, looks like {w['suggested']}" for w in labels["worst"][:3]
        )
        lines.append(
            f"{labels['images']} of {labels['of']} labels are contradicted by the model with confidence; look at these "
            f"first: {worst}."
        )
    for name, about in (data.get("near_duplicates") or {}).items():
        if about["images"]:
            some = ", ".join(about["ids"][:3]) + (", …" if about["images"] > len(about["ids"][:3]) else "")
            lines.append(
                f"{about['images']} of the {about['of']} images held out of {name} are near-duplicates of images it "
                f"was fitted on ({some})."
            )
    return lines
