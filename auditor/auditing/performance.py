"""How well the model itself does on labelled data: accuracy, per class too, log loss, and calibration (ECE).

Where several labels may be true of an image, each is judged by itself: right when its probability is on the side of .5
that the data says, and an image counts with the mean over its labels.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from auditor.auditing.images import Answers
from auditor.metrics.calibration import expected_calibration_error
from auditor.metrics.measure import Measure, of_items, skipped
from auditor.metrics.names import plain
from auditor.subject.subject import Subject

N_BOOTSTRAP = 200
MAX_LOSS = -math.log(1e-12)  # one image that is surely wrong must not be all there is to see
MAX_CLASSES = 50  # beyond it only the worst class is a metric of its own
Floats = NDArray[np.float64]

NAMES = frozenset({"accuracy", "nll", "ece", "worst_class_accuracy"})


def performance(subject: Subject, model_answers: Answers, *, seed: int = 0) -> dict[str, Measure]:
    """Return ``accuracy``, ``nll``, ``ece``, ``worst_class_accuracy`` and ``accuracy/<class>`` as measures."""
    if model_answers.label_sets is not None:
        return _of_label_sets(subject, model_answers.logits, model_answers.label_sets, seed)
    labelled = model_answers.labelled
    if not bool(labelled.any()):
        reason = "the data has no labels"
        return {name: skipped(reason, "down" if name in ("nll", "ece") else "up") for name in sorted(NAMES)}
    logits, labels = model_answers.logits[labelled].double(), model_answers.labels[labelled]
    p = both_sides(subject.probabilities(logits))
    right, loss = right_and_loss(subject, logits, labels)
    counts = labels.bincount(minlength=max(subject.n_classes, 2))
    metrics = {
        "accuracy": of_items(right, "up", null=float(counts.max() / counts.sum()), seed=seed),
        "nll": of_items(loss.clamp_max(MAX_LOSS), "down", seed=seed),
        "ece": _ece(p.amax(1, keepdim=True).numpy(), right[:, None].numpy(), seed),
    }
    if subject.output.name == "multilabel":
        metrics["accuracy"] = of_items(right, "up", seed=seed)
        metrics["ece"] = skipped("the data has one label per image, which says nothing of the other labels", "down")
    names = subject.class_names if subject.n_classes > 1 else ("0", "1")
    each = {
        names[c]: of_items(right[labels == c], "up", seed=seed) for c in range(len(names)) if bool((labels == c).any())
    }
    return metrics | _by_class(each)


def right_and_loss(subject: Subject, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return per image whether the model is right, 0 or 1, and its log loss, of logits and one label each.

    The prediction is the most probable class; of a multi-label model the labelled class must be more likely than not.
    """
    p = both_sides(subject.probabilities(logits))
    truth = labels if logits.shape[1] > 1 else 1 - labels  # one logit is that of class 1, which comes first there
    of_label = p.gather(1, truth[:, None])[:, 0]
    right = of_label >= 0.5 if subject.output.name == "multilabel" else p.argmax(1) == truth
    return right.double(), -of_label.clamp_min(torch.finfo(p.dtype).tiny).log()


def _of_label_sets(subject: Subject, logits: Tensor, sets: Tensor, seed: int) -> dict[str, Measure]:
    p = subject.probabilities(logits)
    right = ((p >= 0.5) == sets).double()
    share = sets.double().mean(0)
    loss = -torch.where(sets, p, 1 - p).log().clamp_min(-MAX_LOSS)
    metrics = {
        "accuracy": of_items(right.mean(1), "up", null=float(torch.maximum(share, 1 - share).mean()), seed=seed),
        "nll": of_items(loss.mean(1), "down", seed=seed),
        "ece": _ece(torch.maximum(p, 1 - p).numpy(), right.numpy(), seed),
    }
    each = {name: of_items(right[:, c], "up", seed=seed) for c, name in enumerate(subject.class_names)}
    return metrics | _by_class(each)


def _by_class(each: dict[str, Measure]) -> dict[str, Measure]:
    metrics = {"worst_class_accuracy": min(each.values(), key=lambda m: m.value)}
    if len(each) <= MAX_CLASSES:
        metrics |= {f"accuracy/{plain(name)}": measure for name, measure in each.items()}
    return metrics


def both_sides(p: Tensor) -> Tensor:
    """Return probabilities of at least two classes: a single one stands against its complement."""
    return torch.cat([p, 1 - p], 1) if p.shape[1] == 1 else p


def two_sided(logits: Tensor) -> Tensor:
    """Return logits of at least two classes: a single one stands against 0."""
    return torch.cat([logits, torch.zeros_like(logits)], 1) if logits.shape[1] == 1 else logits


def _ece(confidence: Floats, right: Floats, seed: int) -> Measure:
    """Measure the calibration of (images, labels); images are drawn as a whole."""
    value = expected_calibration_error(confidence.ravel(), right.ravel())
    rng = np.random.default_rng(seed)
    draws: list[Any] = [rng.integers(0, len(right), len(right)) for _ in range(N_BOOTSTRAP)]
    low, high = np.quantile(
        [expected_calibration_error(confidence[r].ravel(), right[r].ravel()) for r in draws], [0.025, 0.975]
    )
    return Measure(value, float(min(low, value)), float(max(high, value)), len(right), direction="down")
