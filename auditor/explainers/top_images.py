"""Which images of a data source hold most of a concept of an explainer."""

from __future__ import annotations

import torch

from auditor.data.source import Data
from auditor.errors import DataError, OptionError
from auditor.explainers.base import Explainer
from auditor.progress import Progress, silent
from auditor.subject.subject import Subject

BATCH = 32


def top_images(
    explainer: Explainer, subject: Subject, data: Data, concept: int, n: int, progress: Progress = silent
) -> torch.Tensor:
    """Return a mask (images,) of the ``n`` images with the largest activation of the concept."""
    if not 0 <= concept < explainer.n_concepts:
        raise OptionError(
            f"{explainer.name or explainer.kind}: concepts are 0 to {explainer.n_concepts - 1}, got {concept}."
        )
    activations: list[float] = []
    for batch in data.batches(subject, BATCH):
        for explanation in explainer.explain(subject, batch.images):
            held = [c.activation for c in explanation.concepts if c.index == concept]
            activations.append(held[0] if held else 0.0)
        progress("reading concepts", len(activations), len(data))
    if len(activations) != len(data):
        raise DataError(f"{data.spec}: {len(data) - len(activations)} images cannot be read; remove them first.")
    score = torch.tensor(activations)
    if len(score) < 2 * n or not (score.topk(n).values > 0).all():
        raise DataError(
            f"concept {concept} shows in {int((score > 0).sum())} of {len(score)} images; {n} that show it and as many "
            "others are needed: give more images."
        )
    is_top = torch.zeros(len(data), dtype=torch.bool)
    is_top[score.topk(n).indices] = True
    return is_top
