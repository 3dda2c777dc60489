"""User cache: this user's folder for what need not be computed twice, and the key that marks what the user wrote there.

What comes from a cache becomes part of audits, so a file counts only with a code made by this user's own key
(HMAC-SHA256), in folders that nobody else may write to.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import stat
from pathlib import Path

from auditor.errors import TamperError

log = logging.getLogger(__name__)

KEY_FILE = "cache.key"
CODE = 65  # bytes before the content: 64 digits and a line's end


def default_folder() -> Path:
    """Return where caches live: $AUDITOR_CACHE, else the user's cache folder."""
    folder = os.environ.get("AUDITOR_CACHE")
    if folder:
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mlflow-auditor"


def user_key(folder: Path) -> bytes:
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


def marked(content: bytes, belongs_to: str, key: bytes) -> bytes:
    """Return content behind its code: that of its bytes and of what it belongs to."""
    message = belongs_to.encode() + b"\n" + content
    return hmac.new(key, message, hashlib.sha256).hexdigest().encode() + b"\n" + content


def unmarked(stored: bytes, belongs_to: str, key: bytes, what: str) -> bytes:
    """Return the content behind a code; one that this user did not write is an error."""
    content = stored[CODE:]
    if not hmac.compare_digest(stored[:CODE], marked(content, belongs_to, key)[:CODE]):
        raise TamperError(f"{what} was not written by this user.")
    return content


def _others_may_write(path: Path) -> bool:
    status = path.lstat()
    is_mine = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return stat.S_ISLNK(status.st_mode) or not is_mine or bool(status.st_mode & 0o022)
