"""Concept activation vectors (CAVs) and TCAV scores with their significance [TCAV].

A CAV is the normal of a linear classifier between a layer's activations of a concept's images and of random images. The
TCAV score of a concept for a class is the share of the class's images whose logit rises along the CAV. One CAV says
little: any direction has a score. So every concept gets a CAV against each of several random sets, random sets get CAVs
against each other, and a score counts only where the two groups of scores differ (Welch's t-test, two-sided, corrected
over all concepts and classes by Holm's rule).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from auditor.errors import DataError
from auditor.metrics.multiple_tests import holm
from auditor.progress import Progress, silent
from auditor.subject.subject import Subject

LEAST_IMAGES = 10  # of a concept, and of a class
MOST_IMAGES = 200  # of a concept in one CAV, as many as of each random set
FOLDS = 3
SIGNIFICANT = 0.05
# A classifier that is right as often as one between two random sets has found no concept in the layer.
SEPARATES_FROM = 0.05  # by how much the accuracy of a concept's CAVs must exceed that of random ones


@dataclass(frozen=True, slots=True)
class ConceptVectors:
    """CAVs of one concept: unit directions (runs, neurons) and the cross-validated accuracy of each classifier."""

    name: str
    directions: Tensor
    accuracies: tuple[float, ...]
    n_images: int

    @property
    def accuracy(self) -> float:
        """Return the mean accuracy over the runs."""
        return sum(self.accuracies) / len(self.accuracies)


@dataclass(frozen=True, slots=True)
class TcavScore:
    """One concept and one class: the score's mean and spread over runs, that of random concepts, and the test."""

    concept: str
    label: str
    score: float
    spread: float  # standard deviation over the runs
    random_score: float
    accuracy: float  # of the concept's classifiers, .5 is chance
    p: float  # of Welch's t-test against random concepts
    p_corrected: float  # by Holm's rule over all concepts and classes
    n_images: int  # of the class
    separates: bool  # whether the layer separates the concept from random images at all

    @property
    def is_significant(self) -> bool:
        """Whether the concept differs from random ones, by a direction that the layer really has."""
        return self.separates and self.p_corrected < SIGNIFICANT


def concept_vector(concept: Tensor, others: Tensor, seed: int = 0) -> tuple[Tensor, float]:
    """Return the unit normal (neurons,) towards the rows of ``concept`` and its cross-validated accuracy.

    The classifier is a logistic regression with a ridge. Its solution lies in the span of the images, so it is found
    there: (images x images) numbers, however many neurons the layer has.

    >>> direction, accuracy = concept_vector(torch.eye(20, 50) + 3, torch.eye(20, 50))
    >>> direction.shape, accuracy
    (torch.Size([50]), 1.0)
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_score

    rows = torch.cat([concept, others]).flatten(1).double()
    centred = rows - rows.mean(0)
    spread = float(centred.norm() / math.sqrt(len(rows)))
    if spread == 0:
        return torch.zeros(rows.shape[1], dtype=torch.float64), 0.5
    centred /= spread
    values, vectors = torch.linalg.eigh(centred @ centred.T)
    keep = values > values[-1] * 1e-10
    lengths = values[keep].sqrt()
    coordinates = (vectors[:, keep] * lengths).numpy()  # the images in an orthonormal basis of their span
    truth = np.repeat([1, 0], [len(concept), len(others)])
    model = LogisticRegression(C=1.0, max_iter=1000)
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    accuracy = float(cross_val_score(model, coordinates, truth, cv=folds).mean())
    weights = torch.from_numpy(model.fit(coordinates, truth).coef_[0])
    direction = centred.T @ (vectors[:, keep] @ (weights / lengths))
    return direction / direction.norm().clamp_min(1e-30), accuracy


def random_sets(n_pool: int, size: int, n_sets: int, seed: int) -> list[Tensor]:
    """Return the rows of ``n_sets`` random sets; they share images only where the pool is too small for all of them.

    >>> sets = random_sets(30, 10, 3, seed=0)
    >>> torch.cat(sets).unique().numel()
    30
    """
    if n_pool < 2 * size:
        raise DataError(
            f"tcav: random sets of {size} images need a pool of at least {2 * size} to differ, got {n_pool}; give more "
            "with --random."
        )
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(n_pool, generator=g)
    sets: list[Tensor] = []
    while len(sets) < n_sets:
        if len(order) < size:
            order = torch.randperm(n_pool, generator=g)
        sets.append(order[:size])
        order = order[size:]
    return sets


def vectors_of(
    name: str, activations: Tensor, pool: Tensor, sets: Sequence[Tensor], seed: int = 0, progress: Progress = silent
) -> ConceptVectors:
    """Return a CAV of a concept's activations against each of the random sets of ``pool``."""
    if len(activations) < LEAST_IMAGES:
        raise DataError(
            f"tcav: concept {name!r} has {len(activations)} images, a concept vector needs at least {LEAST_IMAGES}."
        )
    concept = activations[:MOST_IMAGES]
    fitted = []
    for i, rows in enumerate(sets):
        fitted.append(concept_vector(concept, pool[rows], seed + i))
        progress(f"vectors of {name}", i + 1, len(sets))
    return ConceptVectors(name, torch.stack([d for d, _ in fitted]).float(), tuple(a for _, a in fitted), len(concept))


def random_vectors(pool: Tensor, sets: Sequence[Tensor], seed: int = 0, progress: Progress = silent) -> ConceptVectors:
    """Return CAVs between random sets: each against the next of another draw, what a concept without content gives."""
    fitted = []
    for i, rows in enumerate(sets):
        other = sets[(i + 1) % len(sets)]
        other = other[~torch.isin(other, rows)]
        fitted.append(concept_vector(pool[rows], pool[other], seed + i))
        progress("vectors of random images", i + 1, len(sets))
    return ConceptVectors(
        "random", torch.stack([d for d, _ in fitted]).float(), tuple(a for _, a in fitted), len(sets[0])
    )


def class_slopes(subject: Subject, layer: str, z: Tensor, classes: Tensor) -> Tensor:
    """Return the gradient (images, neurons) of every image's own class logit by its activations ``z``."""
    with torch.enable_grad():
        point = z.detach().clone().requires_grad_(True)
        logits = subject.forward_from(layer, point)
        (g,) = torch.autograd.grad(logits.gather(1, classes.to(z.device)[:, None]).sum(), point)
    return g.flatten(1)


class RisingShare:
    """Counts, while batches stream by, for which share of a class's images the logit rises along each direction."""

    def __init__(self, directions: Tensor, n_classes: int) -> None:
        self.directions = directions.double()  # (directions, neurons)
        self.rising = torch.zeros(len(directions), n_classes, dtype=torch.float64)
        self.n = torch.zeros(n_classes, dtype=torch.float64)

    def add(self, subject: Subject, layer: str, z: Tensor, classes: Tensor) -> None:
        """Look at activations z of images of the given classes; -1 is left out."""
        labelled = classes >= 0
        z, classes = z[labelled], classes[labelled]
        if classes.numel() == 0:
            return
        slopes = class_slopes(subject, layer, z, classes).double().cpu() @ self.directions.T
        self.rising.index_add_(1, classes.cpu(), (slopes > 0).double().T)
        self.n += classes.cpu().bincount(minlength=self.n.numel())

    def scores(self) -> Tensor:
        """Return (directions, classes): shares in [0, 1], NaN for a class without images."""
        return self.rising / self.n


def judge_scores(
    concepts: Sequence[ConceptVectors],
    random: ConceptVectors,
    share: RisingShare,
    class_names: Sequence[str],
    classes: Iterable[int],
) -> list[TcavScore]:
    """Return one row per concept and class; ``share`` counted the directions in this order, random ones last."""
    scores = share.scores()
    runs = [len(c.directions) for c in (*concepts, random)]
    parts = torch.split(scores, runs)
    cases = [(c, k) for c in range(len(concepts)) for k in classes]
    p_values = [welch_p(parts[c][:, k], parts[-1][:, k]) for c, k in cases]
    corrected = holm(p_values)
    rows = []
    for (c, k), p, adjusted in zip(cases, p_values, corrected, strict=True):
        values, concept = parts[c][:, k], concepts[c]
        rows.append(
            TcavScore(
                concept.name,
                class_names[k],
                float(values.mean()),
                float(values.std()) if len(values) > 1 else 0.0,
                float(parts[-1][:, k].mean()),
                concept.accuracy,
                p,
                adjusted,
                int(share.n[k]),
                concept.accuracy - random.accuracy > SEPARATES_FROM,
            )
        )
    return rows


def welch_p(a: Tensor, b: Tensor) -> float:
    """Return the two-sided p value of Welch's t-test; where neither group varies, that of a permutation test.

    >>> welch_p(torch.tensor([1.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 1.0]))
    1.0
    """
    from scipy.stats import ttest_ind_from_stats

    x, y = a.double().numpy(), b.double().numpy()
    if np.ptp(x) == 0 and np.ptp(y) == 0:
        return 1.0 if x[0] == y[0] else min(1.0, 2 / math.comb(len(x) + len(y), len(x)))
    groups = [v for g in (x, y) for v in (g.mean(), g.std(ddof=1), len(g))]
    return float(ttest_ind_from_stats(*groups, equal_var=False).pvalue)
