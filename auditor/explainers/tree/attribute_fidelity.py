"""Fidelity d_D(F): how well codes of single features predict attributes not trained on ([Intersection], eq. 3).

Every feature i and code j give two yes/no features, [v_i = j] and [v_i != j]; an attribute scores the best r among all
of them, the fidelity is the mean over attributes. r is F1 as in the paper's tables, or the accuracy that it names
beside it. Two numbers keep it honest: the ``floor`` that a constant feature reaches (F1: always yes, 2 pi / (1 + pi)
for an attribute of frequency pi; accuracy: max(pi, 1 - pi); any code that never occurs is one), and ``honest``,
where the feature is chosen on one half of the images and scored on the other, both ways round. The paper's maximum is
taken on the very images it is scored on, over 2^(r+1) n candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from auditor.errors import DataError, NumericsError, ShapeError
from auditor.kernels.trees.code_counts import code_counts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Agreement = Literal["f1", "accuracy"]  # r of equation 3


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Scores in [0, 1]; the arrays have one entry per attribute that varies on the images.

    ``best_feature``, ``best_code`` and ``is_equal`` name the winner per attribute: [v_feature == code] or its opposite.
    """

    score: float
    floor: float
    honest: float
    honest_floor: float
    attributes: Ints  # columns of the attribute matrix that were scored
    per_attribute: Floats
    best_feature: Ints
    best_code: Ints
    is_equal: NDArray[np.bool_]
    n_constant: int  # attributes left out because all images agree on them
    n_constant_in_a_half: int  # left out of ``honest`` only


def fidelity(codes: Any, attributes: Any, bits: int, *, by: Agreement = "f1", seed: int = 0) -> Fidelity:
    """Return the fidelity of ``codes`` (images, features) to yes/no ``attributes`` (images, attributes).

    >>> v = np.array([[0], [0], [3], [3]], np.uint8)
    >>> fidelity(v, np.array([[1], [1], [0], [0]]), bits=2).score
    1.0
    """
    codes, marks = _checked(codes, attributes, bits)
    varies = marks.any(0) & ~marks.all(0)
    if not varies.any():
        raise DataError(
            f"fidelity: none of the {marks.shape[1]} attributes varies on the {len(marks)} images; give others."
        )
    varying = np.flatnonzero(varies)
    marks = np.ascontiguousarray(marks[:, varying])
    score, winner = _best(codes, marks, bits, by)
    frequency = marks.mean(0)
    order = np.random.default_rng(seed).permutation(len(marks))
    halves = (order[: len(order) // 2], order[len(order) // 2 :])
    fair = np.array([marks[h].any(0) & ~marks[h].all(0) for h in halves]).all(0)
    honest = honest_floor = float("nan")
    if fair.any():
        picked = marks[:, fair]
        scores, floors = [], []
        for choose, test in (halves, halves[::-1]):
            _, (feature, code, equal) = _best(codes[choose], picked[choose], bits, by)
            predicted = (codes[test][:, feature] == code) == equal
            scores.append(AGREEMENT[by](picked[test], predicted).mean())
            floors.append(_constant(picked[test].mean(0), by).mean())
        honest, honest_floor = float(np.mean(scores)), float(np.mean(floors))
    feature, code, equal = winner
    return Fidelity(
        float(score.mean()),
        float(_constant(frequency, by).mean()),
        honest,
        honest_floor,
        varying,
        score,
        feature,
        code,
        equal,
        int((~varies).sum()),
        int((~fair).sum()),
    )


@dataclass(frozen=True, slots=True)
class Distance:
    """d_D with a distance as r: real-valued units against yes/no attributes, least |u - a| or |1 - u - a| on average.

    ``floor`` is that of the better constant unit, min(pi, 1 - pi): a distance near it, or above, says nothing.
    """

    score: float
    floor: float
    honest: float
    honest_floor: float
    per_attribute: Floats
    best_feature: Ints
    is_direct: NDArray[np.bool_]  # the unit itself, or one minus it


def distance(units: Floats, attributes: Any, *, seed: int = 0) -> Distance:
    """Return the mean least distance of ``units`` (images, units) in [0, 1] to yes/no attributes that vary.

    >>> distance(np.array([[0.0, 0.3], [1.0, 0.3]]), np.array([[1], [0]])).score
    0.0
    """
    marks = np.asarray(attributes, dtype=np.float64)
    marks = marks[:, marks.any(0) & ~marks.all(0)]
    if not marks.shape[1]:
        raise DataError(f"fidelity: none of the attributes varies on the {len(marks)} images; give others.")
    score, unit, is_direct = _nearest_unit(units, marks)
    order = np.random.default_rng(seed).permutation(len(marks))
    halves = (order[: len(order) // 2], order[len(order) // 2 :])
    scores, floors = [], []
    for choose, test in (halves, halves[::-1]):
        _, feature, direct = _nearest_unit(units[choose], marks[choose])
        values = units[test][:, feature]
        scores.append(np.abs(np.where(direct, values, 1 - values) - marks[test]).mean())
        pi = marks[test].mean(0)
        floors.append(np.minimum(pi, 1 - pi).mean())
    pi = marks.mean(0)
    floor = float(np.minimum(pi, 1 - pi).mean())
    return Distance(float(score.mean()), floor, float(np.mean(scores)), float(np.mean(floors)), score, unit, is_direct)


def _nearest_unit(units: Floats, marks: Floats) -> tuple[Floats, Ints, NDArray[np.bool_]]:
    """Return per attribute the least distance, its unit, and whether it is the unit's own and not one minus it."""
    direct = (units.T @ (1 - marks) + (1 - units).T @ marks) / len(marks)  # (units, attributes)
    both = np.minimum(direct, 1 - direct)
    unit, column = both.argmin(0), np.arange(marks.shape[1])
    return both[unit, column], unit, direct[unit, column] <= 0.5


def fidelity_metrics(codes: Any, marks: Any, bits: int) -> dict[str, float]:
    """Return d_D of codes by F1 and by accuracy, with the honest split and the floors, as metrics of a fit.

    What is not known (no attribute varies in both halves) is left out.
    """
    by_f1, by_accuracy = fidelity(codes, marks, bits), fidelity(codes, marks, bits, by="accuracy")
    values = {
        "fidelity": by_f1.score,
        "fidelity_floor": by_f1.floor,
        "fidelity_honest": by_f1.honest,
        "fidelity_honest_floor": by_f1.honest_floor,
        "fidelity_accuracy": by_accuracy.score,
        "fidelity_accuracy_floor": by_accuracy.floor,
    }
    return {name: value for name, value in values.items() if not np.isnan(value)}


def f1(truth: NDArray[np.bool_], predicted: NDArray[np.bool_]) -> Floats:
    """Return the F1 score per column, 2 TP / (said yes + true yes), 0 where both are empty.

    >>> f1(np.array([[1], [1], [0], [0]], bool), np.array([[1], [0], [1], [0]], bool)).tolist()
    [0.5]
    """
    both, total = (truth & predicted).sum(0), truth.sum(0) + predicted.sum(0)
    return np.asarray(2 * both / np.maximum(total, 1), dtype=np.float64)


def accuracy(truth: NDArray[np.bool_], predicted: NDArray[np.bool_]) -> Floats:
    """Return the share of rows per column on which both agree.

    >>> accuracy(np.array([[1], [1], [0], [0]], bool), np.array([[1], [0], [0], [0]], bool)).tolist()
    [0.75]
    """
    return np.asarray((truth == predicted).mean(0), dtype=np.float64)


AGREEMENT = {"f1": f1, "accuracy": accuracy}


def _constant(frequency: Floats, by: Agreement) -> Floats:
    """Return what the better constant feature reaches."""
    return 2 * frequency / (1 + frequency) if by == "f1" else np.maximum(frequency, 1 - frequency)


def _best(codes: Any, marks: Any, bits: int, by: Agreement) -> tuple[Floats, tuple[Ints, Ints, NDArray[np.bool_]]]:
    """Return the best agreement per attribute and its (feature, code, equal); the first of equals wins."""
    n, n_codes = len(codes), 2**bits
    counts = code_counts(codes, marks, n_codes)
    hits, predicted = counts[:, :, :-1].reshape(-1, marks.shape[1]), counts[:, :, -1].reshape(-1, 1)
    true = marks.sum(0)[None]
    best = np.full(marks.shape[1], -1.0)
    candidate = np.zeros(marks.shape[1], dtype=np.int64)
    equal = np.ones(marks.shape[1], dtype=bool)
    step = 4096  # candidates at a time: a bounded buffer
    for first in range(0, len(hits), step):
        tp, yes = hits[first : first + step].astype(np.float64), predicted[first : first + step]
        for is_equal in (True, False):
            both, total = (tp, yes + true) if is_equal else (true - tp, n - yes + true)
            value = 2 * both / np.maximum(total, 1) if by == "f1" else (n + 2 * both - total) / n
            top = value.argmax(0)
            highest = value[top, np.arange(value.shape[1])]
            better = highest > best
            best[better], candidate[better], equal[better] = highest[better], (first + top)[better], is_equal
    return best, (candidate // n_codes, candidate % n_codes, equal)


def _checked(codes: Any, attributes: Any, bits: int) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    codes, marks = np.asarray(codes), np.asarray(attributes)
    if codes.ndim != 2 or marks.ndim != 2 or len(codes) != len(marks) or not codes.shape[1]:
        raise ShapeError(
            f"fidelity: codes and attributes must be (images, features) and (images, attributes), "
            f"got {codes.shape} and {marks.shape}."
        )
    if len(codes) < 2:
        raise DataError(f"fidelity: needs at least two images, got {len(codes)}.")
    if not ((codes >= 0) & (codes < 2**bits) & (codes == np.round(codes))).all():
        raise NumericsError(
            f"fidelity: codes of {bits} bits must be integers in 0..{2**bits - 1}, got {codes.min()}..{codes.max()}."
        )
    if not np.isin(marks, (0, 1)).all():
        raise NumericsError(
            "fidelity: attributes must be 0 or 1; threshold numeric ones first (class attributes of CUB at 50)."
        )
    return codes.astype(np.uint8), marks.astype(bool)
