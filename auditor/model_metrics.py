"""Metrics of the model itself, after the interpretability framework of the extended dlADMM paper.

``model/<layer>/…`` for every linear and convolutional layer: sparsity and disentanglement of its weights and
faithfulness of their norms; ``model/…`` for the whole: accuracy, cross-entropy, and stability.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from auditor.explainer import Progress, silent
from auditor.measure import Measure, of_items, skipped
from auditor.model_stability import model_stability
from auditor.subject import Subject
from auditor.subject_graph import graph_of
from auditor.weight_layers import weight_layers
from auditor.weight_metrics import weight_metrics

BATCH = 64


def model_metrics(
    subject: Subject, images: Tensor, labels: Tensor | None, *, seed: int = 0, progress: Progress = silent
) -> dict[str, Measure]:
    """Return every metric of the model by name; ``images`` are pixels, ``labels`` class indices or None."""
    found: dict[str, Measure] = {}
    found |= _quality(subject, images, labels, seed)
    layers = weight_layers(graph_of(subject))
    for done, layer in enumerate(layers):
        progress("weights of every layer", done, len(layers))
        found |= {f"model/{layer.name}/{k}": m for k, m in weight_metrics(layer.rows, seed=seed).items()}
    progress("weights of every layer", len(layers), len(layers))
    stable = model_stability(subject, images, seed=seed, progress=progress)
    return found | {f"model/{k}": m for k, m in stable.items()}


def _quality(subject: Subject, images: Tensor, labels: Tensor | None, seed: int) -> dict[str, Measure]:
    if labels is None:
        reason = "the data has no labels"
        return {"model/accuracy": skipped(reason, "up"), "model/cross_entropy": skipped(reason, "down")}
    with torch.no_grad():
        logits = torch.cat([subject.logits(part) for part in torch.split(images, BATCH)])
    labels = labels.to(logits.device)
    right = (logits.argmax(1) == labels).double().cpu()
    loss = F.cross_entropy(logits.double(), labels, reduction="none").cpu()
    n = subject.n_classes
    return {
        "model/accuracy": of_items(right, "up", null=1 / n, seed=seed),
        "model/cross_entropy": of_items(loss, "down", null=math.log(n), seed=seed),
    }
