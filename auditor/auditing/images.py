"""Which images an audit looks at: one pass over the data, with the model's own logits, and a fixed choice among them.

The choice depends on the data and on what the explainers were fitted on, never on the seed: the same model and data are
always judged on the same images. Where an explainer was fitted on this very data, only images that it held out count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auditor.data.source import Data
from auditor.errors import DataError, NumericsError
from auditor.explainers.base import Explainer, Progress, silent
from auditor.subject.subject import Subject

MIN_IMAGES = 20  # fewer give no interval worth the name


@dataclass(frozen=True, eq=False)
class Answers:
    """What the model says of every image of the data: logits (n, classes), labels (n,; -1 unknown) and names."""

    logits: Tensor
    labels: Tensor
    ids: list[str]

    @property
    def labelled(self) -> Tensor:
        """Return which images have a label."""
        return self.labels >= 0


@dataclass(frozen=True, eq=False)
class AuditImages:
    """The chosen images: pixels, logits, labels (-1 unknown) and names."""

    images: Tensor
    logits: Tensor
    labels: Tensor
    ids: list[str]

    def __len__(self) -> int:
        return len(self.ids)

    def first(self, n: int) -> AuditImages:
        """Return at most ``n`` of them, spread over all."""
        return self if n >= len(self) else self.rows(spread(len(self), n))

    def rows(self, rows: list[int]) -> AuditImages:
        """Return the images of the given rows."""
        return AuditImages(self.images[rows], self.logits[rows], self.labels[rows], [self.ids[i] for i in rows])


def spread(n: int, k: int) -> list[int]:
    """Return ``k`` of ``n`` rows at even distances, all of them where there are no more.

    >>> spread(10, 4), spread(3, 100)
    ([1, 3, 6, 8], [0, 1, 2])
    """
    k = min(n, k)
    return [int((i + 0.5) * n / k) for i in range(k)]


def check_classes(subject: Subject, data: Data) -> None:
    """Raise one sentence when the data speaks of classes the model does not know."""
    if data.class_names is None:
        return
    foreign = [name for name in data.class_names if name not in subject.class_names]
    if foreign:
        known = ", ".join(subject.class_names[:8]) + (", …" if subject.n_classes > 8 else "")
        raise DataError(
            f"data {data.spec}: it has classes the model does not know ({', '.join(foreign[:5])}); the model's are "
            f"{known}. Give data of the model's task, or name the classes alike (auditor describe --classes)."
        )


def answers(subject: Subject, data: Data, *, batch_size: int = 64, progress: Progress = silent) -> Answers:
    """Run the model once over all of the data; labels and logits are checked."""
    check_classes(subject, data)
    logits, labels, ids = [], [], []
    with torch.no_grad():
        for batch in data.batches(subject, batch_size):
            y = subject.logits(batch.images).float().cpu()
            bad = int((~torch.isfinite(y)).any(1).sum())
            if bad:
                raise NumericsError(
                    f"audit: the model gives NaN or infinite logits for {bad} of {len(batch)} images (batch that "
                    f"starts with {batch.ids[0]}); mend the model or its preprocessing first."
                )
            logits.append(y)
            labels.append(batch.labels)
            ids += batch.ids
            progress("running the model", len(ids), len(data))
    found = Answers(torch.cat(logits), torch.cat(labels), ids)
    top = int(found.labels.max())
    if top >= max(subject.n_classes, 2):
        raise DataError(
            f"data {data.spec}: labels must be 0 to {subject.n_classes - 1} like the model's classes, got {top}; give "
            "data of the model's task."
        )
    if len(ids) < MIN_IMAGES:
        raise DataError(
            f"data {data.spec}: {len(ids)} images are too few for an interval; give at least {MIN_IMAGES} images."
        )
    return found


def held_out(explainers: Iterable[Explainer], data: Data, n: int) -> Tensor:
    """Return which of ``n`` images no explainer has seen in its fit: all, unless one was fitted on this data."""
    keep = torch.ones(n, dtype=torch.bool)
    for explainer in explainers:
        every = getattr(explainer.config, "held_out_every", None)
        if every and explainer.data_digest_ == data.digest:
            keep &= torch.arange(n) % every == every - 1
    return keep


def choose(
    subject: Subject, data: Data, found: Answers, explainers: Mapping[str, Explainer], n: int, batch_size: int = 64
) -> AuditImages:
    """Return at most ``n`` held-out images, as many of every predicted class as there are, in the data's order."""
    keep = held_out(explainers.values(), data, len(found.ids))
    candidates = keep.nonzero()[:, 0].tolist()
    if len(candidates) < MIN_IMAGES:
        raise DataError(
            f"data {data.spec}: only {len(candidates)} of {len(found.ids)} images were held out of the explainers' "
            f"fits, too few for an interval; audit on more data, or on data that nothing was fitted on."
        )
    by_class: dict[int, list[int]] = {}
    for i in candidates:
        label = int(found.labels[i]) if int(found.labels[i]) >= 0 else int(found.logits[i].argmax())
        by_class.setdefault(label, []).append(i)
    share = -(-n // len(by_class))
    picked = sorted(i for rows in by_class.values() for i in (rows[j] for j in spread(len(rows), share)))
    picked = [picked[j] for j in spread(len(picked), n)]
    wanted = set(picked)
    images: list[Tensor] = []
    start = 0
    for batch in data.batches(subject, batch_size):
        images += [batch.images[j] for j in range(len(batch)) if start + j in wanted]
        start += len(batch)
        if len(images) == len(picked):
            break
    rows = torch.tensor(picked)
    return AuditImages(torch.stack(images), found.logits[rows], found.labels[rows], [found.ids[i] for i in picked])


def class_counts(found: Answers, subject: Subject) -> dict[str, Any]:
    """Return how many images of every class there are, and how many have no label."""
    n = found.labels[found.labelled].bincount(minlength=subject.n_classes).tolist()
    return {"classes": dict(zip(subject.class_names, n, strict=False)), "unlabelled": int((~found.labelled).sum())}
