"""Version card: what the tags of a model version tell, without opening a single artifact.

Tags are written by whoever may write to the registry, so nothing in them is trusted: a value of the wrong shape becomes
a problem on the card, never an error of the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EXPLAINER_TAG = "auditor.explainers.base."
AUDIT_TAG = "auditor.auditing.audit"
GATE_TAG = "auditor.release.gate"
DIGEST = re.compile(r"^[0-9a-f]{64}$")


@dataclass(frozen=True, slots=True)
class ExplainerEntry:
    """An attached explainer as its tag tells it; ``problem`` says why the tag cannot be used."""

    name: str
    kind: str = ""
    digest: str = ""
    location: str = ""
    time: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """The latest audit as its tag tells it."""

    digest: str = ""
    location: str = ""
    time: str = ""
    data: str = ""
    data_digest: str = ""
    seed: str = ""
    n_metrics: int = 0
    explainers: dict[str, str] = field(default_factory=dict)  # name: digest; none for one that did not verify
    files: dict[str, str] = field(default_factory=dict)  # name: sha256, of what is stored beside audit.json
    problem: str = ""


@dataclass(frozen=True, slots=True)
class GateEntry:
    """The latest gate verdict: ``pass``, ``fail``, or ``unknown`` with a problem."""

    verdict: str = "unknown"
    time: str = ""
    policy: str = ""
    baseline: str = ""
    n_checks: int = 0
    failed: tuple[str, ...] = ()
    audit_digest: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class VersionCard:
    """A version with what is attached to it."""

    name: str
    version: str
    created_ms: int
    description: str
    run_id: str
    aliases: tuple[str, ...]
    explainers: tuple[ExplainerEntry, ...]
    audit: AuditEntry | None
    gate: GateEntry | None

    @property
    def uri(self) -> str:
        """Return how commands name it."""
        return f"models:/{self.name}/{self.version}"

    @property
    def outdated(self) -> list[str]:
        """Return why the audit and the verdict may no longer describe this version, one sentence each."""
        found = []
        if self.audit is not None and not self.audit.problem:
            now = {e.name: e.digest for e in self.explainers}
            added, gone = sorted(set(now) - set(self.audit.explainers)), sorted(set(self.audit.explainers) - set(now))
            changed = sorted(n for n, d in self.audit.explainers.items() if d and n in now and now[n] != d)
            for names, what in ((added, "attached"), (changed, "replaced"), (gone, "detached")):
                if names:
                    found.append(f"{', '.join(names)} {'was' if len(names) == 1 else 'were'} {what} after the audit.")
        if self.gate is not None and not self.gate.problem:
            if self.audit is None:
                found.append("The gate's verdict refers to an audit that is no longer here.")
            elif self.gate.audit_digest != self.audit.digest:
                found.append("The gate's verdict is about an earlier audit.")
        return found


def version_card(entry: Mapping[str, Any]) -> VersionCard:
    """Return the card of a version as MLflow's REST interface gives it.

    >>> card = version_card({"name": "m", "version": "1", "tags": [{"key": "auditor.release.gate", "value": "[]"}]})
    >>> card.gate.verdict, card.gate.problem
    ('unknown', 'the tag auditor.release.gate is not what a gate writes.')
    """
    tags = {str(t.get("key")): str(t.get("value", "")) for t in entry.get("tags", [])}
    explainers = [
        _explainer(key.removeprefix(EXPLAINER_TAG), value)
        for key, value in sorted(tags.items())
        if key.startswith(EXPLAINER_TAG)
    ]
    return VersionCard(
        name=str(entry["name"]),
        version=str(entry["version"]),
        created_ms=int(entry.get("creation_timestamp", 0)),
        description=str(entry.get("description", "")),
        run_id=str(entry.get("run_id", "")),
        aliases=tuple(sorted(str(a) for a in entry.get("aliases", []))),
        explainers=tuple(explainers),
        audit=_audit(tags[AUDIT_TAG]) if AUDIT_TAG in tags else None,
        gate=_gate(tags[GATE_TAG]) if GATE_TAG in tags else None,
    )


def _explainer(name: str, value: str) -> ExplainerEntry:
    told = _object(value)
    kept = {k: _text(told.get(k)) for k in ("kind", "digest", "location", "time")}
    if not DIGEST.match(kept["digest"]) or not kept["location"]:
        return ExplainerEntry(name, problem=f"the tag {EXPLAINER_TAG}{name} is not what was attached.")
    return ExplainerEntry(name, **kept)


def _audit(value: str) -> AuditEntry:
    told = _object(value)
    kept = {k: _text(told.get(k)) for k in ("digest", "location", "time", "data", "data_digest", "seed")}
    if not DIGEST.match(kept["digest"]) or not kept["location"]:
        return AuditEntry(problem=f"the tag {AUDIT_TAG} is not what an audit writes.")
    return AuditEntry(
        **kept,
        n_metrics=_count(told.get("n_metrics")),
        explainers=_texts(told.get("explainers")),
        files=_texts(told.get("files")),
    )


def _gate(value: str) -> GateEntry:
    told = _object(value)
    if told.get("verdict") not in ("pass", "fail"):
        return GateEntry(problem=f"the tag {GATE_TAG} is not what a gate writes.")
    kept = {k: _text(told.get(k)) for k in ("verdict", "time", "policy", "baseline", "audit_digest")}
    failed = told.get("failed")
    names = tuple(_text(n) for n in failed) if isinstance(failed, list) else ()
    return GateEntry(**kept, n_checks=_count(told.get("checks")), failed=names)


def _object(value: str) -> dict[str, Any]:
    try:
        told = json.loads(value)
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def _text(value: Any) -> str:
    return str(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else ""


def _texts(value: Any) -> dict[str, str]:
    return {str(k): _text(v) for k, v in value.items()} if isinstance(value, dict) else {}


def _count(value: Any) -> int:
    if isinstance(value, list):
        return len(value)
    return value if isinstance(value, int) and value > 0 else 0
