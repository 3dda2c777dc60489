"""Cache: finished parts of an audit on disk, so that an interrupted audit goes on where it stopped.

One sealed file per part under a folder named by everything the part depends on. A finished audit removes its folder.
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

from auditor.explainers.artifact import seal, unseal
from auditor.errors import TamperError
from auditor.metrics.measure import Measure

log = logging.getLogger(__name__)


class AuditCache:
    """Measures by part; ``folder`` None keeps nothing."""

    def __init__(self, folder: Path | None, key: Mapping[str, Any]) -> None:
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
        self.folder = None if folder is None else folder / name

    def get(self, part: str) -> dict[str, Measure] | None:
        """Return a finished part, or None when there is none; a file that was changed counts for nothing."""
        if self.folder is None or not self._file(part).is_file():
            return None
        try:
            document = unseal(self._file(part).read_bytes(), f"the cached part {part!r}")
        except TamperError as error:
            log.warning("%s It is measured again.", error)
            return None
        return {name: Measure.from_json(entry) for name, entry in document["metrics"].items()}

    def put(self, part: str, metrics: Mapping[str, Measure]) -> None:
        """Keep a finished part; it appears whole or not at all."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{os.getpid()}.tmp"
        temporary.write_bytes(seal({"part": part, "metrics": {k: m.to_json() for k, m in metrics.items()}}))
        temporary.replace(self._file(part))

    def clear(self) -> None:
        """Remove everything of this audit."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, part: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{hashlib.sha256(part.encode()).hexdigest()[:16]}.json"


def default_folder() -> Path:
    """Return where caches live: $AUDITOR_CACHE, else the user's cache folder."""
    own = os.environ.get("AUDITOR_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mlflow-auditor"
