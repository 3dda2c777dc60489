"""Item data: images that a program hands out one by one, in any order, each time the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from auditor.data.image_items import Array, Normalisation, content_of, is_image, pixels_of, size_of
from auditor.data.item_labels import ItemLabels, label_text, read_labels
from auditor.data.source import Data
from auditor.errors import DataError
from auditor.subject.preprocessing import Preprocessing

Item = tuple[Any, Any]  # image and label
Read = Callable[[Sequence[int]], Iterator[Item]]


class ItemData(Data):
    """Images read by their number: ``read(rows)`` yields (image, label) of each row, in order.

    ``labels`` are those that stand beside the images; without them all items are read once, for the digest and for
    their labels together. ``applied`` is the mean and std that arrays among the items have had applied already.
    """

    def __init__(
        self,
        spec: str,
        n: int,
        read: Read,
        *,
        labels: ItemLabels | None = None,
        names: Sequence[str] | None = None,
        ids: Sequence[str] | None = None,
        applied: Normalisation | None = None,
        source: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(spec, **options)
        self.source = source
        self._n, self._read_items, self._names, self._ids, self._applied = n, read, names, ids, applied
        self._listed = self._beside = labels  # beside the images: items may come without them
        if labels is not None:
            self.class_names = labels.names
        elif names is not None:
            self.class_names = read_labels([], names, f"data {spec}").names

    def _count(self) -> int:
        return self._n

    def items(self, rows: Sequence[int]) -> Iterator[tuple[int, Item]]:
        """Yield the row and the item of each row; an item without an image is an error."""
        for row, item in zip(rows, self._read_items(rows), strict=True):
            if not (is_image(item[0]) or isinstance(item[0], (list, tuple))):
                raise DataError(f"data {self.spec}: item {row} has no image but {type(item[0]).__name__}.")
            yield row, item

    @property
    def labels(self) -> ItemLabels:
        """The labels of all images."""
        if self._listed is None:
            self._read_all()
        assert self._listed is not None
        return self._listed

    def _labels(self) -> Array:
        return self.labels.single

    def image_size(self, name: str) -> tuple[int, int] | None:
        """Return width and height of an image as it is before it is resized for a model."""
        row = self._ids.index(name) if self._ids is not None else int(name)
        return size_of(next(self.items([row]))[1][0])

    def _items(self, pre: Preprocessing, batch_size: int) -> Iterator[tuple[Array, Array, list[str]]]:
        labels = self.labels.numbers
        rows = self.sample.rows.tolist()
        images: list[Array] = []
        taken: list[int] = []
        for row, (image, _) in self.items(rows):
            try:
                images.append(pixels_of(image, pre, self._applied, f"data {self.spec}"))
            except DataError as error:
                if not isinstance(error.__cause__, Exception):  # its numbers are wrong, not one file
                    raise
                self._skip(self._id(row), str(error.__cause__)[:80])
                continue
            taken.append(row)
            if len(taken) == batch_size:
                yield np.stack(images), labels[taken], [self._id(i) for i in taken]
                images, taken = [], []
        if taken:
            yield np.stack(images), labels[taken], [self._id(i) for i in taken]

    def _id(self, row: int) -> str:
        return self._ids[row] if self._ids is not None else str(row)

    def _content(self) -> Iterator[bytes]:
        if self._applied is not None:
            yield f"mean {self._applied.mean} std {self._applied.std}".encode()
        listed = self._listed
        labels_read: list[Any] = []
        for row, (image, label) in self.items(range(self._n)):
            labels_read.append(label)
            if label is None and self._beside is not None:
                label = self._beside.text(row)
            yield from content_of(image, label_text(label))
        if listed is None:
            self._listed = read_labels(labels_read, self._names, f"data {self.spec}")
            self.class_names = self._listed.names

    def _read_all(self) -> None:
        """Read every item once: what the digest is made of, and the labels."""
        h = hashlib.sha256()
        for part in self._content():
            h.update(len(part).to_bytes(8, "little"))
            h.update(part)
        self._content_digest = h.hexdigest()
        if self.limit is None or self.limit >= self._n:  # else the digest names the rows drawn by these very labels
            self._digest = self._content_digest
