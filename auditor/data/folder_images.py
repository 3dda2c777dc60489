"""Folders of images: one sub-folder per class, or images side by side without labels, on disk or in a store."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from auditor.data.item_labels import ItemLabels
from auditor.data.label_matching import NO_CLASS
from auditor.data.names import Names
from auditor.data.shards import Content, Layout
from auditor.data.source import Shard
from auditor.data.store import Store, Stored
from auditor.errors import DataError

FILES = 256  # of a shard


class FolderImages(Layout):
    """Image files below an address, in the order of their names, in shards of 256."""

    def __init__(self, store: Store, files: Iterable[Stored]) -> None:
        self.store = store
        self._names, self._sizes, marks = Names(), array("q"), array("q")
        for file in files:
            self._add(file, marks)
        if not self._names.is_sorted:
            self._sort(marks)
        self._marks = marks
        self._labels = self._read_labels()
        self._earlier: str | None = None
        n = len(self._names)
        self._shards = tuple(
            Shard(i, f"{self._names[start]} …", start, min(n, start + FILES))
            for i, start in enumerate(range(0, n, FILES))
        )

    def _add(self, file: Stored, marks: array[int]) -> None:
        self._names.add(file.name)
        self._sizes.append(file.size)
        marks.append(_short(file))

    def _sort(self, marks: array[int]) -> None:
        order = sorted(range(len(self._names)), key=lambda i: self._names[i].encode(errors="surrogateescape"))
        names, sizes = self._names, self._sizes
        self._names = Names(names[i] for i in order)
        self._sizes = array("q", (sizes[i] for i in order))
        marks[:] = array("q", (marks[i] for i in order))
        if not self._names.is_sorted:
            twice = next(a for a, b in zip(self._names, self._names[1:], strict=False) if a == b)
            raise DataError(f"data {self.store.spec}: {twice} stands there twice; give each image a name of its own.")

    def _read_labels(self) -> ItemLabels:
        """Return the labels that the first folders of the names are."""
        number: dict[str, int] = {}
        numbers = np.full(len(self._names), NO_CLASS, dtype=np.int64)
        for row, name in enumerate(self._names):
            folder, slash, _ = name.partition("/")
            if slash:
                numbers[row] = number.setdefault(folder, len(number))
        names = sorted(number)
        rank = np.empty(len(names) + 1, dtype=np.int64)
        rank[[number[name] for name in names]] = np.arange(len(names))
        rank[-1] = NO_CLASS
        return ItemLabels(rank[numbers], tuple(names) or None)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """All shards."""
        return self._shards

    @property
    def labels(self) -> ItemLabels:
        """The labels of all images."""
        return self._labels

    def name(self, row: int) -> str:
        """Return the path of an image below the address."""
        return self._names[row]

    def row(self, name: str) -> int | None:
        """Return the row of an image."""
        return self._names.find(name)

    def read(self, shard: Shard, rows: Sequence[int]) -> Iterator[Content]:
        """Yield the files of rows."""
        return self.store.read_many((self._names[row], self._sizes[row]) for row in rows)

    def earlier_digest(self) -> str:
        """Return the sha256 over names, labels and bytes one after the other; artifacts of releases before 0.3 have it.

        It is asked for where a digest of today did not match, so that an explainer's record of its images still holds.
        """
        if self.store.is_far:
            return ""
        if self._earlier is None:
            h = hashlib.sha256()
            contents = self.store.read_many(zip(self._names, self._sizes, strict=True))
            for name, label, content in zip(self._names, self._labels.numbers.tolist(), contents, strict=True):
                if not isinstance(content, bytes):
                    return ""
                for part in (f"{name}|{label}".encode(errors="surrogateescape"), content):
                    h.update(len(part).to_bytes(8, "little") + part)
            self._earlier = h.hexdigest()
        return self._earlier

    def mark(self, shard: Shard) -> str:
        """Return a text over names, sizes and marks of the files; "" where a file has none."""
        marks = self._marks[shard.start : shard.stop]
        if 0 in marks:
            return ""
        h = hashlib.sha256("\n".join(self._names[shard.start : shard.stop]).encode(errors="surrogateescape"))
        h.update(marks.tobytes() + self._sizes[shard.start : shard.stop].tobytes())
        return h.hexdigest()

    def check_unchanged(self) -> None:
        """List the files again, which is cheap, and compare."""
        if not self.store.lists_cheaply:
            return
        n = 0
        for file in self.store.walk():
            row = self._names.find(file.name)
            if row is None:
                continue  # a file that is new, or of another type: not of this source
            if file.size != self._sizes[row] or (self._marks[row] and _short(file) not in (0, self._marks[row])):
                raise DataError(f"data {self.store.spec}: {file.name} {CHANGED}")
            n += 1
        if n < len(self._names):
            raise DataError(f"data {self.store.spec}: {len(self._names) - n} of its images {CHANGED}")


CHANGED = "changed while it was read; run again when nothing writes there."


def _short(file: Stored) -> int:
    """Return 63 bits of a file's mark, 0 where it has none."""
    if not file.mark:
        return 0
    return 1 + (int.from_bytes(hashlib.sha256(file.mark.encode()).digest()[:8], "little") >> 2)
