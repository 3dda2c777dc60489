"""Drawing of a study: classes, sets of images, and every picture that a participant may see, from a registered model.

Images are drawn by what the model predicts, so that every image has an explanation of one of the chosen classes and a
perfect grouping has purity 1; labels are kept beside, where the data has them. (The study of [Khorram2020] drew by
label; then images that the model takes for a fifth class lower the ceiling.) Sets have no image in common and hold the
classes as evenly as can be, each class being one of those with an image more as often as the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np
import torch
from torch import Tensor

from auditor.attribution.excitation import ExcitationBackprop
from auditor.data.source import Data
from auditor.errors import AuditError, StudyError
from auditor.explainers.answer import explanations_of
from auditor.explainers.base import Explainer, _versions
from auditor.explainers.shown_concepts import ShownConcepts, shown_concepts
from auditor.metrics.grouping_purity import balanced_counts
from auditor.network.aten_graph import graph_of
from auditor.progress import Progress, silent
from auditor.study.design import ONE_HEATMAP, DrawnData, DrawnImage, Study, StudyConfig, shows
from auditor.study.pictures import heat_png, image_png, practice_pictures
from auditor.subject.subject import Subject

BATCH = 32
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Source:
    """A data set of a study: the model to ask, its images, its explainers by condition, and the classes if chosen."""

    name: str
    subject: Subject
    data: Data
    explainers: Mapping[str, Explainer]
    model: str = ""  # the version's label
    classes: tuple[str, ...] | str = "alike"  # names, or how they are chosen: alike, random


@dataclass(frozen=True)
class _Asked:
    """What the model says of every image of the data."""

    predicted: Array
    probabilities: Array
    labels: Array  # classes of the model, -1 where unknown
    ids: list[str]


def draw_study(
    sources: Sequence[Source], config: StudyConfig, progress: Progress = silent
) -> tuple[Study, dict[str, bytes]]:
    """Draw and render a study; return it with its pictures by name: ``image/ID``, ``heat/ID/CONDITION/SLOT``."""
    names = [source.name for source in sources]
    if not sources or len(set(names)) < len(names):
        raise StudyError(f"study: want data sets with different names, got {', '.join(names) or 'none'}; use --names.")
    data, images, pictures = [], {}, {}
    for number, source in enumerate(sources):
        drawn, of_it, painted = _draw_data(source, config, number, progress)
        data.append(drawn)
        images.update(of_it)
        pictures.update(painted)
    practice = practice_pictures(config.n_classes)
    pictures |= {f"image/{key}": png for key, png in practice.items()}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Study(config, tuple(data), images, tuple(practice), now, _versions()), pictures


def _draw_data(
    source: Source, config: StudyConfig, number: int, progress: Progress
) -> tuple[DrawnData, dict[str, DrawnImage], dict[str, bytes]]:
    subject = source.subject
    named = _named_classes(source, config)  # a wrong name is said before the model is asked
    asked = _ask(source, progress)
    rng = np.random.default_rng([config.seed, number])
    classes, how = _choose_classes(source, config, asked, rng, named)
    sets = _draw_sets(asked.predicted, classes, config, rng)
    rows = sorted(row for one in sets for row in one)
    keys = {row: _key(config.seed, number, asked.ids[row], row) for row in rows}
    pixels = _pixels(source, rows, progress)
    pictures = {f"image/{keys[row]}": image_png(x) for row, x in zip(rows, pixels, strict=True)}
    targets = [int(asked.predicted[row]) for row in rows]
    slots: dict[str, dict[str, Any]] = {}
    values: dict[str, list[list[float]]] = {}
    heats: dict[str, list[list[bool]]] = {}
    for condition in config.conditions:
        if shows(condition) == "nothing":
            continue
        progress(f"{source.name}: drawing {condition}", 0, None)
        if condition == ONE_HEATMAP:
            slots[condition], values[condition], layers = _one_heatmap(source, pixels, targets)
        else:
            slots[condition], values[condition], layers = _concepts(source, condition, pixels, targets)
        heats[condition] = [[layer is not None for layer in row] for row in layers]
        for row, painted in zip(rows, layers, strict=True):
            for slot, png in enumerate(painted):
                if png is not None:
                    pictures[f"heat/{keys[row]}/{condition}/{slot}"] = png
    names = subject.class_names
    images = {
        keys[row]: DrawnImage(
            names[asked.predicted[row]],
            names[asked.labels[row]] if asked.labels[row] >= 0 else None,
            asked.ids[row],
            {condition: v[i] for condition, v in values.items()},
            {condition: h[i] for condition, h in heats.items()},
        )
        for i, row in enumerate(rows)
    }
    drawn = DrawnData(
        name=source.name,
        spec=source.data.spec,
        digest=source.data.digest,
        model=source.model,
        model_digest=subject.digest,
        classes=tuple(names[k] for k in classes),
        chosen_by=how,
        sets=tuple(tuple(keys[row] for row in one) for one in sets),
        slots=slots,
        side=tuple(subject.input_shape[1:]),  # type: ignore[arg-type]
    )
    return drawn, images, pictures


def _ask(source: Source, progress: Progress) -> _Asked:
    """Let the model answer every image once; no pixels are kept."""
    subject = source.subject
    if subject.n_classes < 2:
        raise StudyError(
            f"study: {source.model or 'the model'} has a single class, and groups need at least two; name a model "
            "with classes."
        )
    predicted, probabilities, labels, ids = [], [], [], []
    for batch in source.data.batches(subject, BATCH):
        with torch.no_grad():
            logits = subject.logits(batch.images).float().cpu()
        predicted.append(logits.argmax(1))
        probabilities.append(subject.probabilities(logits))
        labels.append(batch.labels)
        ids += batch.ids
        progress(f"{source.name}: asking the model", len(ids), len(source.data))
    return _Asked(
        torch.cat(predicted).numpy(), torch.cat(probabilities).double().numpy(), torch.cat(labels).numpy(), ids
    )


def _named_classes(source: Source, config: StudyConfig) -> list[int]:
    """Return the classes that were chosen by name; none where they are chosen by the model's answers or the seed."""
    if isinstance(source.classes, str):
        if source.classes not in ("alike", "random"):
            raise StudyError(f"study: classes are chosen alike, random, or by their names, got {source.classes!r}.")
        return []
    classes = [source.subject.class_index(name) for name in source.classes]
    if len(set(classes)) != config.n_classes:
        raise StudyError(
            f"study: want {config.n_classes} different classes of {source.name}, got {len(set(classes))}; name as "
            "many, or change --n-classes."
        )
    for k in classes:
        _check_explained(source, k)
    return sorted(classes)


def _choose_classes(
    source: Source, config: StudyConfig, asked: _Asked, rng: np.random.Generator, named: Sequence[int]
) -> tuple[list[int], str]:
    """Return the classes of a data set, and how they were chosen."""
    names = source.subject.class_names
    n_of = np.bincount(asked.predicted, minlength=len(names))
    needed = -(-config.sets * config.per_batch // config.n_classes)
    if named:
        for k in named:
            if n_of[k] < needed:
                raise _too_few(source, config, needed, [(names[k], int(n_of[k]))])
        return list(named), "by name"
    unexplained = {k for k in range(len(names)) if _not_explaining(source, k)}
    usable = [k for k in range(len(names)) if n_of[k] >= needed and k not in unexplained]
    if len(usable) < config.n_classes:
        most = sorted(
            ((names[k], int(n_of[k])) for k in range(len(names)) if k not in unexplained), key=lambda p: -p[1]
        )
        note = f"; {len(unexplained)} classes have no explanation by {_who(source, unexplained)}" if unexplained else ""
        raise _too_few(source, config, needed, most[: config.n_classes + 2], note)
    if source.classes == "random":
        return sorted(rng.choice(usable, config.n_classes, replace=False).tolist()), "by the seed"
    return sorted(alike(asked.probabilities, asked.predicted, usable, config.n_classes)), "most alike to the model"


def alike(probabilities: Array, predicted: Array, usable: Sequence[int], n: int) -> list[int]:
    """Return the classes that the model gives each other most probability: the closest pair, then one by one.

    >>> p = np.array([[0.6, 0.4, 0.0], [0.45, 0.55, 0.0], [0.0, 0.1, 0.9]])
    >>> alike(p, p.argmax(1), [0, 1, 2], 2)
    [0, 1]
    """
    rows = np.stack([probabilities[predicted == k][:, usable].mean(0) for k in usable])
    affinity = rows + rows.T
    np.fill_diagonal(affinity, -np.inf)
    a, b = np.unravel_index(int(affinity.argmax()), affinity.shape)
    chosen = [int(a), int(b)]
    while len(chosen) < n:
        rest = [i for i in range(len(usable)) if i not in chosen]
        chosen.append(max(rest, key=lambda i: float(affinity[i, chosen].sum())))
    return [int(usable[i]) for i in chosen[:n]]


def _not_explaining(source: Source, k: int) -> list[str]:
    return [name for name, e in source.explainers.items() if e.config.target is None and not e.can_explain(k)]


def _who(source: Source, classes: set[int]) -> str:
    return ", ".join(sorted({name for k in classes for name in _not_explaining(source, k)}))


def _check_explained(source: Source, k: int) -> None:
    for name in _not_explaining(source, k):
        fitted = [source.subject.class_names[c] for c in source.explainers[name].explainable_classes() or []]
        more = ", …" if len(fitted) > 12 else ""
        raise StudyError(
            f"study: {name} does not explain class {source.subject.class_names[k]!r}; it was fitted for: "
            f"{', '.join(fitted[:12])}{more}. Choose among these, or leave {name} out."
        )


def _too_few(
    source: Source, config: StudyConfig, needed: int, counts: Sequence[tuple[str, int]], note: str = ""
) -> StudyError:
    listed = ", ".join(f"{name} {n}" for name, n in counts) or "none"
    return StudyError(
        f"study: {config.sets} sets of {config.per_batch} images of {config.n_classes} classes need {needed} images of "
        f"each class, by the model's predictions on {source.data.spec}; there are: {listed}{note}. Give more images, "
        "or draw less (--sets, --per-batch, --n-classes)."
    )


def _draw_sets(
    predicted: Array, classes: Sequence[int], config: StudyConfig, rng: np.random.Generator
) -> list[list[int]]:
    """Return the rows of every set, in a mixed order; no row is in two sets."""
    pools = {k: rng.permutation(np.flatnonzero(predicted == k)).tolist() for k in classes}
    counts = balanced_counts(config.per_batch, len(classes))
    n_more = config.per_batch % len(classes)
    sets, turn = [], rng.permutation(len(classes)).tolist()
    for s in range(config.sets):
        order = [classes[turn[(s * n_more + i) % len(classes)]] for i in range(len(classes))]
        rows = [pools[k].pop() for k, n in zip(order, counts, strict=True) for _ in range(n)]
        sets.append(rng.permutation(rows).tolist())
    return sets


def _key(seed: int, number: int, name: str, row: int) -> str:
    """Return an id of an image that says nothing about it."""
    return hashlib.sha256(repr((seed, number, name, row)).encode()).hexdigest()[:16]


def _pixels(source: Source, rows: Sequence[int], progress: Progress) -> Tensor:
    """Return the pixels of some rows, by reading the data again."""
    wanted, start, parts = set(rows), 0, []
    for batch in source.data.batches(source.subject, BATCH):
        keep = [i for i in range(len(batch)) if start + i in wanted]
        parts.append(batch.images[keep])
        start += len(batch)
        progress(f"{source.name}: reading images", start, len(source.data))
    return torch.cat(parts)


Layers = list[list[bytes | None]]


def _one_heatmap(
    source: Source, pixels: Tensor, targets: Sequence[int]
) -> tuple[dict[str, Any], list[list[float]], Layers]:
    """Return one heatmap per image, of its predicted class by contrastive excitation backprop [ExcitationBP]."""
    subject = source.subject
    floor = [-m / s for m, s in zip(subject.preprocessing.mean, subject.preprocessing.std, strict=True)]
    size = (pixels.shape[2], pixels.shape[3])
    layers: Layers = []
    try:
        engine = ExcitationBackprop(graph_of(subject), floor=floor)
        for x, k in zip(torch.split(pixels, BATCH), torch.split(torch.tensor(targets), BATCH), strict=True):
            maps = engine.maps(subject.normalise(x), k[:, None])
            for i in range(len(x)):
                heat = maps.heatmap(i, 0)
                layers.append([None if heat is None else heat_png(heat, size, False)])
    except AuditError as error:
        raise StudyError(
            f"study: one-heatmap cannot be drawn for {source.model or 'this model'}: {error} Leave one-heatmap out of "
            "--conditions."
        ) from error
    return {"n": 1, "by_rank": False, "contributions": False, "labels": []}, [[] for _ in targets], layers


def _concepts(
    source: Source, condition: str, pixels: Tensor, targets: Sequence[int]
) -> tuple[dict[str, Any], list[list[float]], Layers]:
    """Return slots, values and heatmaps of an attached explainer, each image explained for its predicted class."""
    explainer = source.explainers[condition]
    explanations = []
    for x, part in zip(torch.split(pixels, BATCH), torch.split(torch.tensor(targets), BATCH), strict=True):
        asked: list[int | None] = [None if explainer.config.target is not None else k for k in part.tolist()]
        explanations += explanations_of(explainer, source.subject, x, asked, heatmaps=True, **explainer.quick_options)
    shown = shown_concepts(explanations, is_of_class=explainer.concepts_are_of_class)
    size = (pixels.shape[2], pixels.shape[3])
    layers: Layers = [
        [
            None
            if c is None or c.heatmap is None or c.counts_for is None or float(c.heatmap.clamp_min(0).sum()) <= 0
            else heat_png(c.heatmap, size, c.counts_for is False)
            for c in row
        ]
        for row in shown.concepts
    ]
    about = {
        "n": shown.values.shape[1],
        "by_rank": shown.is_by_rank,
        "contributions": shown.has_contributions,
        "labels": _labels(explainer, shown, source.subject.class_names),
    }
    return about, np.round(shown.values, 4).tolist(), layers


def _labels(explainer: Explainer, shown: ShownConcepts, class_names: Sequence[str]) -> list[str]:
    """Return the names that people gave to the slots' concepts, but none that names a class."""
    given = set(explainer.labels.values())
    lower = [name.lower() for name in class_names if len(name) > 2]
    return [
        label if label in given and not any(name in label.lower() for name in lower) else "" for label in shown.labels
    ]
