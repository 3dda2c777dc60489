"""TCAV of any layer: concepts given as images, random sets, classes of the data, a verdict for each pair [TCAV].

The activations of the concept's images and of the random pool are read once; the class images stream by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from auditor.data.source import Data
from auditor.errors import DataError, OptionError
from auditor.metrics.concept_vectors import (
    LEAST_IMAGES,
    MOST_IMAGES,
    RisingShare,
    TcavScore,
    judge_scores,
    random_sets,
    random_vectors,
    vectors_of,
)
from auditor.progress import Progress, silent
from auditor.subject.subject import Subject

MOST_NUMBERS = 100_000_000  # activations of the random pool that are held, in all
LEAST_RUNS = 3


@dataclass(frozen=True, slots=True)
class Tcav:
    """TCAV scores of a layer; ``random_accuracy`` is that of classifiers between random sets."""

    layer: str
    runs: int
    set_size: int
    pool: int  # random images that were drawn from
    random_accuracy: float
    rows: tuple[TcavScore, ...]
    skipped: dict[str, str]  # class -> why it has no row

    def to_json(self) -> dict[str, Any]:
        """Return plain Python for JSON."""
        scores = [{**asdict(row), "significant": row.is_significant} for row in self.rows]
        return {**{k: getattr(self, k) for k in self.__slots__ if k != "rows"}, "scores": scores}

    @property
    def remarks(self) -> list[str]:
        """Return what a reader must know: concepts that the layer does not hold, sets that share images."""
        lost = {row.concept: row.accuracy for row in self.rows if not row.separates}
        words = [
            f"{name}: layer {self.layer} does not separate it from random images (right on {accuracy:.0%}, between "
            f"random sets {self.random_accuracy:.0%}), so its scores mean nothing; take another layer or more images."
            for name, accuracy in lost.items()
        ]
        if self.pool < self.runs * self.set_size:
            words.append(
                f"{self.runs} random sets of {self.set_size} share images, since the pool has {self.pool}; p values "
                "are smaller than with as many more images in --random."
            )
        return words


def tcav(
    subject: Subject,
    layer: str,
    concepts: Mapping[str, Data],
    random: Data,
    data: Data,
    *,
    targets: Sequence[int | str] | None = None,
    runs: int = 20,
    images: int = 100,
    seed: int = 0,
    progress: Progress = silent,
) -> Tcav:
    """Return the TCAV scores of concepts (name -> their images) for the classes of ``data``, at most ``images`` each.

    Classes are those of the labels, or of the predictions where the data has none. ``tcav(subject, "layer3",
    {"stripes": open_data("stripes/")}, open_data("random/"), open_data("photos/")).rows``
    """
    if not concepts:
        raise OptionError("tcav: give at least one concept.")
    if runs < LEAST_RUNS:
        raise OptionError(f"tcav: a t-test over runs needs at least {LEAST_RUNS} random sets, got {runs}.")
    layer = subject.layer(layer).name
    held = {
        name: _activations(subject, layer, source, MOST_IMAGES, seed, progress) for name, source in concepts.items()
    }
    size = min(len(z) for z in held.values())
    if size < LEAST_IMAGES:
        name = min(held, key=lambda k: len(held[k]))
        raise DataError(f"tcav: concept {name!r} has {size} images, a concept vector needs at least {LEAST_IMAGES}.")
    width = next(iter(held.values())).shape[1]
    pool = _activations(subject, layer, random, min(runs * size, max(2 * size, MOST_NUMBERS // width)), seed, progress)
    sets = random_sets(len(pool), size, runs, seed)
    vectors = [vectors_of(name, z, pool, sets, seed, progress) for name, z in held.items()]
    null = random_vectors(pool, sets, seed, progress)
    share = RisingShare(torch.cat([v.directions for v in (*vectors, null)]), subject.n_classes)
    wanted = None if targets is None else [subject.class_index(t) for t in targets]
    _count(subject, layer, data, share, wanted, images, seed, progress)
    skipped = {
        subject.class_names[k]: f"{int(share.n[k])} images, needs at least {LEAST_IMAGES}"
        for k in (range(subject.n_classes) if wanted is None else wanted)
        if share.n[k] < LEAST_IMAGES and (share.n[k] or wanted is not None)
    }
    classes = [k for k in range(subject.n_classes) if share.n[k] >= LEAST_IMAGES and (wanted is None or k in wanted)]
    if not classes:
        raise DataError(f"tcav: no class has {LEAST_IMAGES} images in {data.spec}; give more.")
    rows = judge_scores(vectors, null, share, subject.class_names, classes)
    return Tcav(layer, runs, size, len(pool), null.accuracy, tuple(rows), skipped)


def _activations(subject: Subject, layer: str, source: Data, most: int, seed: int, progress: Progress) -> Tensor:
    """Return the flattened activations of at most ``most`` images, spread over the labels."""
    drawn = source if len(source) <= most else source.only(source.draw(most, seed))
    at_once = max(1, min(32, 50_000_000 // math.prod(subject.input_shape)))
    parts: list[Tensor] = []
    with torch.no_grad():
        for batch in drawn.batches(subject.preprocessing, at_once):
            parts.append(subject.activations(batch.images, [layer])[layer].flatten(1).float().cpu())
            progress("reading activations", sum(map(len, parts)), len(drawn))
    return torch.cat(parts)


def _count(
    subject: Subject,
    layer: str,
    data: Data,
    share: RisingShare,
    wanted: Sequence[int] | None,
    images: int,
    seed: int,
    progress: Progress,
) -> None:
    """Count over at most ``images`` of each class; a class is the label, or the prediction where there is none."""
    order = data.draw(min(len(data), images * subject.n_classes), seed)
    drawn = data.only(order)
    for batch in drawn.batches(subject, 16):
        logits, activations = subject.run(batch.images, [layer])
        classes = torch.where(batch.labels >= 0, batch.labels, logits.argmax(1).cpu())
        counted = share.n.clone()
        for i, k in enumerate(classes.tolist()):
            if counted[k] >= images or (wanted is not None and k not in wanted):
                classes[i] = -1
            else:
                counted[k] += 1
        share.add(subject, layer, activations[layer].detach(), classes)
        progress("reading classes", int(share.n.sum()), len(drawn))
