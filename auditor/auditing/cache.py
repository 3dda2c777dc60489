"""Cache: finished parts of an audit on disk, so that an interrupted audit goes on where it stopped.

One file per part under a folder named by everything the part depends on. A finished audit removes its folder. Numbers
from here become part of an audit, so they count only with a code made by this user's own key (HMAC-SHA256), in folders
that nobody else may write to.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from auditor.data.user_cache import marked, unmarked, user_key
from auditor.errors import TamperError
from auditor.explainers.manifest import seal, unseal
from auditor.metrics.measure import Measure

log = logging.getLogger(__name__)


class AuditCache:
    """Measures by part; ``folder`` None keeps nothing."""

    def __init__(self, folder: Path | None, key: Mapping[str, Any]) -> None:
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
        self._secret = b"" if folder is None else user_key(folder)
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
        temporary.write_bytes(marked(content, self.folder.name, self._secret))
        temporary.replace(self._file(part))

    def _read(self, part: str) -> dict[str, Any] | None:
        if self.folder is None or not self._file(part).is_file():
            return None
        what = f"the cached part {part!r}"
        try:
            content = unmarked(self._file(part).read_bytes(), self.folder.name, self._secret, what)
            document = unseal(content, what)
            return document if document.get("part") == part else None
        except TamperError as error:
            log.warning("%s It is measured again.", error)
            return None

    def clear(self) -> None:
        """Remove everything of this audit."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, part: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{hashlib.sha256(part.encode()).hexdigest()[:16]}.json"
