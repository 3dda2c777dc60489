"""Stores: where files of a data source lie, on disk or behind an address, listed and read with the same few calls.

What an object store refuses for a while (503, a time-out, a connection that ends early, fewer bytes than there are) is
asked for again with growing pauses, for as long as ``AUDITOR_STORE_PATIENCE_S`` says. What stays wrong is one sentence.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from auditor.errors import DataError

T = TypeVar("T")
log = logging.getLogger(__name__)

LARGEST_IMAGE = 256 * 2**20  # bytes of one encoded image; more is no image
READERS = 16  # objects that are fetched at once
MOST_WAITING = 256 * 2**20  # bytes of objects that are fetched ahead
BLOCK = 8 * 2**20  # bytes that are fetched at once of a file that is read from its beginning
SETTLED_S = 2.0  # a file that was written to so lately may be written to again within the same tick of its time stamp
PATIENCE_S = 120.0
FIRST_CONTACT_S = 15.0  # patience with an address that never answered: it is likely to be wrong


class Stored(NamedTuple):
    """A file of a store: its name below the address, its bytes, and a text that changes with it ("" if unknown)."""

    name: str
    size: int
    mark: str


class Unreadable(NamedTuple):
    """What stands for the content of a file that is no image whatever it holds; ``sha256`` is that of its bytes."""

    why: str
    sha256: bytes


class Store(ABC):
    """Files below an address."""

    def __init__(self, address: str, spec: str) -> None:
        self.address, self.spec = address, spec

    @property
    @abstractmethod
    def is_far(self) -> bool:
        """Whether each reading is a request to another machine."""

    @property
    def lists_cheaply(self) -> bool:
        """Whether a second listing costs little beside reading the files."""
        return True

    @abstractmethod
    def walk(self) -> Iterator[Stored]:
        """Yield all files below the address, of each folder in the order of their names; nothing is read."""

    @abstractmethod
    def stat(self, name: str) -> Stored:
        """Return what is known of one file without reading it."""

    @abstractmethod
    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes from start to stop of a file, all of them."""

    @abstractmethod
    def read_many(self, files: Iterable[tuple[str, int]]) -> Iterator[bytes | Unreadable]:
        """Yield the content of each file (name, size), in order."""

    def open(self, file: Stored) -> IO[bytes]:
        """Return a file to read from anywhere in it."""
        return io.BufferedReader(RangeReader(self, file), BLOCK)

    def local_path(self, name: str) -> Path | None:
        """Return where a file lies on this machine; None where it lies elsewhere."""
        return None

    def _too_large(self, name: str, size: int) -> Unreadable | None:
        """Return what stands for a file of more bytes than an image has; None for all others."""
        if size <= LARGEST_IMAGE:
            return None
        h = hashlib.sha256()
        for start in range(0, size, BLOCK):
            h.update(self.read(name, start, min(size, start + BLOCK)))
        return Unreadable(f"{size / 2**20:.0f} MB is too large for an image", h.digest())


class RangeReader(io.RawIOBase):
    """A file of a store as a stream."""

    def __init__(self, store: Store, file: Stored) -> None:
        self._store, self._file, self._at = store, file, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a byte and return which it is."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        return self._at

    def tell(self) -> int:
        """Return the byte that is read next."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as the file goes."""
        stop = min(self._file.size, self._at + len(buffer))
        if stop <= self._at:
            return 0
        content = self._store.read(self._file.name, self._at, stop)
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


class LocalStore(Store):
    """Files below a folder of this machine."""

    def __init__(self, folder: Path, spec: str) -> None:
        super().__init__(str(folder), spec)
        self.folder = folder
        self._opened = time.time()

    @property
    def is_far(self) -> bool:
        """Return False."""
        return False

    def walk(self) -> Iterator[Stored]:
        """Yield all files below the folder in the order of their names; links to folders are not followed."""
        return self._walk(self.folder, "")

    def _walk(self, folder: Path, prefix: str) -> Iterator[Stored]:
        try:
            with os.scandir(folder) as entries:
                listed = [(e.name + "/" * e.is_dir(follow_symlinks=False), e) for e in entries]
        except OSError as error:
            raise DataError(f"data {self.spec}: {folder} cannot be read ({error.strerror or error}).") from error
        for name, entry in sorted(listed, key=lambda pair: os.fsencode(pair[0])):
            if name.endswith("/"):
                yield from self._walk(folder / entry.name, prefix + name)
            elif entry.is_file():
                with suppress(FileNotFoundError):
                    yield self._stored(prefix + name, entry.stat())

    def stat(self, name: str) -> Stored:
        """Return what is known of one file."""
        try:
            return self._stored(name, (self.folder / name).stat())
        except OSError as error:
            raise self._problem(name, error) from error

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes from start to stop of a file."""
        try:
            with (self.folder / name).open("rb") as stream:
                stream.seek(start)
                content = stream.read(stop - start)
        except OSError as error:
            raise self._problem(name, error) from error
        if len(content) != stop - start:
            raise DataError(f"data {self.spec}: {name} became shorter while it was read; run again when it is whole.")
        return content

    def read_many(self, files: Iterable[tuple[str, int]]) -> Iterator[bytes | Unreadable]:
        """Yield the content of each file."""
        for name, size in files:
            if size > LARGEST_IMAGE:
                yield self._too_large(name, size) or b""
                continue
            try:
                content = (self.folder / name).read_bytes()
            except PermissionError as error:
                yield Unreadable(str(error.strerror), b"")
                continue
            except OSError as error:
                raise self._problem(name, error) from error
            yield content

    def open(self, file: Stored) -> IO[bytes]:
        """Return a file to read from anywhere in it."""
        try:
            return (self.folder / file.name).open("rb")
        except OSError as error:
            raise self._problem(file.name, error) from error

    def local_path(self, name: str) -> Path | None:
        """Return where a file lies."""
        return self.folder / name

    def _stored(self, name: str, status: os.stat_result) -> Stored:
        """Return a file; its mark holds the change of its time stamps, which no program can set back."""
        newest = max(status.st_mtime, status.st_ctime)
        times = f"{status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"
        return Stored(name, status.st_size, times if newest < self._opened - SETTLED_S else "")

    def _problem(self, name: str, error: OSError) -> DataError:
        return DataError(f"data {self.spec}: {name} cannot be read ({error.strerror or error}).")


class FarStore(Store):
    """Files behind an address that fsspec knows, each reading tried again until its patience ends."""

    noun = "data"  # what messages call it

    def __init__(self, address: str, spec: str) -> None:
        super().__init__(address.rstrip("/"), spec)
        self.patience_s = _patience()
        self._system: Any = None
        self._has_warned = self._has_answered = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_system": None}  # another process opens connections of its own

    @property
    def is_far(self) -> bool:
        """Return True."""
        return True

    @property
    def system(self) -> Any:
        """Return fsspec's file system of the address, without a memory of listings."""
        if self._system is None:
            self._system = open_system(self.address, self.spec)
        return self._system

    def walk(self) -> Iterator[Stored]:
        """Yield all files below the address, folder by folder."""
        folders = [""]
        while folders:
            folder = folders.pop()
            entries = self._listing(folder)
            below = []
            for entry in sorted(entries, key=lambda e: str(e["name"])):
                name = str(entry["name"]).rstrip("/")[len(self._root()) + 1 :]
                if entry.get("type") == "directory":
                    if name and name != folder:
                        below.append(name)
                elif name:
                    yield Stored(name, int(entry.get("size") or 0), mark_of(entry))
            folders.extend(reversed(below))

    def _root(self) -> str:
        return str(self.system._strip_protocol(self.address)).rstrip("/")

    def _listing(self, folder: str) -> list[dict[str, Any]]:
        path = "/".join(part for part in (self._root(), folder) if part)
        listed: list[dict[str, Any]] = self.patiently(
            lambda: self.system.ls(path, detail=True), folder or "the address"
        )
        return listed

    def stat(self, name: str) -> Stored:
        """Return what is known of one file."""
        entry = self.patiently(lambda: self.system.info(self._path(name)), name)
        if entry.get("type") == "directory":
            raise DataError(f"{self.noun} {self.spec}: {name or 'it'} is a folder, want a file.")
        return Stored(name, int(entry.get("size") or 0), mark_of(entry))

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes from start to stop of a file, asked for again where fewer come."""
        path = self._path(name)

        def fetch() -> bytes:
            content: bytes = self.system.cat_file(path, start=start, end=stop) if stop > start else b""
            if len(content) > stop - start:
                content = self.taken_whole(name, content, start, stop)
            if len(content) != stop - start:
                raise Short(f"{len(content):,} of {stop - start:,} bytes came")
            return content

        return self.patiently(fetch, name)

    def taken_whole(self, name: str, content: bytes, start: int, stop: int) -> bytes:
        """Return the part of a file that came whole, as a server without ranges sends it."""
        return content[start:stop]

    def read_many(self, files: Iterable[tuple[str, int]]) -> Iterator[bytes | Unreadable]:
        """Yield the content of each file, in order; some are fetched ahead."""
        waiting: deque[tuple[Future[bytes | Unreadable], int]] = deque()
        ahead = 0
        pool = ThreadPoolExecutor(READERS, thread_name_prefix="auditor-read")
        try:
            for name, size in files:
                while waiting and (len(waiting) >= 2 * READERS or ahead + size > MOST_WAITING):
                    future, size_of_it = waiting.popleft()
                    ahead -= size_of_it
                    yield future.result()
                waiting.append((pool.submit(self._whole, name, size), size))
                ahead += size
            while waiting:
                yield waiting.popleft()[0].result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _whole(self, name: str, size: int) -> bytes | Unreadable:
        return self._too_large(name, size) or self.read(name, 0, size)

    def _path(self, name: str) -> str:
        return f"{self.address}/{name}" if name else self.address

    def patiently(self, ask: Callable[[], T], name: str) -> T:
        """Return the answer to a request, asked again while what is wrong may pass."""
        began, pause = time.monotonic(), 0.2
        while True:
            try:
                answer = ask()
                self._has_answered = True
                return answer
            except Exception as error:  # each store's library has its own tree of them
                if isinstance(error, DataError):
                    raise
                why = self._why(error)
                if why is not None:
                    raise DataError(f"{self.noun} {self.spec}: {name} {why}") from error
                waited = time.monotonic() - began
                has_met = self._has_answered or _s3_status(error) is not None
                patience_s = self.patience_s if has_met else min(self.patience_s, FIRST_CONTACT_S)
                if waited + pause > patience_s:
                    raise DataError(
                        f"{self.noun} {self.spec}: {name} could not be read within {patience_s:.0f} s, the last answer "
                        f"was: {short(error)}; try again later, or check the address and the endpoint."
                    ) from error
                if not self._has_warned and waited > 1:
                    self._has_warned = True
                    log.warning("%s %s: the store fails for now (%s); trying on.", self.noun, self.spec, short(error))
            time.sleep(pause)
            pause = min(pause * 1.8, 5.0)

    def _why(self, error: Exception) -> str | None:
        """Return why asking again is of no use; None where it may be."""
        text, kind = str(error).lower(), type(error).__name__
        status = getattr(error, "status", None) or _s3_status(error)
        if isinstance(error, PermissionError) or status in (401, 403):
            return (
                f"may not be used: no permission ({short(error)}); check the credentials, and that they allow to list "
                "and to read there, or to write."
            )
        if "credential" in kind.lower() or "credential" in text:
            return f"needs credentials ({short(error)}); set those of the store in the environment."
        if isinstance(error, FileNotFoundError) or status == 404:
            return "is not there; check the name, or list it with the store's own tool."
        if isinstance(error, (ValueError, TypeError, KeyError, NotImplementedError)) and not isinstance(error, OSError):
            return f"cannot be read: {short(error)}."
        if status is not None and 400 <= status < 500 and status not in (408, 409, 429):
            return f"was refused: {short(error)}."
        return None


class S3Store(FarStore):
    """A prefix of an S3 bucket, listed page by page: a listing of millions is never in memory."""

    def walk(self) -> Iterator[Stored]:
        """Yield all objects below the prefix, in the order of their names."""
        bucket, _, prefix = self._root().partition("/")
        prefix = f"{prefix}/" if prefix else ""
        token: dict[str, str] = {}
        while True:
            page = self.patiently(
                lambda: self.system.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, **token),  # noqa: B023
                "the prefix",
            )
            for entry in page.get("Contents", ()):
                name = entry["Key"][len(prefix) :]
                if name and not name.endswith("/"):
                    yield Stored(name, int(entry["Size"]), f"{entry['ETag']} {entry['LastModified']}")
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}


class Short(OSError):
    """Fewer bytes came than there are."""


def mark_of(entry: dict[str, Any]) -> str:
    """Return the text that changes with a file, from what a store says of it; "" where it says nothing."""
    keys = ("ETag", "etag", "md5Hash", "content_md5", "Last-Modified", "LastModified", "mtime", "last_modified")
    parts = [f"{key} {entry[key]}" for key in keys if entry.get(key)]
    return " ".join(parts)


def open_system(address: str, spec: str) -> Any:
    """Return fsspec's file system of an address; a missing package is an error that says what to install."""
    protocol = address.partition("://")[0]
    extra = EXTRA_OF[protocol]
    try:
        import fsspec

        return fsspec.filesystem(protocol, use_listings_cache=False, skip_instance_cache=True, **_options(address))
    except ImportError as error:
        raise DataError(
            f"data {spec}: {protocol}:// needs a package that is not installed ({short(error)}); "
            f"pip install 'mlflow-auditor[{extra}]'."
        ) from error
    except Exception as error:  # credentials and endpoints are looked at when it is made
        raise DataError(f"data {spec}: {protocol}:// cannot be used: {short(error)}.") from error


EXTRA_OF = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "az"),
    **dict.fromkeys(("http", "https"), "http"),
}


def _options(address: str) -> dict[str, Any]:
    return {"simple_links": False} if address.startswith("http") else {}


def _s3_status(error: Exception) -> int | None:
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    metadata = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    status = metadata.get("HTTPStatusCode")
    return int(status) if isinstance(status, int) else None


def short(error: BaseException) -> str:
    """Return what a library says, short and on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:160].rstrip(".")


def _patience() -> float:
    text = os.environ.get("AUDITOR_STORE_PATIENCE_S", "")
    try:
        seconds = float(text) if text else PATIENCE_S
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise DataError(f"AUDITOR_STORE_PATIENCE_S must be seconds, got {text!r}.")
    return seconds
