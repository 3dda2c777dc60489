"""API keys: one per line in a file, read again when the file changes; any of them is accepted."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from pathlib import Path

from auditor.errors import OptionError

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0


class Keys:
    """The keys of a file. Empty lines and lines that begin with ``#`` are skipped.

    Hashes are compared, all of them and in constant time, so neither the keys' length nor a common beginning shows.
    While a file cannot be read its last keys stay valid; one without keys accepts no request.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hashes: list[bytes] = []
        self._stamp: tuple[int, int, int] | None = None
        self._looked = 0.0
        try:
            self._read()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(
                f"--api-keys {path}: cannot be read ({error}); give a file with one key a line."
            ) from None
        if not self._hashes:
            raise OptionError(f"--api-keys {path}: it holds no key; write one key a line.")

    def accepts(self, key: str) -> bool:
        """Whether the key is one of the file's."""
        self._look()
        digest, is_valid = _hash(key), False
        for valid in self._hashes:
            is_valid |= hmac.compare_digest(digest, valid)
        return is_valid

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        try:
            if self._stamp != _stamp(self.path):
                self._read()
                log.info("API keys read again: %d keys", len(self._hashes))
        except (OSError, UnicodeDecodeError) as error:
            log.warning("API keys cannot be read, the last ones stay valid: %s", error)

    def _read(self) -> None:
        stamp = _stamp(self.path)
        lines = [line.strip() for line in self.path.read_text(encoding="utf-8").splitlines()]
        self._hashes = [_hash(line) for line in lines if line and not line.startswith("#")]
        self._stamp = stamp


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
