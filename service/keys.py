"""API keys of the service: who may ask what, how often and until when. Read again when the file changes.

The file has one key a line, or TOML with an entry per key:

    [[keys]]
    name = "mobile app"                     # in the log beside each request
    hash = "sha256:9f86d0…"                 # of `auditor keys hash`; or key = "…" as it is
    routes = ["/explain", "/predict"]       # all routes when left out
    models = ["birds"]                      # registered names; all when left out
    rate_per_minute = 60
    expires = 2027-01-01                    # a date or a time; the key is refused from then on
    revoked = false

A line may be a hash too. The path is followed through symbolic links at every look, as mounted secrets need it.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import logging
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from auditor.errors import OptionError
from auditor.service.problems import Problem
from auditor.service.rate_limit import RateLimit
from auditor.service.routes import TABLE, label_of

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
CLOCK_SLACK_S = 300.0  # by which a clock may run behind that of the machine that wrote the file
MAX_FILE = 4 << 20
HASH = re.compile(r"^sha256:[0-9a-f]{64}$")
LABELS = sorted({entry.label for entry in TABLE if entry.needs_key})


class KeyEntry(BaseModel):
    """One key with what it may do."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(default="", max_length=100)
    key: str | None = Field(default=None, min_length=1, repr=False)
    hash: str | None = Field(default=None, pattern=HASH.pattern)
    routes: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    rate_per_minute: float | None = Field(default=None, gt=0, le=1e6)
    expires: datetime.datetime | datetime.date | None = None
    revoked: bool = False

    @field_validator("routes")
    @classmethod
    def _are_routes(cls, routes: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for route in routes or ():
            if route not in LABELS:
                raise ValueError(f"there is no route {route[:60]!r}; there are {', '.join(LABELS)}")
        return routes

    @model_validator(mode="after")
    def _is_one_key(self) -> KeyEntry:
        if (self.key is None) == (self.hash is None):
            raise ValueError("give either key or hash")
        return self

    @property
    def digest(self) -> bytes:
        """Return the sha256 of the key."""
        return bytes.fromhex(self.hash[7:]) if self.hash is not None else _digest(self.key or "")

    @property
    def end(self) -> float:
        """Return the time from which on it is refused, in seconds since 1970."""
        if self.expires is None:
            return float("inf")
        moment = self.expires
        if not isinstance(moment, datetime.datetime):
            moment = datetime.datetime.combine(moment, datetime.time())
        return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.timezone.utc)).timestamp()


@dataclass(frozen=True, slots=True)
class _Content:
    """What the file held at one look."""

    entries: tuple[KeyEntry, ...]
    digests: tuple[bytes, ...]
    stamp: tuple[int, ...]
    written: float


class Keys:
    """The keys of a file. While it cannot be read its last keys stay valid for ``grace_s``, then nobody gets in.

    Hashes are compared, all of them and in constant time, so neither the keys' length nor a common beginning shows.
    """

    def __init__(self, path: Path, *, grace_s: float = 300.0, limit: RateLimit | None = None) -> None:
        self.path, self.grace_s = path, grace_s
        self.limit = limit or RateLimit()
        self._content: _Content | None = None
        self._looked = self._read_at = float("-inf")

    def check(self) -> None:
        """Read the file now; what is wrong with it is an error."""
        try:
            self._content = read_keys(self.path)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise OptionError(f"--api-keys {self.path}: cannot be read ({reason}); give a file of keys.") from None
        self._read_at = time.monotonic()

    @property
    def is_readable(self) -> bool:
        """Whether keys could be read, now or within the grace period."""
        self._look()
        return self._content is not None and time.monotonic() - self._read_at <= self.grace_s

    def admit(self, key: str, path: str, model: str) -> KeyEntry:
        """Return the entry of a key that may ask for this path of this model; else the problem says why not."""
        if not self.is_readable:
            raise Problem(503, "the API keys cannot be read, so nobody is let in.", code="keys_unreadable")
        if not key:
            raise Problem(401)
        entry = self._entry(key)
        if entry is None:
            raise Problem(401, "this API key is not one of this server's.")
        self._check_time(entry)
        if entry.routes is not None and label_of(path) not in entry.routes:
            raise Problem(403, f"this API key is for {', '.join(entry.routes)} only.", code="route_not_allowed")
        if entry.models is not None and model not in entry.models:
            raise Problem(403, "this API key is not for the model that is served here.", code="model_not_allowed")
        if entry.rate_per_minute is not None:
            wait_s = self.limit.wait_s(entry.digest, entry.rate_per_minute)
            if wait_s > 0:
                sentence = f"this API key may ask {entry.rate_per_minute:g} times a minute; wait {wait_s:.0f} s."
                raise Problem(429, sentence, code="rate_limited", retry_after_s=int(wait_s) + 1)
        return entry

    def _entry(self, key: str) -> KeyEntry | None:
        assert self._content is not None
        given, valid = _digest(key), None
        for entry, digest in zip(self._content.entries, self._content.digests, strict=True):
            if hmac.compare_digest(given, digest):
                valid = entry
        return valid

    def _check_time(self, entry: KeyEntry) -> None:
        assert self._content is not None
        if entry.revoked:
            raise Problem(401, "this API key was revoked; ask for a new one.", code="key_revoked")
        if entry.expires is None:
            return
        now = time.time()
        if now >= entry.end:
            raise Problem(401, f"this API key expired on {entry.expires}; ask for a new one.", code="key_expired")
        if now < self._content.written - CLOCK_SLACK_S:
            raise Problem(401, "this server's clock is in the past, so a key that expires is not taken.", code="clock")

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        try:
            if self._content is None or self._content.stamp != _stamp(self.path.stat()):
                self._content = read_keys(self.path)
                log.info("API keys read: %d keys", len(self._content.entries))
            self._read_at = now
        except (OSError, OptionError) as error:
            reason = " ".join(str(error).split())[:300]
            log.error("API keys cannot be read, the last ones stay valid for %g s: %s", self.grace_s, reason)


def read_keys(path: Path) -> _Content:
    """Read a file of keys; the stamp is that of the very file that was read."""
    with path.open("rb") as file:
        status, content = os.fstat(file.fileno()), file.read(MAX_FILE + 1)
    if len(content) > MAX_FILE:
        raise OptionError(f"--api-keys {path}: it is larger than {MAX_FILE >> 20} MB; give a file of keys.")
    try:
        entries = parse_keys(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # OptionError too
        raise OptionError(f"--api-keys {path}: {' '.join(str(error).split())[:300]}") from None
    if not entries:
        raise OptionError(f"--api-keys {path}: it holds no key; write one key a line.")
    return _Content(tuple(entries), tuple(e.digest for e in entries), _stamp(status), status.st_mtime)


def parse_keys(text: str) -> list[KeyEntry]:
    r"""Return the keys of a file's text.

    >>> [entry.key for entry in parse_keys("# staff\nfirst\n\n second ")]
    ['first', 'second']
    """
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not any(re.match(r"\[\[?\s*keys\s*\]\]?", line) for line in lines):
        return [KeyEntry(hash=line) if HASH.match(line) else KeyEntry(key=line) for line in lines]
    given = _toml(text)
    if set(given) != {"keys"} or not isinstance(given["keys"], list):
        raise OptionError("a file of keys in TOML has entries [[keys]] and nothing else.")
    entries = [_entry_of(i, values) for i, values in enumerate(given["keys"])]
    if len({entry.digest for entry in entries}) < len(entries):
        raise OptionError("the same key stands there twice; give each key one entry.")
    return entries


def hashed(key: str) -> str:
    """Return the hash of a key as a file of keys holds it.

    >>> hashed("a-key-of-sixteen")
    'sha256:9334280a032a1029ecb9756fec6a57db7ed8aac9449a826f1ed5fa3ba03aebb5'
    """
    return "sha256:" + _digest(key).hex()


def _toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise OptionError(f"it is not TOML: {error}.") from None


def _entry_of(i: int, values: Any) -> KeyEntry:
    try:
        return KeyEntry.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        where = ".".join(["keys", str(i), *(str(part) for part in first["loc"])])
        message = first["msg"].removeprefix("Value error, ")
        raise OptionError(f"{where}: {message[:1].lower()}{message[1:]}.") from None


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
