"""Probe: how well a linear SVM reads attributes off scores that never saw them, beside PCA and plain NMF.

Scores (images, factors, positions) are pooled per image (mean and maximum over the positions, for every method alike),
scaled to unit variance on the images of the fit, and a linear SVM is trained on those and tested on held-out images.
How soft its margin is (C) is chosen for every method by cross-validation on the images of the fit.
Without given attributes the labels stand in for them, one SVM for all classes.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from auditor.errors import DataError

SOFTNESS = (0.01, 0.1, 1.0)  # values of C that are tried
TRIAL_ROWS, TRIAL_ATTRIBUTES = 1500, 12  # at most, in the cross-validation that chooses one


@dataclass(frozen=True, slots=True)
class Attributes:
    """What the probe asks for: one class number per image, or one yes or no per image and attribute."""

    names: tuple[str, ...]
    values: NDArray[np.int64]  # (images, attributes), a single column of class numbers where they are the labels


def labels_as_attributes(labels: Tensor) -> Attributes:
    """Take the labels themselves: one attribute with as many values as classes."""
    return Attributes(("label",), labels.numpy().astype(np.int64)[:, None])


def read_attributes(
    path: str | Path, ids: Sequence[str], labels: Tensor, class_names: Sequence[str], threshold: float
) -> Attributes:
    """Read a CSV file whose first column names an image or a class; a value above ``threshold`` means yes."""
    where = f"attributes {path}"
    try:
        with Path(path).open(newline="") as file:
            header, *rows = [row for row in csv.reader(file) if row]
        table = {row[0]: [float(v) for v in row[1:]] for row in rows}
    except (OSError, ValueError) as error:
        raise DataError(
            f"{where}: want a CSV file with a header, an image or class name first and numbers after it; "
            f"got: {' '.join(str(error).split())[:120]}."
        ) from error
    if any(len(values) != len(header) - 1 for values in table.values()) or len(header) < 2:
        raise DataError(f"{where}: every row needs a name and {len(header) - 1} numbers, as the header has.")
    keys = _keys(table, ids, labels, class_names)
    if keys is None:
        raise DataError(
            f"{where}: its first column names neither the images (such as {ids[0]!r}) nor the classes (such as "
            f"{class_names[0]!r}); name all of one or the other{_nearest(table, ids, labels, class_names)}."
        )
    marks = np.array([[v > threshold for v in table[key]] for key in keys], dtype=np.int64)
    return Attributes(tuple(header[1:]), marks)


def _nearest(table: Mapping[str, Any], ids: Sequence[str], labels: Tensor, class_names: Sequence[str]) -> str:
    """Return, for the first name that has no row, the row that looks most like it: of a class if any class has one."""
    used = [class_names[k] for k in sorted({int(k) for k in labels if 0 <= int(k) < len(class_names)})]
    names = used if any(name in table for name in used) or not any(i in table for i in ids) else list(ids)
    for name in names:
        near = get_close_matches(name, table, n=1, cutoff=0.5)
        if name not in table and near:
            return f"; {name!r} has no row, the nearest is {near[0]!r}"
    return ""


def _keys(table: Mapping[str, Any], ids: Sequence[str], labels: Tensor, class_names: Sequence[str]) -> list[str] | None:
    """Return the row of every image: its own, by full or last part of its name, or that of its class."""
    if all(i in table for i in ids):
        return list(ids)
    short = {Path(k).name: k for k in table}
    if len(short) == len(table) and all(Path(i).name in short for i in ids):
        return [short[Path(i).name] for i in ids]
    if bool((labels >= 0).all()):
        for names in (class_names, [str(k) for k in range(len(class_names))]):
            label_names = [names[int(k)] for k in labels]
            if all(name in table for name in label_names):
                return label_names
        folders = [Path(i).parts[0] for i in ids]  # an image folder: the class is the folder's name
        if all(name in table for name in folders):
            return folders
    return None


def pooled_features(S: Tensor) -> Tensor:
    """Return mean and maximum over the positions, (images, 2 factors); a vector layer has one position and its value.

    >>> pooled_features(torch.tensor([[[1.0, 3.0]]]))
    tensor([[2., 3.]])
    """
    if S.shape[-1] == 1:
        return S[..., 0]
    return torch.cat([S.mean(-1), S.amax(-1)], 1)


def probe_accuracy(features: Tensor, held: Tensor, attributes: Attributes, seed: int = 0) -> float:
    """Return the accuracy on held-out images, mean over the attributes that vary in the fit; NaN when none does."""
    from sklearn.preprocessing import StandardScaler

    X, test = features.double().numpy(), held.numpy()
    scaler = StandardScaler().fit(X[~test])
    train, held_out = scaler.transform(X[~test]), scaler.transform(X[test])
    columns = [c for c in attributes.values.T if len(set(c[~test & (c >= 0)].tolist())) > 1 and (c[test] >= 0).any()]
    if not columns:
        return float("nan")
    softness = _softness(train, [c[~test] for c in columns], seed)
    accuracies = []
    for column in columns:
        y, truth = column[~test], column[test]
        svm = _svm(softness, seed).fit(train[y >= 0], y[y >= 0])
        accuracies.append(float((svm.predict(held_out[truth >= 0]) == truth[truth >= 0]).mean()))
    return float(np.mean(accuracies))


def _svm(softness: float, seed: int) -> Any:
    from sklearn.svm import LinearSVC

    # primal form: Newton steps that converge without a warning however the classes lie
    return LinearSVC(C=softness, dual=False, max_iter=20_000, random_state=seed)


def _softness(X: NDArray[Any], columns: Sequence[NDArray[Any]], seed: int) -> float:
    """Return the C of `SOFTNESS` that is best in three-fold cross-validation, on some attributes and images."""
    rows = np.arange(0, len(X), max(1, math.ceil(len(X) / TRIAL_ROWS)))
    some = [columns[i] for i in range(0, len(columns), max(1, math.ceil(len(columns) / TRIAL_ATTRIBUTES)))]
    right = dict.fromkeys(SOFTNESS, 0.0)
    for column in some:
        labelled = rows[column[rows] >= 0]
        fold = np.random.default_rng(seed).permutation(len(labelled)) % 3
        for k in range(3):
            fit, rest = labelled[fold != k], labelled[fold == k]
            if len(set(column[fit].tolist())) < 2 or not len(rest):
                continue
            for c in SOFTNESS:
                right[c] += float((_svm(c, seed).fit(X[fit], column[fit]).predict(X[rest]) == column[rest]).mean())
    return max(SOFTNESS, key=lambda c: right[c])


def majority_accuracy(held: Tensor, attributes: Attributes) -> float:
    """Return what always saying the more frequent value reaches, over the same attributes."""
    test, shares = held.numpy(), []
    for column in attributes.values.T:
        y, truth = column[~test], column[test]
        y, truth = y[y >= 0], truth[truth >= 0]
        if len(set(y.tolist())) < 2 or not len(truth):
            continue
        shares.append(float((truth == np.bincount(y).argmax()).mean()))
    return float(np.mean(shares)) if shares else float("nan")


def principal_scores(Z: Tensor, held: Tensor, rank: int) -> Tensor:
    """Return the first ``rank`` principal components of activations Z (images, channels, positions), fitted unheld."""
    columns = Z[~held].permute(1, 0, 2).flatten(1).double()
    mean = columns.mean(1, keepdim=True)
    centred = columns - mean
    _, vectors = torch.linalg.eigh(centred @ centred.T)
    return torch.einsum("ck,ncp->nkp", vectors[:, -rank:].to(Z), Z - mean.to(Z))
