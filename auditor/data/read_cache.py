"""Read cache: what a reading of a source brought to light, kept by size, time and etag, so that the next need not read.

Of a shard its digest, of a file of many images where they lie in it. An entry is named by its mark: a text over the
names, sizes and marks of the files it was read from.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from auditor.data.user_cache import default_folder, marked, unmarked, user_key
from auditor.errors import TamperError

log = logging.getLogger(__name__)


class ReadCache:
    """Sealed entries of one source; without a folder that only this user can write to, nothing is kept."""

    def __init__(self, address: str) -> None:
        folder = default_folder() / "read"
        self._key = user_key(folder)
        self._folder = folder / hashlib.sha256(address.encode()).hexdigest()[:24]

    def leaves(self) -> dict[str, str]:
        """Return the digests of shards by their marks."""
        return {str(k): str(v) for k, v in (self._read("leaves") or {}).items()}

    def put_leaves(self, leaves: Mapping[str, str]) -> None:
        """Keep digests of shards by their marks, and forget all others."""
        if leaves != self.leaves():
            self._write("leaves", dict(leaves))

    def index(self, mark: str) -> Any:
        """Return where images lie in a file of this mark; None where that is not known."""
        return self._read(f"index-{hashlib.sha256(mark.encode()).hexdigest()[:32]}")

    def put_index(self, mark: str, index: Any) -> None:
        """Keep where images lie in a file."""
        self._write(f"index-{hashlib.sha256(mark.encode()).hexdigest()[:32]}", index)

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _belongs_to(self, name: str) -> str:
        return f"{self._folder.name}/{name}"

    def _read(self, name: str) -> Any:
        try:
            stored = self._file(name).read_bytes() if self._key else b""
            what = f"the cache of readings {self._file(name)}"
            return json.loads(unmarked(stored, self._belongs_to(name), self._key, what)) if stored else None
        except (OSError, ValueError):
            return None
        except TamperError as error:
            log.warning("%s It is read again.", error)
            return None

    def _write(self, name: str, document: Any) -> None:
        if not self._key:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = self._folder / f".{name}.{os.getpid()}.tmp"
            content = json.dumps(document, separators=(",", ":")).encode()
            temporary.write_bytes(marked(content, self._belongs_to(name), self._key))
            temporary.replace(self._file(name))
        except OSError as error:
            log.warning("what was read of the data is not kept for the next time: %s", error)
