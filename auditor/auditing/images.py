"""Which images an audit looks at: one pass over the data, with the model's own logits, and a fixed choice among them.

The choice depends on the data and on what the explainers were fitted on, never on the seed: the same model and data are
always judged on the same images. Where an explainer was fitted on this very data, only images that it neither learned
from nor chose on count; its artifact says which these are (`FittedImages`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from auditor.data.near_duplicates import fingerprint, is_plain, nearest
from auditor.data.sampling import Sample, shares
from auditor.data.source import Batch, Data
from auditor.errors import DataError, NumericsError
from auditor.explainers.base import Explainer
from auditor.progress import Progress, silent
from auditor.runners.image_runs import counted, over_batches
from auditor.subject.subject import Subject

MIN_IMAGES = 20  # fewer give no interval worth the name


@dataclass(frozen=True, eq=False)
class Answers:
    """What the model says of every image of the data: logits (n, classes), labels (n,; -1 unknown) and names.

    ``label_sets`` (n, classes) says which labels are true of each image, where several may be.
    """

    logits: Tensor
    labels: Tensor
    ids: list[str]
    fingerprints: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.bool))  # (n, 256) of the images
    label_sets: Tensor | None = None

    @property
    def labelled(self) -> Tensor:
        """Return which images have a label."""
        return self.labels >= 0


@dataclass(frozen=True, eq=False)
class AuditImages:
    """The chosen images: pixels, logits, labels (-1 unknown), names, and which of the chosen they are."""

    images: Tensor
    logits: Tensor
    labels: Tensor
    ids: list[str]
    index: tuple[int, ...] = ()  # of a part: its rows of the whole

    def __post_init__(self) -> None:
        if not self.index:
            object.__setattr__(self, "index", tuple(range(len(self.ids))))

    def __len__(self) -> int:
        return len(self.ids)

    def first(self, n: int) -> AuditImages:
        """Return at most ``n`` of them, spread over all."""
        return self if n >= len(self) else self.rows(spread(len(self), n))

    def words(self, total: int) -> str:
        """Return how many of ``total`` these are, and of each class (the predicted one where there is no label)."""
        classes = torch.where(self.labels >= 0, self.labels, self.logits.argmax(1))
        counts = torch.unique(classes, return_counts=True)[1]
        return Sample(np.arange(len(self)), total, tuple(counts.tolist()), None).words

    def rows(self, rows: list[int]) -> AuditImages:
        """Return the images of the given rows."""
        ids, index = [self.ids[i] for i in rows], tuple(self.index[i] for i in rows)
        return AuditImages(self.images[rows], self.logits[rows], self.labels[rows], ids, index)


def spread(n: int, k: int) -> list[int]:
    """Return ``k`` of ``n`` rows at even distances, all of them where there are no more.

    >>> spread(10, 4), spread(3, 100)
    ([1, 3, 6, 8], [0, 1, 2])
    """
    k = min(n, k)
    return [int((i + 0.5) * n / k) for i in range(k)]


def answers(subject: Subject, data: Data, *, batch_size: int = 64, progress: Progress = silent) -> Answers:
    """Run the model once over all of the data; labels and logits are checked."""
    data.check_labels(subject)
    report = counted(progress, "running the model", len(data))
    parts: list[Answers] = []
    for part in over_batches(answers_of, subject, data, batch_size=batch_size, progress=report):
        if part.given.label_sets is not None:
            _check_label_sets(subject, data, part.given.label_sets)
        parts.append(part.given)
    sets = [part.label_sets for part in parts if part.label_sets is not None]
    ids = [name for part in parts for name in part.ids]
    model_answers = Answers(
        torch.cat([part.logits for part in parts]),
        torch.cat([part.labels for part in parts]),
        ids,
        torch.cat([part.fingerprints for part in parts]),
        torch.cat(sets) if sets else None,
    )
    if len(ids) < MIN_IMAGES:
        raise DataError(
            f"data {data.spec}: {len(ids)} images are too few for an interval; give at least {MIN_IMAGES} images."
        )
    return model_answers


def answers_of(subject: Subject, batch: Batch, positions: Tensor) -> Answers:
    """Return what the model says of a batch; logits that are not finite are an error."""
    with torch.no_grad():
        y = subject.logits(batch.images).float().cpu()
    bad = int((~torch.isfinite(y)).any(1).sum())
    if bad:
        raise NumericsError(
            f"audit: the model gives NaN or infinite logits for {bad} of {len(batch)} images (batch that "
            f"starts with {batch.ids[0]}); repair the model or its preprocessing first."
        )
    return Answers(y, batch.labels, batch.ids, fingerprint(batch.images), batch.label_sets)


def _check_label_sets(subject: Subject, data: Data, sets: Tensor) -> None:
    if not subject.output.is_per_class:
        raise DataError(
            f"data {data.spec}: it has several labels per image, and the model's probabilities sum to one; give one "
            "label per image, or record that several may be true: auditor describe MODEL --output multilabel."
        )
    if sets.shape[1] != subject.n_classes:
        raise DataError(
            f"data {data.spec}: labels have {sets.shape[1]} columns, the model {subject.n_classes} classes; give one "
            "column per class."
        )


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Which images of the data one explainer does not depend on (n,), and how that is known.

    ``record``: the fit stored it. ``other data``: it was fitted on other data, so all but those that look like one of
    its images. ``guess``: it was fitted on this data by a release that did not store it; its options say what it is
    likely to have held out. ``nothing``: it was fitted on this data and says nothing of it, so none counts as held out.
    """

    rows: Tensor
    known_from: Literal["record", "other data", "guess", "nothing"]

    def to_json(self) -> dict[str, Any]:
        """Return the counts for the audit's JSON."""
        return {"images": int(self.rows.sum()), "of": len(self.rows), "known_from": self.known_from}


def held_out(explainer: Explainer, data: Data, model_answers: Answers) -> HeldOut:
    """Return which of the data's images an explainer neither learned from nor chose on."""
    n, record = len(model_answers.ids), explainer.fitted_images
    if explainer.content_digest_ is not None and data.holds(explainer.content_digest_):
        if record is None:
            return HeldOut(torch.zeros(n, dtype=torch.bool), "nothing")
        return HeldOut(record.held_out(data.rows_of(model_answers.ids)), "record")
    if explainer.content_digest_ is not None or explainer.data_digest_ != data.digest:
        return HeldOut(~_of_the_fit(explainer, model_answers.fingerprints, n), "other data")
    if record is not None:
        return HeldOut(record.held_out_in_order(n), "record")
    guess = explainer.config.guessed_held_out(n)
    return HeldOut(torch.zeros(n, dtype=torch.bool), "nothing") if guess is None else HeldOut(guess, "guess")


def _of_the_fit(explainer: Explainer, hashes: Tensor, n: int) -> Tensor:
    """Return which of ``n`` images have the fingerprint of an image of the fit; blank ones have none of their own."""
    if explainer.fingerprints_ is None or not len(hashes):
        return torch.zeros(n, dtype=torch.bool)
    return (nearest(hashes, explainer.fingerprints_)[0] == 0) & ~is_plain(hashes)


def held_out_words(about: Mapping[str, Any]) -> str:
    """Return what an audit's JSON says of held-out images as a sentence.

    >>> held_out_words({"images": 60, "of": 300, "known_from": "record"})
    'the fit neither learned from nor chose on 60 of the 300 images'
    """
    n, total = about["images"], about["of"]
    if about["known_from"] == "other data" and n == total:
        return f"fitted on other data, so all {total} images are new to it"
    if about["known_from"] == "other data":
        return f"fitted on other data; {n} of the {total} images are new to it, the others look like images of its fit"
    if about["known_from"] == "nothing":
        return f"fitted on this data without a record of which images it used: all {total} may be known to it"
    if about["known_from"] == "record":
        return f"the fit neither learned from nor chose on {n} of the {total} images"
    return (
        f"the fit did not record its images; that it held out {n} of the {total} is a guess from its options, and some "
        "of these may be images it knows: fit it again"
    )


def choose(
    subject: Subject, data: Data, model_answers: Answers, held: Mapping[str, HeldOut], n: int, batch_size: int = 64
) -> AuditImages:
    """Return at most ``n`` images that all explainers held out, as many of every class as there are, in data order."""
    candidates = shared(held, len(model_answers.ids)).nonzero()[:, 0].tolist()
    unknown = [name for name, one in held.items() if one.known_from == "nothing"]
    if unknown:
        raise DataError(
            f"data {data.spec}: {', '.join(unknown)} was fitted on it and does not say which images the fit used, so "
            "none is known to be new to it; audit on other data, leave it out (--explainers), or have its kind record "
            "them (record_fit with FittedImages)."
        )
    if len(candidates) < MIN_IMAGES:
        raise DataError(
            f"data {data.spec}: only {len(candidates)} of {len(model_answers.ids)} images were held out of the "
            f"explainers' fits, too few for an interval; audit on more data, or on data that nothing was fitted on."
        )
    by_class: dict[int, list[int]] = {}
    for i in candidates:
        label = (
            int(model_answers.labels[i]) if int(model_answers.labels[i]) >= 0 else int(model_answers.logits[i].argmax())
        )
        by_class.setdefault(label, []).append(i)
    take = shares([len(rows) for rows in by_class.values()], n)
    picked = sorted(rows[j] for rows, k in zip(by_class.values(), take, strict=True) for j in spread(len(rows), k))
    rows_to_read = set(picked)
    images: list[Tensor] = []
    start = 0
    for batch in data.batches(subject, batch_size):
        images += [batch.images[j] for j in range(len(batch)) if start + j in rows_to_read]
        start += len(batch)
        if len(images) == len(picked):
            break
    rows = torch.tensor(picked)
    return AuditImages(
        torch.stack(images),
        model_answers.logits[rows],
        model_answers.labels[rows],
        [model_answers.ids[i] for i in picked],
    )


def shared(held: Mapping[str, HeldOut], n: int) -> Tensor:
    """Return which of ``n`` images every explainer held out."""
    rows = torch.ones(n, dtype=torch.bool)
    for one in held.values():
        rows &= one.rows
    return rows


def class_counts(model_answers: Answers, subject: Subject) -> dict[str, Any]:
    """Return how many images of every class there are, and how many have no label."""
    n = model_answers.labels[model_answers.labelled].bincount(minlength=subject.n_classes).tolist()
    return {
        "classes": dict(zip(subject.class_names, n, strict=False)),
        "unlabelled": int((~model_answers.labelled).sum()),
    }
