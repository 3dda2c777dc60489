"""Metrics of the model itself, after the interpretability framework of the extended dlADMM paper.

``model/<layer>/…`` for every linear and convolutional layer: sparsity and disentanglement of its weights and
faithfulness of their norms; ``model/…`` for the whole: accuracy, cross-entropy, and stability.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from auditor.auditing.performance import right_and_loss
from auditor.errors import AuditError
from auditor.metrics.ablation import ablate, multiplications_above, perceptron_above
from auditor.metrics.measure import Direction, Measure, of_items, skipped
from auditor.metrics.weights import weight_metrics
from auditor.network.aten_graph import graph_of
from auditor.network.weight_layers import WeightLayer, weight_layers
from auditor.progress import Progress, silent
from auditor.stability.model import NAMES, NULL_IMAGES, PASSES, images_within, model_stability, multiplications
from auditor.subject.subject import Subject

BATCH = 64
ABLATION_PASSES, STABILITY_PASSES = 8.0, 10.0  # per image, spent on ablating neurons and on stability
LEAST = 3e10  # multiplications that are always spent on either: a second or two, all there is on a small network
BUDGET = 1.5e12  # multiplications spent on ablating neurons at most; within it neurons and images are drawn
FEW_IMAGES, FEW_NEURONS = 8, 12  # then; on the largest networks fewer images still


def model_metrics(
    subject: Subject, images: Tensor, labels: Tensor | None, *, seed: int = 0, progress: Progress = silent
) -> dict[str, Measure]:
    """Return every metric of the model by name; ``images`` are pixels, ``labels`` class indices or None."""
    metrics: dict[str, Measure] = {}
    metrics |= _quality(subject, images, labels, seed)
    try:
        layers = weight_layers(graph_of(subject))
    except AuditError as error:
        return metrics | {f"model/{name}": skipped(str(error), "down") for name in NAMES}
    for done, layer in enumerate(layers):
        progress("weights of every layer", done, len(layers))
        metrics |= {f"model/{layer.name}/{k}": m for k, m in weight_metrics(layer.rows, seed=seed).items()}
    progress("weights of every layer", len(layers), len(layers))
    ablation, stability = budgets(multiplications(layers), len(images))
    for done, layer in enumerate(layers):
        progress("neurons ablated", done, len(layers))
        faithful = _faithfulness(subject, layers, layer, images, labels, seed, ablation)
        metrics[f"model/{layer.name}/faithfulness"] = faithful
    progress("neurons ablated", len(layers), len(layers))
    stable = model_stability(subject, images, seed=seed, budget=stability, progress=progress)
    return metrics | {f"model/{k}": m for k, m in stable.items()}


def budgets(cost: int, n_images: int) -> tuple[float, float]:
    """Return the multiplications for ablating neurons and for stability when one pass of an image takes ``cost``."""
    ablation, stability = (max(LEAST, passes * n_images * cost) for passes in (ABLATION_PASSES, STABILITY_PASSES))
    return min(BUDGET, ablation), stability


def layer_passes(subject: Subject, n_images: int) -> float | None:
    """Return the passes per image that ``model_metrics`` takes at most, runs of upper layers and gradients as shares.

    None where the network cannot be read as a graph, and nothing but the weights' absence is said of it.
    """
    try:
        cost = max(1, multiplications(weight_layers(graph_of(subject))))
    except AuditError:
        return None
    ablation, stability = budgets(cost, n_images)
    n = images_within(stability, cost, n_images)
    return 1 + ablation / cost / n_images + PASSES * (n + min(n, NULL_IMAGES)) / n_images


def layer_names(subject: Subject) -> dict[str, Direction]:
    """Return what ``model_metrics`` gives at least, with the direction that is better: for an audit without it."""
    names: dict[str, Direction] = {"cross_entropy": "down", **dict.fromkeys(NAMES, "down")}
    try:
        layers = weight_layers(graph_of(subject))
    except AuditError:
        return names
    return names | {f"{layer.name}/faithfulness": "up" for layer in layers}


def _faithfulness(
    subject: Subject,
    layers: list[WeightLayer],
    layer: WeightLayer,
    images: Tensor,
    labels: Tensor | None,
    seed: int,
    budget: float = BUDGET,
) -> Measure:
    """Return the layer's faithfulness on as many neurons and images as its share of the budget allows."""
    if labels is None:
        return skipped("the data has no labels, and without them there is no loss", "up")
    graph = graph_of(subject)
    n, m, batch = len(layer.rows), len(images), graph.batch or 1
    if m < batch:
        return skipped(f"the network takes {batch} images at a time, and there are {m}", "up")
    if perceptron_above(graph, layer) is None:
        runs = int(budget / len(layers) / max(1, multiplications_above(graph, layers, layer)))
        if n * m > runs:
            m = min(m, max(batch, runs // n, min(FEW_IMAGES, runs // FEW_NEURONS)))
            n = min(n, max(FEW_NEURONS, runs // m))
    generator = torch.Generator().manual_seed(seed)
    neurons = torch.randperm(len(layer.rows), generator=generator)[:n].sort().values
    with subject.at_rest():
        done = ablate(graph, layer, subject.normalise(images[:m]), labels[:m], neurons)
    few = n < len(layer.rows) or m < len(images)
    note = f"{n} of {len(layer.rows)} neurons, drawn at random, on {m} of {len(images)} images" if few else ""
    return done.faithfulness(seed, note)


def _quality(subject: Subject, images: Tensor, labels: Tensor | None, seed: int) -> dict[str, Measure]:
    if labels is None:
        reason = "the data has no labels"
        return {"model/accuracy": skipped(reason, "up"), "model/cross_entropy": skipped(reason, "down")}
    with torch.no_grad():
        logits = torch.cat([subject.logits(part) for part in torch.split(images, BATCH)])
    labels = labels.to(logits.device)
    right, loss = (v.cpu() for v in right_and_loss(subject, logits, labels))
    n = subject.n_classes
    return {
        "model/accuracy": of_items(right, "up", null=1 / n, seed=seed),
        "model/cross_entropy": of_items(loss, "down", null=math.log(n), seed=seed),
    }
