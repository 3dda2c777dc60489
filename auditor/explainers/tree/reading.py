"""Reading: what lies below the tree, of every image of a fit, harvested wherever a runner reads; and the prototypes."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from auditor.data.source import Batch, Data
from auditor.errors import DataError, NumericsError
from auditor.explainers.fitted_images import FittedImages
from auditor.explainers.gallery import Gallery
from auditor.explainers.tree.intersection_training import TreeExamples
from auditor.explainers.tree.quantised_features import Backbone
from auditor.progress import Progress
from auditor.runners.image_runs import counted, over_batches
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class FeaturePass:
    """Runs the network on a batch and pools its layer; a backbone that is to learn needs the images themselves."""

    backbone: Backbone

    def __call__(self, subject: Subject, batch: Batch, positions: Tensor) -> tuple[Tensor, Batch, Tensor]:
        """Return features (or images), labels and names, and the model's predictions."""
        b = self.backbone
        with torch.no_grad():
            logits, outputs = subject.run(batch.images, [b.layer])
        x = b.pool(outputs[b.layer])
        bad = int((~torch.isfinite(x)).any(1).sum())
        if bad:
            raise NumericsError(
                f"layer {b.layer!r}: {bad} of {len(batch)} images give NaN or infinite features (batch that "
                f"starts with {batch.ids[0]}); correct the model or its preprocessing first."
            )
        features = x if b.module is None else batch.images
        return features, replace(batch, images=batch.images[:, :0]), logits.argmax(1).cpu()


@dataclass(frozen=True, eq=False)
class ReadExamples:
    """All examples of a fit, and what belongs to each."""

    examples: TreeExamples
    predicted: Tensor  # by the model
    is_labelled: bool
    parts: FittedImages
    ids: list[str]
    positions: Tensor  # of the images in the source


def read(
    subject: Subject, data: Data, backbone: Backbone, held_out_every: int, batch_size: int, progress: Progress
) -> ReadExamples:
    """Read a source; its labels are learned, or the model's predictions where some image has none."""
    xs, ys, predictions, positions = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
    ids = list[str]()
    report = counted(progress, "reading features", len(data))
    for part in over_batches(FeaturePass(backbone), subject, data, batch_size=batch_size, progress=report):
        x, batch, predicted_part = part.given
        xs.append(x)
        ys.append(batch.labels)
        ids += batch.ids
        predictions.append(predicted_part)
        positions.append(part.positions)
    x, y, predicted = (torch.cat(parts) for parts in (xs, ys, predictions))
    n = len(y)
    labelled = bool((y >= 0).all())
    if not labelled:
        log.warning("tree: %d of %d images have no label; the model's predictions are learned", int((y < 0).sum()), n)
        y = predicted
    if int(y.max()) >= subject.n_classes:
        raise DataError(
            f"tree: labels must be 0 to {subject.n_classes - 1} like the model's classes, got {int(y.max())}."
        )
    classes = torch.unique(y)
    if len(classes) < 2:
        raise DataError(
            f"tree: all {n} images are of one class ({subject.class_names[int(classes[0])]}); a tree needs at "
            "least two classes to separate: give data with more."
        )
    parts = FittedImages.each(n, held_out_every, choose=True)
    if not bool(parts.report.any()) or n < 4:
        raise DataError(f"tree: {n} images are too few to hold some out; give at least {max(held_out_every, 4)}.")
    return ReadExamples(TreeExamples(x, y), predicted, labelled, parts, ids, torch.cat(positions))


def prototypes(
    subject: Subject, data: Data, of: ReadExamples, leaf: NDArray[Any], sure: Tensor, n_leaves: int, n_top: int
) -> Gallery:
    """Return per leaf the images in it of which the network is surest; no others are read again.

    ``leaf`` is the leaf of every example by its number, ``sure`` the probability of the leaf's class.
    """
    chosen = torch.zeros(len(of.predicted), dtype=torch.bool)
    for k in range(n_leaves):
        rows = torch.from_numpy(np.flatnonzero(leaf == k))
        chosen[rows[sure[rows].argsort(descending=True, stable=True)[:n_top]]] = True
    scores = torch.zeros(len(chosen), n_leaves)
    scores[torch.arange(len(chosen)), torch.from_numpy(leaf)] = sure.float()
    mask = torch.zeros(len(data), dtype=torch.bool)
    mask[of.positions[chosen]] = True
    gallery, rest = Gallery(n_leaves, n_top, (1, 1)), scores[chosen]
    for batch in data.only(mask).batches(subject, 64):
        gallery.offer(batch, rest[: len(batch)].unsqueeze(-1))
        rest = rest[len(batch) :]
    return gallery
