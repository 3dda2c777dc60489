"""Sharded data: a source in parts of a fixed order, each read by itself in any process, its digest made on the way.

How images lie in files is a `Layout`: a folder of image files, Parquet, Arrow, tar. All else is the same for all.
"""

from __future__ import annotations

import hashlib
import io
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from PIL import Image

from auditor.data import merkle
from auditor.data.image_items import Array, as_array, pixels_of
from auditor.data.item_labels import ItemLabels
from auditor.data.read_cache import ReadCache
from auditor.data.source import Data, Shard
from auditor.data.store import Unreadable
from auditor.errors import DataError
from auditor.subject.preprocessing import Preprocessing

log = logging.getLogger(__name__)

Content = bytes | Array | Unreadable


class Layout(ABC):
    """How images lie in files: which rows make a shard, what they are called, and how they are read."""

    @property
    @abstractmethod
    def shards(self) -> tuple[Shard, ...]:
        """All shards, their rows one after another."""

    @property
    @abstractmethod
    def labels(self) -> ItemLabels:
        """The labels of all images."""

    @abstractmethod
    def name(self, row: int) -> str:
        """Return the name of an image."""

    @abstractmethod
    def row(self, name: str) -> int | None:
        """Return the row of the image of a name."""

    @abstractmethod
    def read(self, shard: Shard, rows: Sequence[int]) -> Iterator[Content]:
        """Yield the content of rows of a shard, in order; they rise."""

    @abstractmethod
    def mark(self, shard: Shard) -> str:
        """Return a text that changes when a file of the shard does; "" where none is known."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise when a file is not what it was when the source was opened."""

    def known_leaves(self) -> dict[int, str]:
        """Return digests of shards that were made while the source was opened."""
        return {}

    def earlier_digest(self) -> str:
        """Return the digest of the content as releases before 0.3 made it; "" where they could not read it."""
        return ""


class ShardedData(Data):
    """A source of shards. Reading all of a shard makes its digest; nothing is read a second time for that."""

    reads_runs = True

    def __init__(self, spec: str, layout: Layout, address: str, **options: Any) -> None:
        super().__init__(spec, **options)
        self.layout, self.address = layout, address
        self.class_names = layout.labels.names
        self._leaves = layout.known_leaves()
        self._has_looked = False

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The parts of the source that any process can read by itself, in their fixed order."""
        return self.layout.shards

    def _count(self) -> int:
        return len(self.layout.labels.numbers)

    def _labels(self) -> Array:
        return self.layout.labels.single

    def _id(self, row: int) -> str:
        return self.layout.name(int(row))

    def rows_of(self, ids: Sequence[str]) -> Array:
        """Return the row in the whole source of each image that batches name."""
        rows = [self.layout.row(name) for name in ids]
        if None in rows:
            raise DataError(f"data {self.spec}: {ids[rows.index(None)]} is none of its images.")
        return np.array(rows, dtype=np.int64)

    @property
    def has_files(self) -> bool:
        """Whether its images are files."""
        return True

    def image_file(self, name: str) -> bytes | None:
        """Return the image file of a name as the source holds it; None for arrays of numbers."""
        row = self.layout.row(name)
        if row is None:
            return None
        content = next(self.layout.read(self._shard_of(row), [row]))
        return content if isinstance(content, bytes) else None

    def image_size(self, name: str) -> tuple[int, int] | None:
        """Return width and height of an image before it is resized for a model, from its head."""
        content = self.image_file(name)
        try:
            with Image.open(io.BytesIO(content or b"")) as image:
                return image.size
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            return None

    def _items(self, pre: Preprocessing, batch_size: int) -> Iterator[tuple[Array, Array, list[str]]]:
        numbers = self.layout.labels.numbers
        images: list[Array] = []
        taken: list[int] = []
        for row, content in self._contents(self.sample.rows):
            try:
                if isinstance(content, Unreadable):
                    raise DataError(content.why)
                images.append(pixels_of(content, pre, None, f"data {self.spec}"))
            except DataError as error:
                self._skip(self._id(row), reason(error))
                continue
            taken.append(row)
            if len(taken) == batch_size:
                yield np.stack(images), numbers[taken], [self._id(i) for i in taken]
                images, taken = [], []
        if taken:
            yield np.stack(images), numbers[taken], [self._id(i) for i in taken]

    def _shard_of(self, row: int) -> Shard:
        return self.shards[int(np.searchsorted(self._starts, row, side="right")) - 1]

    @cached_property
    def _starts(self) -> Array:
        return np.fromiter((shard.start for shard in self.shards), dtype=np.int64)

    def _contents(self, rows: Array) -> Iterator[tuple[int, Content]]:
        """Yield the content of rows; whole shards among them leave their digest behind."""
        edges = np.searchsorted(rows, self._starts)
        for shard, low, high in zip(self.shards, edges, [*edges[1:], len(rows)], strict=True):
            chosen = rows[low:high].tolist()
            if not chosen:
                continue
            leaf = merkle.Leaf() if len(chosen) == len(shard) and self._leaf(shard) is None else None
            for row, content in zip(chosen, self.layout.read(shard, chosen), strict=True):
                self.read_bytes += size_of(content)
                if leaf is not None:
                    leaf.add(self._id(row), self.layout.labels.text(row), sha256_of(content))
                yield row, content
            if leaf is not None:
                self._leaves[shard.index] = leaf.hexdigest()

    def run(self, start: int, stop: int) -> ShardedData:
        """Return a source of the images at these positions, which notes the digests that it makes."""
        other = super().run(start, stop)
        assert isinstance(other, ShardedData)
        other._leaves = dict(self._leaves)
        return other

    # the digest

    def mark(self, start: int, stop: int) -> str:
        """Return a text over the marks of all shards that the positions lie in."""
        rows = self.sample.rows[start:stop]
        first, last = (int(np.searchsorted(self._starts, row, side="right")) - 1 for row in (rows[0], rows[-1]))
        marks = [self._mark(shard) for shard in self.shards[first : last + 1]]
        return hashlib.sha256(" ".join([*marks, str(rows.tobytes())]).encode()).hexdigest() if all(marks) else ""

    @property
    def leaves(self) -> Mapping[int, str]:
        """The digests that are known of shards that its images lie in, by their index."""
        if not len(self.sample):
            return {}
        first, last = self.sample.rows[0], self.sample.rows[-1]
        leaves = ((shard, self._leaves.get(shard.index)) for shard in self.shards)
        return {s.index: leaf for s, leaf in leaves if leaf is not None and s.stop > first and s.start <= last}

    def add_leaves(self, leaves: Mapping[int, str]) -> None:
        """Take digests of shards that other processes have read; one that differs from what is known is an error."""
        for index, leaf in leaves.items():
            if self._leaves.setdefault(index, leaf) != leaf:
                raise DataError(
                    f"data {self.spec}: {self.shards[index].key} has two contents: {self._leaves[index][:12]} was read "
                    f"here and {leaf[:12]} elsewhere; give all machines the same files, or read them from one store."
                )

    def _leaf(self, shard: Shard) -> str | None:
        if not self._has_looked:
            self._has_looked = True
            cached = self._cache().leaves()
            for other in self.shards if cached else ():
                leaf = cached.get(self._mark(other))
                if leaf is not None:
                    self._leaves.setdefault(other.index, leaf)
        return self._leaves.get(shard.index)

    def _cache(self) -> ReadCache:
        return ReadCache(self.address)

    def _mark(self, shard: Shard) -> str:
        mark = self.layout.mark(shard)
        return hashlib.sha256(f"{shard.key} {mark}".encode()).hexdigest() if mark else ""

    def holds(self, content_digest: str) -> bool:
        """Whether a digest is that of the whole source's content, in the form of today or of earlier releases."""
        return super().holds(content_digest) or content_digest == self.layout.earlier_digest()

    def _whole_digest(self) -> str:
        """Return the root over all shards; those that nobody has read yet are read now."""
        missing = [shard for shard in self.shards if self._leaf(shard) is None]
        if missing:
            n = sum(len(shard) for shard in missing)
            log.log(
                logging.WARNING if n > 100_000 else logging.INFO,
                "data %s: %d of %d images are read for the digest; the next command finds it in the cache.",
                self.spec, n, self._count(),
            )  # fmt: skip
            rows = np.concatenate([np.arange(shard.start, shard.stop) for shard in missing])
            for _ in self._contents(rows):
                pass
        self.layout.check_unchanged()
        marks = {self._mark(shard): self._leaves[shard.index] for shard in self.shards}
        marks.pop("", None)
        self._cache().put_leaves(marks)
        return merkle.root([self._leaves[shard.index] for shard in self.shards])

    def _content(self) -> Iterator[bytes]:
        yield bytes.fromhex(self._whole_digest())


def sha256_of(content: Content) -> bytes:
    """Return the sha256 of an image's content: of the bytes of a file, or of an array with its shape and type."""
    if isinstance(content, Unreadable):
        return content.sha256
    if isinstance(content, bytes):
        return hashlib.sha256(content).digest()
    array = as_array(content)
    return hashlib.sha256(f"{array.dtype}|{array.shape}|".encode() + np.ascontiguousarray(array).tobytes()).digest()


def size_of(content: Content) -> int:
    """Return how many bytes an image's content has."""
    if isinstance(content, Unreadable):
        return 0
    return len(content) if isinstance(content, bytes) else int(content.nbytes)


def reason(error: DataError) -> str:
    """Return why an image cannot be read, without what the decoder says of its buffers."""
    cause = error.__cause__
    if type(cause).__name__ == "UnidentifiedImageError":
        return "cannot identify image file"
    return str(cause or error)[:80]
