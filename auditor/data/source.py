"""Data: image sources that stream batches, know a sha256 over all their content, and never hold the set in memory.

``open_data`` opens what a program holds images in (`auditor.data.python_objects`), or what one string names
(`auditor.data.locations`): files on disk or in a store, ``sklearn:digits``, ``torchvision:MNIST?root=…&split=test``.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from auditor.data.image_items import Normalisation
from auditor.data.label_matching import NO_CLASS, LabelMatching, match_labels, mismatch, read_label_table
from auditor.data.sampling import Sample, one_of_each_run, stratified
from auditor.errors import DataError
from auditor.subject.preprocessing import Preprocessing, from_array
from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

ROWS_OF_SHARD = 256
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """Images as pixels in [0, 1] (batch, channels, height, width), labels (-1 where unknown) and their names.

    ``labels`` are classes of the model. ``source_labels`` are the data's own numbers, which may be of other classes.

    Where the data says of every label whether it is true, ``label_sets`` (batch, labels) has it, and ``labels`` the
    label of images with exactly one.
    """

    images: Tensor
    labels: Tensor
    ids: list[str]
    source_labels: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    label_sets: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.source_labels) != len(self.labels):
            object.__setattr__(self, "source_labels", self.labels)

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, keep: Tensor) -> Batch:
        """Return the images where ``keep`` is true."""
        ids = [name for name, k in zip(self.ids, keep.tolist(), strict=True) if k]
        sets = None if self.label_sets is None else self.label_sets[keep]
        return Batch(self.images[keep], self.labels[keep], ids, self.source_labels[keep], sets)


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a source that any process can read by itself: rows ``start`` to ``stop`` of the whole source."""

    index: int
    key: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class Data(ABC):
    """A source of images. ``batches`` gives the same images in the same order each time.

    ``reads_runs`` says that a run of its images can be read without those before it, from its name alone: by another
    process, or on another machine that has the files.
    """

    reads_runs: bool = False
    _is_run = False  # a run may hold no readable image; its whole warns of the broken ones

    def __init__(
        self,
        spec: str,
        *,
        strict: bool = False,
        limit: int | None = None,
        seed: int = 0,
        label_table: Mapping[str, str] | None = None,
    ) -> None:
        self.spec, self.strict, self.limit, self.seed, self.label_table = spec, strict, limit, seed, label_table
        self.class_names: tuple[str, ...] | None = None
        self.skipped: dict[str, str] = {}
        self.read_bytes = 0  # of the content of images, by this process
        self._warned = False
        self._is_matching_shown = True
        self._matched: tuple[tuple[str, ...], LabelMatching] | None = None
        self._digest: str | None = None
        self._content_digest: str | None = None

    @abstractmethod
    def _items(self, pre: Preprocessing, batch_size: int) -> Iterator[tuple[Array, Array, list[str]]]:
        """Yield images (float32 in [0, 1]), labels and ids of the rows of ``sample``, ``batch_size`` at a time."""

    def _labels(self) -> Array:
        """Return the class number of every image as far as it is known without reading images, else -1."""
        return np.full(self._count(), -1, dtype=np.int64)

    @abstractmethod
    def _content(self) -> Iterator[bytes]:
        """Yield every byte that matters, for the digest."""

    def __len__(self) -> int:
        """Return how many images are used, broken ones included."""
        return len(self.sample)

    @abstractmethod
    def _count(self) -> int: ...

    @cached_property
    def sample(self) -> Sample:
        """Return which rows are used: all of them, or ``limit`` spread over the classes and drawn by the seed."""
        return stratified(self._labels(), self._count() if self.limit is None else self.limit, self.seed)

    def draw(self, n: int, seed: int = 0, among: Tensor | None = None) -> Tensor:
        """Return a mask (images,) of at most ``n`` images spread over the classes, of those ``among`` where given."""
        allowed = np.arange(len(self)) if among is None else among.nonzero()[:, 0].numpy()
        mask = torch.zeros(len(self), dtype=torch.bool)
        mask[allowed[stratified(self._labels()[self.sample.rows][allowed], n, seed).rows]] = True
        return mask

    def spaced(self, n: int, seed: int = 0, among: Tensor | None = None) -> Tensor:
        """Return a mask (images,) of at most ``n`` images, one drawn from each of ``n`` runs of neighbours.

        A source in class order gives every class its share this way, and no label has a say: what a fit holds out
        must not decide what it learns from.
        """
        allowed = torch.arange(len(self)) if among is None else among.nonzero()[:, 0]
        mask = torch.zeros(len(self), dtype=torch.bool)
        mask[allowed[torch.from_numpy(one_of_each_run(len(allowed), n, seed))]] = True
        return mask

    def only(self, drawn: Tensor) -> Data:
        """Return a source of the images that a mask of `draw` selects; nothing else is read for it."""
        other = copy.copy(self)
        labels, rows = self._labels(), self.sample.rows[drawn.numpy()]
        sizes = np.unique(labels[rows][labels[rows] >= 0], return_counts=True)[1]
        other.sample = Sample(rows, self._count(), tuple(int(n) for n in sizes), self.sample.seed)
        other._digest = None if len(rows) < len(self) else self._digest
        return other

    # its parts, for several processes

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The parts of the source in their fixed order, the same whoever reads them."""
        n = self._count()
        edges = range(0, n, ROWS_OF_SHARD)
        return tuple(Shard(i, f"rows {k:,} …", k, min(n, k + ROWS_OF_SHARD)) for i, k in enumerate(edges))

    def part(self, shard: Shard) -> Data:
        """Return a source of the used rows of a shard, maybe none; nothing else is read for it."""
        low, high = np.searchsorted(self.sample.rows, [shard.start, shard.stop])
        inside = torch.zeros(len(self), dtype=torch.bool)
        inside[int(low) : int(high)] = True
        return self.only(inside)

    @property
    def leaves(self) -> Mapping[int, str]:
        """The digests of the shards that were read in full, where the source has such digests."""
        return {}

    def add_leaves(self, leaves: Mapping[int, str]) -> None:
        """Take the digests of shards that other processes have read, so that nothing is read again for ``digest``."""
        return

    def mark(self, start: int, stop: int) -> str:
        """Return a text that changes when the images at these positions do; "" where none is known."""
        return self.digest

    def add_skipped(self, skipped: Mapping[str, str]) -> None:
        """Take the images that other processes could not read, with the reasons."""
        self.skipped.update(skipped)

    # its digest

    def run(self, start: int, stop: int) -> Data:
        """Return a source of the images at positions ``start`` to ``stop`` of this one, which notes its broken ones.

        >>> digits = Preprocessing.of((1, 8, 8), mean=None, std=None, resize="stretch")
        >>> [batch.ids for batch in open_data("sklearn:digits").run(5, 8).batches(digits)]
        [['5', '6', '7']]
        """
        other = copy.copy(self)
        other.sample = Sample(self.sample.rows[start:stop], self._count(), (), self.sample.seed)
        other._is_run, other._digest, other.skipped = True, None, {}
        return other

    def positions(self, ids: Sequence[str], start: int = 0) -> Tensor:
        """Return where in the sample the images of these names are, given in its order; none is before ``start``."""
        rows, at = self.sample.rows, start
        places = []
        for name in ids:
            while self._id(int(rows[at])) != name:
                at += 1
            places.append(at)
            at += 1
        return torch.tensor(places, dtype=torch.int64)

    @property
    def digest(self) -> str:
        """Sha256 over all content: every pixel or file byte, every label, every name that matters; and which rows."""
        if self._digest is None:
            h = hashlib.sha256()
            for part in self._content():
                h.update(len(part).to_bytes(8, "little"))
                h.update(part)
            self._content_digest = h.hexdigest()
            if len(self) < self._count():
                h.update(b"only these rows:" + self.sample.rows.astype("<i8").tobytes())
            self._digest = h.hexdigest()
        return self._digest

    @property
    def content_digest(self) -> str:
        """Sha256 of the whole source, the same whichever of its rows are used (``limit``, `only`)."""
        if self._content_digest is None:
            _ = self.digest  # one reading gives both
        assert self._content_digest is not None
        return self._content_digest

    def holds(self, content_digest: str) -> bool:
        """Whether a digest is that of the whole source's content."""
        return content_digest == self.content_digest

    def _id(self, row: int) -> str:
        """Return the name that batches give to the image of a row of the whole source."""
        return str(row)

    def rows_of(self, ids: Sequence[str]) -> Array:
        """Return the row in the whole source of each image that batches name."""
        row_of = {self._id(row): row for row in range(self._count())} if ids else {}
        return np.array([row_of[name] for name in ids], dtype=np.int64)

    @property
    def readable_rows(self) -> Array:
        """Rows of the whole source whose images batches give, in their order; broken ones are known once read."""
        return np.setdiff1d(self.sample.rows, self.rows_of(list(self.skipped)))

    def batches(self, subject: Subject | Preprocessing, batch_size: int = 64) -> Iterator[Batch]:
        """Yield batches sized for the subject. A source without one readable image is an error."""
        pre = subject.preprocessing if isinstance(subject, Subject) else subject
        matching = self.announce(subject) if isinstance(subject, Subject) else None
        remap = None if matching is None else torch.tensor(matching.classes, dtype=torch.int64)
        n_read = 0
        for images, labels, ids in self._items(pre, batch_size):
            n_read += len(ids)
            y = torch.from_numpy(labels.astype(np.int64))
            sets = y.bool() if y.ndim == 2 else None
            if sets is not None:
                y = torch.where(sets.sum(1) == 1, sets.int().argmax(1), NO_CLASS)
            source_labels = y
            if self.labels_left_out:
                y, sets = torch.full_like(y, NO_CLASS), None
            elif remap is not None:
                y = torch.where(y >= 0, remap[y.clamp_min(0)], y)
            yield Batch(torch.from_numpy(images), y, ids, source_labels, sets)
        if self._is_run:
            return
        self.check_any_read(n_read)
        self.warn_skipped()

    def check_any_read(self, n_read: int) -> None:
        """Raise when not one image could be read."""
        if n_read == 0:
            broken = f" ({len(self.skipped)} could not be read)" if self.skipped else ""
            raise DataError(f"data {self.spec}: holds no readable image{broken}; give a source with at least one.")

    # its labels

    @property
    def labels_left_out(self) -> bool:
        """Whether the images are to be read as if they had no labels."""
        return self.label_table is not None and not self.label_table

    @property
    def labels_digest(self) -> str:
        """Sha256 over the table that says which label is which class; empty where the names decide."""
        if self.label_table is None:
            return ""
        return hashlib.sha256(repr(sorted(self.label_table.items())).encode()).hexdigest()

    def matching(self, subject: Subject) -> LabelMatching | None:
        """Return which class of the model each label is; None where the data has no names for its labels.

        Labels that are no class of the model are -1 in a batch's ``labels``; reading the batches warns of it, once.
        """
        if self.class_names is None or self.labels_left_out:
            return None
        if self._matched is None or self._matched[0] != subject.class_names:
            matching = match_labels(self.class_names, subject.class_names, self.label_table)
            self._matched = subject.class_names, matching
            self._is_matching_shown = False
        return self._matched[1]

    def announce(self, subject: Subject) -> LabelMatching | None:
        """Return the same, and say once what was made of the labels."""
        matching = self.matching(subject)
        if matching is not None and not self._is_matching_shown:
            self._is_matching_shown = True
            self._say(matching)
        return matching

    def foreign_labels(self, subject: Subject) -> tuple[str, ...] | None:
        """Return the names of the data's labels where some are no class of the model; None where all are."""
        matching = self.matching(subject)
        return self.class_names if matching is not None and matching.unmatched else None

    def check_labels(self, subject: Subject) -> None:
        """Raise, with the names side by side, when a label of the data is no class of the model."""
        if self.label_table and self.class_names is None:
            raise DataError(
                f"data {self.spec}: its labels are numbers without names, so --labels has nothing to match; leave it "
                "out, or give a folder with one sub-folder per class."
            )
        matching = self.matching(subject)
        if matching is not None and matching.unmatched and self.class_names is not None:
            names = mismatch(self.class_names, subject.class_names, matching.unmatched)
            raise DataError(f"data {self.spec}: {names}")
        is_numbered = self.class_names is None and not self.labels_left_out
        top = int(self._labels()[self.sample.rows].max()) if is_numbered and len(self) else NO_CLASS
        if top >= max(subject.n_classes, 2):
            raise DataError(
                f"data {self.spec}: labels must be 0 to {subject.n_classes - 1} like the model's classes, got {top}; "
                'give data of the model\'s task, or labels="none" (--labels none) to read it without.'
            )

    def _say(self, matching: LabelMatching) -> None:
        assert self.class_names is not None
        if matching.by == "order":
            pairs = ", ".join(f"{name} = {i}" for i, name in enumerate(self.class_names[:3]))
            more = ", …" if len(self.class_names) > 3 else ""
            log.warning(
                "data %s: the model's classes have no names, so labels are taken in alphabetical order: %s%s",
                self.spec, pairs, more,
            )  # fmt: skip
        elif matching.unmatched:
            log.warning(
                "data %s: %d of %d labels are no class of the model and stay apart from its classes: %s",
                self.spec, len(matching.unmatched), len(self.class_names), ", ".join(matching.unmatched[:5]),
            )  # fmt: skip

    def image_size(self, name: str) -> tuple[int, int] | None:
        """Return width and height of an image before it is resized for a model; None where that is not known."""
        return None

    @property
    def has_files(self) -> bool:
        """Whether its images are files, and not arrays."""
        return False

    def image_file(self, name: str) -> bytes | None:
        """Return the image file of a name as the source holds it; None where it holds no files."""
        return None

    def _skip(self, name: str, why: str) -> None:
        if self.strict:
            raise DataError(f"data {self.spec}: {name} is broken ({why}); repair or remove it, or do without strict.")
        self.skipped[name] = why

    def warn_skipped(self) -> None:
        """Name the broken images, once."""
        if self.skipped and not self._warned:
            self._warned = True
            shown = ", ".join(list(self.skipped)[:5]) + (", …" if len(self.skipped) > 5 else "")
            log.warning(
                "%d of %d images could not be read and were skipped: %s", len(self.skipped), self._count(), shown
            )


class ArrayData(Data):
    """Arrays that a reader streams: ``.npz`` members, idx files, scikit-learn's digits."""

    def __init__(
        self,
        spec: str,
        labels: Array,
        read: Callable[[int], Iterator[tuple[Array, Array]]],
        *,
        applied: Normalisation | None = None,
        **options: Any,
    ) -> None:
        super().__init__(spec, **options)
        self._all_labels, self._read, self._applied = labels, read, applied

    def _count(self) -> int:
        return len(self._all_labels)

    def _labels(self) -> Array:
        return self._all_labels

    def _items(self, pre: Preprocessing, batch_size: int) -> Iterator[tuple[Array, Array, list[str]]]:
        for raw, labels, rows in self._chosen(batch_size):
            if self._applied is not None and raw.dtype.kind == "f":
                raw = self._applied.undone(raw)
            yield from_array(raw, pre, f"data {self.spec}"), labels, [str(i) for i in rows]

    def _chosen(self, batch_size: int) -> Iterator[tuple[Array, Array, Array]]:
        """Stream the rows of the sample in full batches; nothing is read beyond the last of them."""
        sampled = self.sample.rows
        waiting: list[tuple[Array, Array, Array]] = []
        start = 0
        for raw, labels in self._read(batch_size):
            low, high = np.searchsorted(sampled, [start, start + len(raw)])
            rows = sampled[low:high]
            if len(rows):
                waiting.append((raw[rows - start], labels[rows - start], rows))
            start += len(raw)
            if sum(len(part[2]) for part in waiting) < batch_size and high < len(sampled):
                continue
            raws, numbers, numbers_read = (np.concatenate(parts) for parts in zip(*waiting, strict=True))
            last = high >= len(sampled)
            full = len(numbers_read) if last else len(numbers_read) // batch_size * batch_size
            for first in range(0, full, batch_size):
                window = slice(first, min(first + batch_size, full))
                yield raws[window], numbers[window], numbers_read[window]
            waiting = [(raws[full:], numbers[full:], numbers_read[full:])]
            if last:
                break

    def _content(self) -> Iterator[bytes]:
        if self._applied is not None:
            yield f"mean {self._applied.mean} std {self._applied.std}".encode()
        for raw, labels in self._read(256):
            yield f"{raw.dtype}|{raw.shape[1:]}".encode()
            yield np.ascontiguousarray(raw).tobytes()
            yield labels.astype("<i8").tobytes()


def open_data(
    spec: Any,
    *,
    strict: bool = False,
    limit: int | None = None,
    seed: int = 0,
    labels: Mapping[str, str] | str | Path | None = None,
    image: str | None = None,
    label: str | None = None,
    mean: Any = None,
    std: Any = None,
    keep: bool = False,
) -> Data:
    """Open images: what a program holds them in, or a source named by one string.

    A ``DataLoader``, a data set of torch, torchvision or Hugging Face, arrays or tensors, ``(images, labels)``, a list
    of images or paths, a pandas frame with an image column. ``image`` and ``label`` name the entries or columns of
    both; ``mean`` and ``std`` are what was applied to the images already and is undone (a ``Normalize`` among their
    transforms is found); ``keep`` reads once and keeps what is not the same each time.

    Or a string: a path or an address (``s3://``, ``gs://``, ``az://``, ``https://``) of a folder of images, of Parquet
    or Arrow files with an image column (``?image=…&label=…`` names columns), of WebDataset tar files, of a data set
    that Hugging Face's ``save_to_disk`` wrote, or of an ``.npz`` with ``images`` and ``labels``; ``sklearn:digits``
    (add ``?split=train`` or ``?split=test``), or ``torchvision:NAME?root=PATH&split=train|test``.
    ``limit`` images are spread over the classes and drawn by ``seed``; ``data.sample.words`` says what was taken.
    ``labels`` says which label is which class of the model where the names do not: a mapping, or a CSV with lines
    ``folder,class``; "none" leaves all labels out.

    >>> data = open_data("sklearn:digits")
    >>> len(data), data.digest[:8]
    (1797, 'f6fee29f')
    >>> pair = open_data((np.zeros((3, 8, 8), np.uint8), ["seven", "one", "one"]))
    >>> pair.class_names, len(pair)
    (('one', 'seven'), 3)
    """
    if isinstance(spec, Data):
        return spec
    is_object = not isinstance(spec, (str, Path))
    text = type(spec).__name__ if is_object else str(spec)
    if limit is not None and limit < 1:
        raise DataError(f"data {text}: limit must be at least 1, got {limit}.")
    options: dict[str, Any] = {"strict": strict, "limit": limit, "seed": seed, "label_table": _label_table(labels)}
    if is_object:
        from auditor.data.python_objects import Reading, open_object

        return open_object(spec, Reading(image, label, Normalisation.of(mean, std), keep), options)
    if keep or mean is not None or std is not None:
        raise DataError(f"data {text}: mean, std and keep are for objects of Python, not for a name.")
    from auditor.data.locations import open_location

    return open_location(text, image, label, options)


def _label_table(labels: Mapping[str, str] | str | Path | None) -> Mapping[str, str] | None:
    """Return the table of labels; an empty one leaves all labels out."""
    if labels is None or isinstance(labels, Mapping):
        return labels
    return {} if str(labels) == "none" else read_label_table(labels)
