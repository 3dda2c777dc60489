"""Output folder: files that a command writes, on disk or in a store, each there as a whole or not at all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO
from uuid import uuid4

from auditor.data.store import EXTRA_OF, FarStore, LocalStore, S3Store, Store, Stored
from auditor.errors import DataError


class OutputFolder(ABC):
    """Files below an address."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def files(self) -> dict[str, Stored]:
        """Return all files by name."""
        return {file.name: file for file in self.store.walk()}

    def read(self, file: Stored) -> bytes:
        """Return a file."""
        return self.store.read(file.name, 0, file.size)

    def open(self, file: Stored) -> IO[bytes]:
        """Return a file to read from anywhere in it."""
        return self.store.open(file)

    @abstractmethod
    def write(self, name: str, content: bytes) -> None:
        """Write a file; whoever reads meanwhile has the old one or the new one."""


class LocalOutput(OutputFolder):
    """A folder of this machine, made when it is not there."""

    def __init__(self, folder: Path, spec: str) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"output {spec}: the folder cannot be made ({error.strerror or error}).") from error
        super().__init__(LocalStore(folder.absolute(), spec))
        self.folder = folder.absolute()

    def write(self, name: str, content: bytes) -> None:
        """Write a file under a temporary name, then rename it."""
        temporary = self.folder / f".{name}.{uuid4().hex[:8]}.tmp"
        try:
            temporary.write_bytes(content)
            temporary.replace(self.folder / name)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise DataError(
                f"output {self.store.spec}: {name} cannot be written ({error.strerror or error}); what is finished "
                "stays, and the same command goes on from there."
            ) from error


class FarOutput(OutputFolder):
    """A prefix of a store; an object appears when all of it has been sent."""

    def __init__(self, address: str, spec: str) -> None:
        kind = S3Store if address.startswith(("s3://", "s3a://")) else FarStore
        self.far = kind(address, spec)
        self.far.noun = "output"
        super().__init__(self.far)

    def files(self) -> dict[str, Stored]:
        """Return all objects by name; a prefix that is not there yet has none."""
        try:
            return super().files()
        except DataError as error:
            if isinstance(error.__cause__, FileNotFoundError) and "bucket" not in str(error.__cause__).lower():
                return {}
            raise

    def write(self, name: str, content: bytes) -> None:
        """Send an object, again until it is there with all its bytes."""
        path = f"{self.far.address}/{name}"

        def send() -> None:
            self.far.system.pipe_file(path, content)
            size = self.far.system.info(path).get("size")
            if size != len(content):
                raise OSError(f"{size} of {len(content)} bytes arrived")

        self.far.patiently(send, name)


def open_output(address: str) -> OutputFolder:
    """Return the folder that a path or an address names.

    >>> open_output("ftp://somewhere/x")
    Traceback (most recent call last):
        ...
    auditor.errors.DataError: output ftp://somewhere/x: want a folder, or an address of s3, gs or az.
    """
    scheme, is_far, rest = address.partition("://")
    if not is_far or scheme == "file":
        return LocalOutput(Path(rest if is_far else address).expanduser(), address)
    if scheme not in EXTRA_OF or scheme.startswith("http"):
        raise DataError(f"output {address}: want a folder, or an address of s3, gs or az.")
    if not rest.strip("/"):
        raise DataError(f"output {address}: want a bucket behind {scheme}://.")
    return FarOutput(address, address)
