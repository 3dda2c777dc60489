"""How well the model itself does on labelled data: accuracy, per class too, log loss, and calibration (ECE)."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from auditor.auditing.images import Answers
from auditor.metrics.measure import Measure, of_items, skipped
from auditor.subject.subject import Subject

BINS = 15
N_BOOTSTRAP = 200
MAX_CLASSES = 50  # beyond it only the worst class is a metric of its own
Floats = NDArray[np.float64]

NAMES = frozenset({"accuracy", "nll", "ece", "worst_class_accuracy"})


def performance(subject: Subject, found: Answers, *, seed: int = 0) -> dict[str, Measure]:
    """Return ``accuracy``, ``nll``, ``ece``, ``worst_class_accuracy`` and ``accuracy/<class>`` as measures."""
    known = found.labelled
    if not bool(known.any()):
        reason = "the data has no labels"
        return {name: skipped(reason, "down" if name in ("nll", "ece") else "up") for name in sorted(NAMES)}
    logits, labels = found.logits[known].double(), found.labels[known]
    p = two_sided(logits).softmax(1)
    truth = labels if logits.shape[1] > 1 else 1 - labels  # one logit speaks for class 1, which stands first there
    right = (p.argmax(1) == truth).double()
    counts = labels.bincount(minlength=max(subject.n_classes, 2))
    metrics = {
        "accuracy": of_items(right, "up", null=float(counts.max() / counts.sum()), seed=seed),
        "nll": of_items(-p.gather(1, truth[:, None])[:, 0].clamp_min(1e-12).log(), "down", seed=seed),
        "ece": _ece(p.amax(1).numpy(), right.numpy(), seed),
    }
    names = subject.class_names if subject.n_classes > 1 else ("0", "1")
    each = {
        names[c]: of_items(right[labels == c], "up", seed=seed) for c in range(len(names)) if bool((labels == c).any())
    }
    metrics["worst_class_accuracy"] = min(each.values(), key=lambda m: m.value)
    if len(names) <= MAX_CLASSES:
        metrics |= {f"accuracy/{plain(name)}": measure for name, measure in each.items()}
    return metrics


def two_sided(logits: Tensor) -> Tensor:
    """Return logits of at least two classes: a single one stands against 0."""
    return torch.cat([logits, torch.zeros_like(logits)], 1) if logits.shape[1] == 1 else logits


def plain(name: str) -> str:
    """Return a class name as it can stand in a metric's name.

    >>> plain("Bald Eagle (adult)")
    'Bald Eagle _adult_'
    """
    return re.sub(r"[^A-Za-z0-9_. -]", "_", name)


def expected_calibration_error(confidence: Floats, right: Floats) -> float:
    """Return the mean gap between confidence and accuracy over bins of equal width, weighted by their counts.

    >>> expected_calibration_error(np.array([0.9, 0.9]), np.array([1.0, 0.0]))
    0.4
    """
    place = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    gap = np.bincount(place, weights=confidence - right, minlength=BINS)
    return float(np.abs(gap).sum() / len(confidence))


def _ece(confidence: Floats, right: Floats, seed: int) -> Measure:
    value = expected_calibration_error(confidence, right)
    rng = np.random.default_rng(seed)
    draws: list[Any] = [rng.integers(0, len(right), len(right)) for _ in range(N_BOOTSTRAP)]
    low, high = np.quantile([expected_calibration_error(confidence[r], right[r]) for r in draws], [0.025, 0.975])
    return Measure(value, float(min(low, value)), float(max(high, value)), len(right), direction="down")
