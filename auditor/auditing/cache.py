"""Cache: finished parts of an audit on disk, so that an interrupted audit goes on where it stopped.

One file per part under a folder named by everything the part depends on. A finished audit removes its folder. Numbers
from here become part of an audit, so they count only with a code made by this user's own key (HMAC-SHA256), in folders
that nobody else may write to.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from auditor.errors import TamperError
from auditor.explainers.manifest import seal, unseal
from auditor.metrics.measure import Measure

log = logging.getLogger(__name__)

KEY_FILE = "cache.key"
CODE = 65  # bytes before the sealed part: 64 digits and a line's end


class AuditCache:
    """Measures by part; ``folder`` None keeps nothing."""

    def __init__(self, folder: Path | None, key: Mapping[str, Any]) -> None:
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
        self._secret = b"" if folder is None else _secret(folder)
        self.folder = folder / name if folder is not None and self._secret else None

    def get(self, part: str) -> dict[str, Measure] | None:
        """Return a finished part, or None when there is none; a file that was changed counts for nothing."""
        document = self._read(part)
        return (
            None
            if document is None
            else {name: Measure.from_json(entry) for name, entry in document["metrics"].items()}
        )

    def record(self, part: str) -> dict[str, Any] | None:
        """Return what was put beside the measures of a finished part."""
        record: dict[str, Any] | None = (self._read(part) or {}).get("record")
        return record

    def put(self, part: str, metrics: Mapping[str, Measure], record: Mapping[str, Any] | None = None) -> None:
        """Keep a finished part; it appears whole or not at all. ``record`` is JSON that belongs to the measures."""
        if self.folder is None:
            return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self.folder / f".{os.getpid()}.tmp"
        document = {"part": part, "metrics": {k: m.to_json() for k, m in metrics.items()}}
        content = seal(document if record is None else {**document, "record": dict(record)})
        temporary.write_bytes(self._code(content) + content)
        temporary.replace(self._file(part))

    def _read(self, part: str) -> dict[str, Any] | None:
        if self.folder is None or not self._file(part).is_file():
            return None
        stored = self._file(part).read_bytes()
        code, content = stored[:CODE], stored[CODE:]
        try:
            if not hmac.compare_digest(code, self._code(content)):
                raise TamperError(f"the cached part {part!r} was not written by this user.")
            document = unseal(content, f"the cached part {part!r}")
            return document if document.get("part") == part else None
        except TamperError as error:
            log.warning("%s It is measured again.", error)
            return None

    def _code(self, content: bytes) -> bytes:
        """Return the code of a part: of its bytes and of the audit it belongs to."""
        assert self.folder is not None
        message = self.folder.name.encode() + b"\n" + content
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest().encode() + b"\n"

    def clear(self) -> None:
        """Remove everything of this audit."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, part: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{hashlib.sha256(part.encode()).hexdigest()[:16]}.json"


def _secret(folder: Path) -> bytes:
    """Return this user's key, made at the first call; nothing where others could have written the folder or the key."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / KEY_FILE
        if not path.exists():
            temporary = folder / f".{KEY_FILE}.{os.getpid()}"
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(secrets.token_bytes(32))
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)  # the first of two processes wins
            temporary.unlink()
        foreign = [p for p in (folder, path) if _others_may_write(p)]
        if foreign:
            log.warning("%s may be written by others, so no cache is used; set AUDITOR_CACHE.", foreign[0])
            return b""
        return path.read_bytes()
    except OSError as error:
        log.warning("no cache is used: %s", error)
        return b""


def _others_may_write(path: Path) -> bool:
    status = path.lstat()
    is_mine = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return stat.S_ISLNK(status.st_mode) or not is_mine or bool(status.st_mode & 0o022)


def default_folder() -> Path:
    """Return where caches live: $AUDITOR_CACHE, else the user's cache folder."""
    folder = os.environ.get("AUDITOR_CACHE")
    if folder:
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mlflow-auditor"
