"""Tar files in the form of WebDataset: members that share a name up to the first dot are one image with its label.

A tar has no table of contents. On disk its headers are read, from an address all of it, once, with its digest made on
the way; what came of that is kept, and images are then read from where they lie. Nothing is unpacked.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, NamedTuple, cast

import numpy as np

from auditor.data import merkle
from auditor.data.columns import LabelColumn
from auditor.data.folder_images import CHANGED
from auditor.data.item_labels import ItemLabels
from auditor.data.names import Names
from auditor.data.python_objects import LABEL_KEYS
from auditor.data.read_cache import ReadCache
from auditor.data.shards import Content, Layout, sha256_of
from auditor.data.source import Shard
from auditor.data.store import LARGEST_IMAGE, Store, Stored, Unreadable, short
from auditor.errors import DataError

IMAGE_ENDS = ("jpg", "jpeg", "png", "webp", "ppm", "pgm", "bmp", "gif", "tif", "tiff")
LARGEST_LABEL = 2**20
LARGEST_HEADER = 2**24  # bytes that a header may ask for at once: long names, not images
MOST_UNPACKED = 200  # times the size of a compressed tar, beside 64 MB
OPENED_AT_ONCE = 4


class Member(NamedTuple):
    """An image of a tar: its name, where its bytes lie, how many there are, and its label."""

    name: str
    offset: int
    size: int
    label: Any


class TarFiles(Layout):
    """Tar files, each a shard. An image is called ``file/name``."""

    def __init__(self, store: Store, files: Sequence[Stored], image: str | None, label: str | None) -> None:
        self.store, self.files, self.image, self.label = store, tuple(files), image, label
        self._leaves_read: dict[int, str] = {}
        labels = LabelColumn(None, store.spec)
        self._names = Names()
        self._offsets: list[Any] = []
        self._sizes: list[Any] = []
        shards: list[Shard] = []
        with ThreadPoolExecutor(OPENED_AT_ONCE if store.is_far else 1, thread_name_prefix="auditor-tar") as pool:
            for number, index in enumerate(pool.map(self._indexed, range(len(self.files)))):
                start = len(self._names)
                for name in index["names"]:
                    self._names.add(f"{self.files[number].name}/{name}")
                self._offsets.append(np.array(index["offsets"], dtype=np.int64))
                self._sizes.append(np.array(index["sizes"], dtype=np.int64))
                labels.add_values(index["labels"])
                shards.append(Shard(number, self.files[number].name, start, len(self._names)))
                if index["leaf"]:
                    self._leaves_read[number] = index["leaf"]
        if not len(self._names):
            raise DataError(
                f"data {store.spec}: no image in it: its tar files have no member called .{', .'.join(IMAGE_ENDS)}; "
                "name the ending with ?image=ENDING."
            )
        self._shards, self._labels = tuple(shards), labels.labels()

    @property
    def shards(self) -> tuple[Shard, ...]:
        """All tar files."""
        return self._shards

    @property
    def labels(self) -> ItemLabels:
        """The labels of all images."""
        return self._labels

    def name(self, row: int) -> str:
        """Return ``file/name``."""
        return self._names[row]

    def row(self, name: str) -> int | None:
        """Return the row of an image."""
        return self._names.find(name)

    def known_leaves(self) -> dict[int, str]:
        """Return the digests of tar files that had to be read to be opened."""
        return self._leaves_read

    def mark(self, shard: Shard) -> str:
        """Return the mark of the file."""
        return self._file_mark(shard.index)

    def _file_mark(self, number: int) -> str:
        file = self.files[number]
        return file.mark and f"{file.name} {file.size} {file.mark} {self.image} {self.label}"

    def check_unchanged(self) -> None:
        """Ask for each file again."""
        for file in self.files:
            now = self.store.stat(file.name)
            if now.size != file.size or (file.mark and now.mark and now.mark != file.mark):
                raise DataError(f"data {self.store.spec}: {file.name} {CHANGED}")

    def read(self, shard: Shard, rows: Sequence[int]) -> Iterator[Content]:
        """Yield the images of rows."""
        file = self.files[shard.index]
        wanted = [row - shard.start for row in rows]
        offsets, sizes = self._offsets[shard.index], self._sizes[shard.index]
        with self._open(file) as stream:
            for k in wanted:
                if sizes[k] > LARGEST_IMAGE:
                    yield Unreadable(f"{sizes[k] / 2**20:.0f} MB is too large for an image", b"")
                    continue
                content = self._read_at(file, stream, int(offsets[k]), int(sizes[k]))
                yield content

    def _read_at(self, file: Stored, stream: IO[bytes], offset: int, size: int) -> bytes:
        try:
            stream.seek(offset)
            content = stream.read(size)
        except (OSError, EOFError) as error:
            raise self._damaged(file, short(error)) from error
        if len(content) != size:
            raise self._damaged(file, f"it ends early, at {offset + len(content):,} bytes")
        return content

    def _damaged(self, file: Stored, why: str) -> DataError:
        return DataError(f"data {self.store.spec}: {file.name} is damaged ({why}); write or copy it again.")

    def _open(self, file: Stored) -> IO[bytes]:
        stream = self.store.open(file)
        return cast(IO[bytes], Unpacked(stream, file)) if _is_packed(file.name) else stream

    # the index

    def _indexed(self, number: int) -> dict[str, Any]:
        cache = ReadCache(self.store.address)
        is_costly = self.store.is_far or _is_packed(self.files[number].name)
        mark = self._file_mark(number) if is_costly else ""
        index: dict[str, Any] | None = cache.index(mark) if mark else None
        if index is None:
            index = self._index(number, is_costly)
            if mark:
                cache.put_index(mark, index)
        return index

    def _index(self, number: int, with_leaf: bool) -> dict[str, Any]:
        """Go through a tar; what is far away is digested on the way."""
        file = self.files[number]
        members: list[Member] = []
        leaf = merkle.Leaf()
        try:
            with self._open(file) as stream:
                for member in self._members(file, stream):
                    members.append(member)
                    if with_leaf:
                        leaf.add(
                            f"{file.name}/{member.name}", _label_text(member.label), self._sha(file, stream, member)
                        )
        except (tarfile.TarError, EOFError, gzip.BadGzipFile, ValueError, OSError) as error:
            if isinstance(error, DataError):
                raise
            raise self._damaged(file, short(error)) from error
        names = [m.name for m in members]
        if len(set(names)) < len(names):
            twice = next(name for k, name in enumerate(names) if name in names[:k])
            raise DataError(
                f"data {self.store.spec}: {file.name} holds two images called {twice}; give each a name of its own."
            )
        return {
            "names": names,
            "offsets": [m.offset for m in members],
            "sizes": [m.size for m in members],
            "labels": [m.label for m in members],
            "leaf": leaf.hexdigest() if with_leaf else None,
        }

    def _sha(self, file: Stored, stream: IO[bytes], member: Member) -> bytes:
        if member.size > LARGEST_IMAGE:
            return b""
        return sha256_of(self._read_at(file, stream, member.offset, member.size))

    def _members(self, file: Stored, stream: IO[bytes]) -> Iterator[Member]:
        """Yield the images of a tar in order, each with the label that shares its name."""
        key, ends = "", dict[str, tarfile.TarInfo]()
        with tarfile.open(fileobj=cast(IO[bytes], _Headers(stream)), mode="r:") as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # else it keeps all of them
                folder, slash, base = member.name.rpartition("/")
                stem, dot, end = base.partition(".")
                if not member.isreg() or member.issparse() or not dot or not stem:
                    continue
                if folder + slash + stem != key:
                    yield from self._sample(file, stream, key, ends)
                    key, ends = folder + slash + stem, {}
                ends[end.lower()] = member
            yield from self._sample(file, stream, key, ends)

    def _sample(self, file: Stored, stream: IO[bytes], key: str, ends: dict[str, tarfile.TarInfo]) -> Iterator[Member]:
        wanted = IMAGE_ENDS if self.image is None else (self.image.lower(),)
        end = next((end for end in wanted if end in ends), None)
        if end is None:
            return
        at = stream.tell()
        label = self._label_of(file, stream, ends)
        stream.seek(at)
        yield Member(f"{key}.{end}", ends[end].offset_data, ends[end].size, label)
        stream.seek(at)

    def _label_of(self, file: Stored, stream: IO[bytes], ends: dict[str, tarfile.TarInfo]) -> Any:
        """Return the label of a sample: its .cls, an entry of its .json, or what was asked for."""
        end, _, entry = (self.label or "").partition("/")
        if self.label is not None and end not in ends:
            return None
        for name in (end,) if self.label is not None else ("cls", "cls.txt", "json"):
            if name not in ends or ends[name].size > LARGEST_LABEL:
                continue
            text = self._read_at(file, stream, ends[name].offset_data, ends[name].size).decode("utf-8", "replace")
            label = _entry(text, entry) if name.endswith("json") else text.strip()
            if label is not None:
                return int(label) if isinstance(label, str) and label.isdecimal() else label
        return None


def _entry(text: str, entry: str) -> Any:
    """Return the label in a JSON member: the entry asked for, else one that is called like a label."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    keys = [entry] if entry else [k for k in LABEL_KEYS if k in document]
    value = document.get(keys[0]) if keys else None
    return value if isinstance(value, (str, int)) or value is None else None


def _label_text(label: Any) -> str:
    return "-1" if label is None else str(label)


def _is_packed(name: str) -> bool:
    return name.endswith((".gz", ".tgz"))


class _Headers:
    """A stream for tarfile, which asks it for headers alone: a header that claims gigabytes is refused."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a byte."""
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        """Return the byte that is read next."""
        return self._stream.tell()

    def read(self, n: int = -1) -> bytes:
        """Return bytes of a header."""
        if not 0 <= n <= LARGEST_HEADER:
            raise tarfile.ReadError(f"a header of {n:,} bytes")
        return self._stream.read(n)


class Unpacked(gzip.GzipFile):
    """A compressed tar as a stream; one that grows beyond reason is refused."""

    def __init__(self, stream: IO[bytes], file: Stored) -> None:
        super().__init__(fileobj=stream, mode="rb")
        self._packed, self._most = stream, MOST_UNPACKED * file.size + 2**26

    def read(self, size: int | None = -1) -> bytes:
        """Return bytes of the tar."""
        if self.tell() + max(0, size or 0) > self._most:
            raise tarfile.ReadError(f"it unpacks to more than {self._most:,} bytes")
        return super().read(size)

    def close(self) -> None:
        """Close both."""
        with contextlib.closing(self._packed):
            super().close()
