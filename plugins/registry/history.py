"""History: an append-only log of a registered model: what was done to which version, when, and by whose key.

Each entry is a tag of the registered model, ``auditor.log.<number>.<digest>``: canonical JSON that names the digest of
the entry before (of both, where two writers were at it at once), so that none can be changed, removed or put between
others without all later ones; where there is a key the entry is signed (DSSE). The tag ``auditor.log`` of a version
repeats the digest of the newest entry about it, so that a log cut short at its end is noticed too; a caller who noted a
digest earlier can ask for it.

An entry stands on both sides of its deed: one says that it begins, one that it is done (`noted`). A process killed
between the two leaves the first alone, so every deed is in the log; ``logged_state.py`` finds those that are not.
"""

from __future__ import annotations

import base64
import json
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any

from auditor.errors import AuditError, ClockError, SignatureError
from auditor.explainers.manifest import sha256
from auditor.plugins.registry.location import ModelVersion, mlflow_errors, set_tag
from auditor.plugins.registry.tags import LOG as HEAD
from auditor.signing.keys import TrustedKeys, current_signer
from auditor.signing.statements import make_statement, open_envelope, sign

log = logging.getLogger(__name__)

PREFIX = f"{HEAD}."
PREDICATE = "https://in-toto.io/attestation/link/v0.3"
KEY = re.compile(re.escape(PREFIX) + r"(\d{6})\.([0-9a-f]{16})")
BEGIN = "begin "  # before the name of an action that is not done yet
AT_ONCE = 3  # entries that writers at once may be apart
SLACK = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a model's history. ``problem`` is empty when it stands where it should."""

    number: int
    time: str
    action: str
    version: str
    digests: dict[str, str]
    detail: str = ""
    before: str = ""  # digest of the entry before, or of several with commas between
    envelope: str = ""  # the signed form, base64; empty: unsigned
    digest: str = ""  # of this entry, as the next one names it
    signer: str = ""
    problem: str = ""

    def plain(self) -> dict[str, Any]:
        """Return what is hashed and signed."""
        names = ("number", "time", "action", "version", "digests", "detail", "before")
        return {name: getattr(self, name) for name in names}

    def encode(self) -> str:
        """Return the tag's value."""
        return json.dumps({**self.plain(), "envelope": self.envelope}, sort_keys=True)

    def to_json(self) -> dict[str, Any]:
        """Return what ``auditor log --json`` prints."""
        return {**self.plain(), "digest": self.digest, "signer": self.signer, "problem": self.problem}


@contextmanager
def noted(version: ModelVersion, action: str, digests: Mapping[str, str], detail: str = "") -> Iterator[None]:
    """Note that the block begins, and when it has ended well, that it is done."""
    append(version, BEGIN + action, digests, detail)
    yield
    append(version, action, digests, detail)


def append(version: ModelVersion, action: str, digests: Mapping[str, str], detail: str = "") -> Entry | None:
    """Add an entry about a version; None for a model that is not registered.

    A log that cannot be written is a warning and no failure: whoever may not write there may attach all the same. A
    clock behind the newest entry is an error.
    """
    if not version.name:
        return None
    try:
        before = entries(version.name)
        _check_clock(before, version)
        with mlflow_errors(f"history of {version.name}"):
            return _append(version, action, dict(digests), detail, before)
    except ClockError:
        raise
    except AuditError as error:
        log.warning("%s of %s is not in the model's history: %s", action, version.label, error)
        return None


def _check_clock(history: Sequence[Entry], version: ModelVersion) -> None:
    """Raise where the clock here is behind the newest entry: what is noted now would stand before what was done."""
    now = datetime.fromisoformat(_now())
    for entry in history:
        try:
            is_later = not entry.problem and datetime.fromisoformat(entry.time) > now + SLACK
        except (ValueError, TypeError):
            continue
        if is_later:
            raise ClockError(
                f"{version.label}: by the clock here it is {now:%Y-%m-%d %H:%M}, but entry {entry.number} of its "
                f"history is from {entry.time[:16].replace('T', ' ')}; set the clock."
            )


def shown(history: Sequence[Entry]) -> list[Entry]:
    """Return the history without the beginnings of what was done: a beginning that is left was never finished."""

    def deed(entry: Entry) -> tuple[Any, ...]:
        return entry.action.removeprefix(BEGIN), entry.version, tuple(sorted(entry.digests.items())), entry.detail

    left: list[Entry] = []
    done: Counter[tuple[Any, ...]] = Counter()
    for entry in sorted(history, key=lambda entry: -entry.number):
        if not entry.action.startswith(BEGIN):
            done[deed(entry)] += 1
        elif done[deed(entry)] and not entry.problem:
            done[deed(entry)] -= 1
            continue
        left.append(entry)
    return left[::-1]


def entries(name: str) -> list[Entry]:
    """Return the history of a registered model, oldest first, as it is stored."""
    from mlflow import MlflowClient

    with mlflow_errors(f"history of {name}"):
        return from_tags(MlflowClient().get_registered_model(name).tags)


def from_tags(tags: Mapping[str, str]) -> list[Entry]:
    """Return the entries among the tags of a registered model, by number; one that cannot be read has a problem."""
    lines = [(KEY.fullmatch(key), value) for key, value in tags.items() if key.startswith(PREFIX)]
    decoded = [_decode(int(match[1]), match[2], value) if match else _odd(value) for match, value in lines]
    return sorted(decoded, key=lambda entry: (entry.number, entry.digest))


def verify(
    history: Sequence[Entry],
    *,
    heads: Mapping[str, str] | None = None,
    trusted: TrustedKeys | None = None,
    head: str = "",
    now: datetime | None = None,
) -> list[Entry]:
    """Return the history with the problem of each entry; what is missing is a problem of the entry after it.

    ``heads`` are the tags ``auditor.log`` of the versions by number; ``head`` is a digest that must be in the history.
    """
    now = now or datetime.now(timezone.utc)
    checked: list[Entry] = []
    by_digest = {entry.digest: entry for entry in history}
    parents = {digest for entry in history for digest in entry.before.split(",") if digest}
    # where an entry is missing, the one before it is alone for that reason
    alone = {entry.digest for entry in _not_followed(history)} if parents <= set(by_digest) else set()
    for entry in history:
        problem = entry.problem or _chain_problem(entry, by_digest, alone, now)
        signer = ""
        if trusted is not None and not problem:
            signer, problem = _signer(entry, trusted, now)
        checked.append(replace(entry, problem=problem, signer=signer))
    last = max((entry.number for entry in history), default=0)
    ends = {f"version {number}": value for number, value in (heads or {}).items()} | ({"--head": head} if head else {})
    for where, wanted in ends.items():
        if not wanted or not any(digest.startswith(wanted) for digest in by_digest):
            reason = (
                f"the entry {wanted[:16] or 'that it names'} that {where} points to is missing: the log was cut back"
            )
            checked.append(Entry(last + 1, "", "missing", where, {}, digest=wanted, problem=reason))
    return checked


def heads_of(name: str) -> dict[str, str]:
    """Return the digest of the newest entry that each version names."""
    from mlflow import MlflowClient

    quote = "'" if "'" not in name else '"'
    with mlflow_errors(f"history of {name}"):
        versions = MlflowClient().search_model_versions(f"name = {quote}{name}{quote}", max_results=1000)
    return {str(v.version): str(v.tags[HEAD]) for v in versions if HEAD in v.tags}


def _append(
    version: ModelVersion, action: str, digests: dict[str, str], detail: str, history: Sequence[Entry]
) -> Entry:
    from mlflow import MlflowClient

    client = MlflowClient()
    last = _not_followed(history)
    number = 1 + max((entry.number for entry in history), default=0)
    before = ",".join(sorted(entry.digest for entry in last))
    entry = _signed(Entry(number, _now(), action, version.version, digests, detail, before), version.name)
    client.set_registered_model_tag(version.name, f"{PREFIX}{number:06d}.{entry.digest[:16]}", entry.encode())
    set_tag(version, HEAD, entry.digest)
    return entry


def _not_followed(history: Sequence[Entry]) -> list[Entry]:
    """Return the entries that no other names as the one before it: the newest, or several of writers at once."""
    followed = {digest for entry in history for digest in entry.before.split(",")}
    return [entry for entry in history if entry.digest not in followed]


def _signed(entry: Entry, name: str) -> Entry:
    digest = digest_of(entry)
    key = current_signer()
    if key is None:
        return replace(entry, digest=digest)
    subjects = {"entry": digest, **entry.digests}
    predicate = {"name": entry.action, "time": entry.time, "model": name, "entry": entry.plain()}
    envelope = sign(make_statement(subjects, PREDICATE, predicate), key)
    return replace(entry, digest=digest, envelope=base64.b64encode(envelope).decode())


def digest_of(entry: Entry) -> str:
    """Return the sha256 of an entry without its signature."""
    return sha256(json.dumps(entry.plain(), sort_keys=True, separators=(",", ":")).encode())


def _decode(number: int, digest: str, value: str) -> Entry:
    try:
        plain = json.loads(value)
        digests = {str(k): str(v) for k, v in plain["digests"].items()}
        texts = {k: str(plain[k]) for k in ("time", "action", "version", "detail", "before", "envelope")}
        entry = Entry(int(plain["number"]), digests=digests, **texts)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Entry(number, "", "unreadable", "", {}, digest=digest, problem=f"entry {number} is not what was written")
    computed = digest_of(entry)
    wrong = entry.number != number or computed[:16] != digest
    return replace(entry, number=number, digest=computed, problem=f"entry {number} was rewritten" if wrong else "")


def _odd(value: str) -> Entry:
    return Entry(0, "", "unreadable", "", {}, digest=sha256(value.encode()), problem="a tag of the log has an odd name")


def _chain_problem(entry: Entry, by_digest: Mapping[str, Entry], alone: Collection[str], now: datetime) -> str:
    """Return what is wrong with where an entry stands, or nothing."""
    parents = [by_digest.get(digest) for digest in entry.before.split(",") if digest]
    numbers = {other.number for other in by_digest.values()}
    if None in parents or (not parents and entry.number != 1):
        word = "replaced" if entry.number - 1 in numbers else "removed"
        return f"entry {entry.number - 1} before it was {word}"
    if any(parent.number >= entry.number for parent in parents if parent is not None):
        return f"entry {entry.number} was rewritten"
    if entry.digest in alone and entry.number < max(numbers) - AT_ONCE:
        return "no later entry follows it: it was put in afterwards"
    return _time_problem(entry, [parent.time for parent in parents if parent is not None], now)


def _time_problem(entry: Entry, before: Sequence[str], now: datetime) -> str:
    try:
        moment = datetime.fromisoformat(entry.time)
        if moment > now + SLACK:
            return f"it is from {entry.time}, after now by the clock here"
        if any(moment + SLACK < datetime.fromisoformat(time) for time in before):
            return f"it is from {entry.time}, before the entry before it: a clock was in the past"
    except (ValueError, TypeError):
        return "it does not say when it was written"
    return ""


def _signer(entry: Entry, trusted: TrustedKeys, now: datetime) -> tuple[str, str]:
    """Return who signed an entry and what is wrong with it; an entry without a signature is nobody's."""
    if not entry.envelope:
        return "", ""
    where = f"entry {entry.number}"
    try:
        signed = open_envelope(base64.b64decode(entry.envelope, validate=True), trusted, where, now)
        same = signed.subjects.get("entry") == entry.digest and signed.predicate.get("entry") == entry.plain()
    except (SignatureError, ValueError) as error:
        return "", str(error)
    return (signed.key.name, "") if same else ("", f"{where}: the signature of {signed.key.name} is of another entry")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
