"""Worker: what a process of a cluster does, knowing nothing of who started it.

It keeps the functions that it got, calls them for items, and gives back what they yield with the log lines that were
written meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from auditor.errors import AuditError, DataError
from auditor.runners.runner import One, as_many_threads

log = logging.getLogger(__name__)

MOST_LINES = 200  # of the log, per item


@dataclass(frozen=True)
class Welcome:
    """What a worker is: its version of this package and what it runs on."""

    version: str
    source: str  # sha256 over the package's files
    python: str
    torch: str
    host: str
    process: int

    @classmethod
    def here(cls) -> Welcome:
        """Return what this process is."""
        import torch

        of_torch, python = torch.__version__.partition("+")[0], platform.python_version()
        return cls(_version(), source_digest(), python, of_torch, platform.node(), os.getpid())

    def refusal(self, other: Welcome) -> str:
        """Return why a worker may not take part; "" where it may.

        >>> a = Welcome("0.2.0", "aa", "3.11.7", "2.10.0", "here", 1)
        >>> a.refusal(Welcome("0.3.0", "bb", "3.11.7", "2.10.0", "there", 1))
        'there runs mlflow-auditor 0.3.0 and this command 0.2.0'
        """
        pairs = (
            ("mlflow-auditor", self.version, other.version),
            ("mlflow-auditor with other files,", self.source[:12], other.source[:12]),
            ("Python", _minor(self.python), _minor(other.python)),
            ("torch", _minor(self.torch), _minor(other.torch)),
        )
        for name, ours, theirs in pairs:
            if ours != theirs and ours and theirs:
                return f"{other.host} runs {name} {theirs} and this command {ours}"
        return ""


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _version() -> str:
    try:
        return metadata.version("mlflow-auditor")
    except metadata.PackageNotFoundError:
        return "unknown"


def _is_editable() -> bool:
    try:
        text = metadata.distribution("mlflow-auditor").read_text("direct_url.json")
        return bool(json.loads(text or "{}").get("dir_info", {}).get("editable"))
    except (metadata.PackageNotFoundError, ValueError, AttributeError):
        return False


@cache
def source_digest() -> str:
    """Return the sha256 over all modules of the package; "" where it is installed as a checkout, which may change."""
    if _is_editable():
        return ""
    h = hashlib.sha256()
    for package in ("auditor", "auditor.kernels", "auditor.plugins"):
        spec = find_spec(package)
        root = Path(str(spec.origin if spec else "")).parent
        for path in sorted(root.rglob("*.py")):
            h.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return h.hexdigest()


@dataclass
class Outcome:
    """What an item gave: its parts, or the error that ended it, and lines of the log (level, logger, text)."""

    parts: list[Any] = field(default_factory=list)
    error: Exception | None = None
    lines: list[tuple[int, str, str]] = field(default_factory=list)


class Collected(logging.Handler):
    """Keeps what our modules log until somebody takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        if len(self.lines) < MOST_LINES:
            self.lines.append((record.levelno, record.name, record.getMessage()))

    def taken(self) -> list[tuple[int, str, str]]:
        """Return the lines, and forget them."""
        lines, self.lines = self.lines, []
        return lines


class Worker:
    """Calls functions for items. ``environment`` holds the addresses and credentials of stores and registries."""

    def __init__(self, environment: Mapping[str, str], threads: int, verbose: bool, folder: str) -> None:
        os.environ.update(environment)
        if Path(folder).is_dir():
            os.chdir(folder)  # relative addresses of a registry mean the same as for the command
        self._log = Collected()
        logger = logging.getLogger("auditor")
        logger.handlers[:] = [self._log]
        logger.setLevel(logging.INFO if verbose else logging.WARNING)
        logger.propagate = False
        import torch

        torch.set_num_threads(threads)
        self._work: dict[str, Callable[[Any], Iterator[Any]]] = {}
        self._members: dict[tuple[str, int], Any] = {}

    def welcome(self) -> Welcome:
        """Return what this process is."""
        return Welcome.here()

    def knows(self, key: str) -> bool:
        """Whether a function has come already."""
        return key in self._work

    def learn(self, key: str, work: Callable[[Any], Iterator[Any]]) -> None:
        """Keep a function, the last two of them."""
        self._work[key] = work
        for old in list(self._work)[:-2]:
            del self._work[old]

    def run(self, key: str, item: Any, store: Callable[[Any], Any]) -> Outcome:
        """Return all parts of an item; our own errors are part of what came.

        Where an item has many, each is what ``store`` gives for it, so that memory holds one at a time.
        """
        work = self._work[key]

        def parts() -> Iterator[Any]:
            for part in work(item):
                yield part if isinstance(work, One) else store(part)

        return self._outcome(parts())

    def enlist(self, key: str, number: int, made_of: Sequence[Any], threads: int) -> Outcome:
        """Make a member of a crew, ``make(item)``; sums of large products depend on the threads."""

        def parts() -> Iterator[Any]:
            make, item = made_of
            with as_many_threads(threads):
                self._members[key, number] = make(item)
            yield None

        return self._outcome(parts())

    def ask(self, key: str, number: int, method: str, arguments: Sequence[Any], threads: int) -> Outcome:
        """Call a method of a member; ``arguments`` are tuples, one behind the other."""

        def parts() -> Iterator[Any]:
            with as_many_threads(threads):
                yield getattr(self._members[key, number], method)(*(a for some in arguments for a in some))

        return self._outcome(parts())

    def dismiss(self, key: str) -> None:
        """Forget the members of a crew."""
        for name in [name for name in self._members if name[0] == key]:
            del self._members[name]

    def _outcome(self, parts: Iterator[Any]) -> Outcome:
        """Return all parts and what was logged meanwhile; our own errors are part of what came."""
        outcome = Outcome()
        try:
            for part in parts:
                outcome.parts.append(part)
        except AuditError as error:
            outcome.error = error
        except FileNotFoundError as error:
            outcome.error = DataError(
                f"worker on {platform.node()}: {error.filename} is not there; give all machines the same files, or "
                "read them from a store."
            )
        outcome.lines = self._log.taken()
        return outcome
