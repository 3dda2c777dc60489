"""Stored: files beside a model, read only after their digests were found to be those the version's tags name.

This is the part of ``auditor verify`` that needs neither torch nor the model: every byte of an explainer or an audit is
hashed, nothing is unpacked. Whether the weights themselves are still those the explainer was fitted to is left to
``auditor verify``, which loads them; a server should not.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from auditor.errors import AuditError, TamperError
from auditor.plugins.audits_site.audit_comparison import Figure, figures
from auditor.plugins.audits_site.rest_store import Refused, ServerStore
from auditor.plugins.audits_site.version_card import ExplainerEntry, VersionCard

MANIFEST = "manifest.json"
KEPT_S = 60.0
MOST_KEPT = 512


@dataclass(frozen=True, slots=True)
class Checked:
    """An explainer whose files were hashed; ``problem`` is empty when all of them are what was attached."""

    name: str
    kind: str
    digest: str
    time: str
    problem: str = ""
    layer: str = ""
    subject_digest: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


class Memory:
    """Answers kept for a minute, so that reloading a page does not hash everything again. Refusals are not kept."""

    def __init__(self, kept_s: float = KEPT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._kept_s, self._clock = kept_s, clock
        self._answers: dict[tuple[str, ...], tuple[float, Any]] = {}
        self._lock = threading.Lock()

    def get(self, key: tuple[str, ...], ask: Callable[[], Any]) -> Any:
        """Return the answer kept under a key, or ask."""
        with self._lock:
            known = self._answers.get(key)
        if known is not None and self._clock() - known[0] < self._kept_s:
            return known[1]
        answer = ask()
        with self._lock:
            if len(self._answers) >= MOST_KEPT:
                self._answers.clear()
            self._answers[key] = (self._clock(), answer)
        return answer


def check_explainer(store: ServerStore, card: VersionCard, entry: ExplainerEntry) -> Checked:
    """Hash every file of an attached explainer and compare with its manifest, and the manifest with the tag."""
    if entry.problem:
        return Checked(entry.name, entry.kind, entry.digest, entry.time, entry.problem)
    try:
        manifest = read_manifest(store, card, entry.location, entry.digest)
        for name, listed in sorted(manifest["files"].items()):
            found, size = store.sha256(card.name, card.version, f"{entry.location}/{name}")
            if found != listed["sha256"] or size != listed["size"]:
                raise TamperError(f"{name} is not what was attached: its sha256 does not match the manifest.")
        if manifest.get("kind") != entry.kind:
            raise TamperError(f"the tag says kind {entry.kind}, the artifact {manifest.get('kind')}.")
    except Refused:
        raise
    except AuditError as error:
        return Checked(entry.name, entry.kind, entry.digest, entry.time, str(error))
    except (KeyError, TypeError, AttributeError):
        return Checked(entry.name, entry.kind, entry.digest, entry.time, f"its {MANIFEST} lists no files.")
    metrics = manifest.get("metrics")
    return Checked(
        entry.name,
        entry.kind,
        entry.digest,
        entry.time,
        layer=str(manifest.get("layer") or ""),
        subject_digest=str(manifest.get("subject_digest") or ""),
        metrics={
            str(k): math.nan if v is None else float(v)
            for k, v in (metrics.items() if isinstance(metrics, dict) else ())
            if v is None or isinstance(v, (int, float))
        },
    )


def read_manifest(store: ServerStore, card: VersionCard, location: str, digest: str) -> dict[str, Any]:
    """Return the manifest at a location, which must have the digest that the tag names."""
    content = store.read(card.name, card.version, f"{location}/{MANIFEST}")
    if hashlib.sha256(content).hexdigest() != digest:
        raise TamperError(f"{MANIFEST} is not what was attached: its sha256 is not the one in the version's tag.")
    manifest = json.loads(content)  # the digest pins every byte, so it is the JSON that was written
    if not isinstance(manifest, dict):
        raise TamperError(f"{MANIFEST} holds no object.")
    return manifest


@dataclass(frozen=True, slots=True)
class AuditRead:
    """A stored audit: its metrics, or why they cannot be shown."""

    figures: dict[str, Figure] = field(default_factory=dict)
    problem: str = ""


def read_audit(store: ServerStore, card: VersionCard) -> AuditRead:
    """Return the metrics of a version's latest audit after its digest was checked."""
    if card.audit is None or card.audit.problem:
        return AuditRead(problem=card.audit.problem if card.audit else "")
    try:
        document = json.loads(_pinned(store, card, "audit.json", card.audit.digest))
    except Refused:
        raise
    except AuditError as error:
        return AuditRead(problem=str(error))
    return AuditRead(figures(document) if isinstance(document, dict) else {})


def read_report(store: ServerStore, card: VersionCard) -> bytes:
    """Return the report of a version's latest audit, which must have the digest that the audit's tag names."""
    if card.audit is None:
        raise Refused(404, f"{card.uri} has not been audited, so there is no report.")
    if card.audit.problem:
        raise TamperError(card.audit.problem)
    wanted = card.audit.files.get("report.html")
    if wanted is None:
        raise TamperError(f"{card.uri}: the registry holds no digest of its report; run the audit again.")
    return _pinned(store, card, "report.html", wanted)


def _pinned(store: ServerStore, card: VersionCard, name: str, digest: str) -> bytes:
    assert card.audit is not None
    content = store.read(card.name, card.version, f"{card.audit.location}/{name}")
    if hashlib.sha256(content).hexdigest() != digest:
        raise TamperError(
            f"{name} of {card.uri} is not what was stored: its sha256 is not the one in the registry; "
            "run the audit again."
        )
    return content
