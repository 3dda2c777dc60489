"""Verified files: files beside a model, used only when their digests are those in the version's tags.

This is the part of ``auditor verify`` that needs neither torch nor the model: every byte of an explainer or an audit is
hashed, nothing is unpacked. Whether the weights themselves are still those the explainer was fitted to is left to
``auditor verify``, which loads them; a server should not.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from auditor.errors import AuditError, SignatureError, TamperError
from auditor.explainers.manifest import MANIFEST, check_content, check_file, open_manifest
from auditor.metrics.measure import Measure
from auditor.plugins.audits_site.audit_comparison import measures
from auditor.plugins.audits_site.rest_store import Refused, ServerStore
from auditor.plugins.audits_site.version_card import FailedCheck, VersionCard
from auditor.plugins.registry.attachments import check_kind
from auditor.plugins.registry.attestations import signature_path
from auditor.plugins.registry.tags import PICTURE, ExplainerTag
from auditor.plugins.registry.verdicts import FILE as VERDICT
from auditor.plugins.registry.verdicts import open_verdict
from auditor.signing.keys import TrustedKeys
from auditor.signing.statements import open_envelope

LIFETIME_S = 60.0
MOST_ANSWERS = 512
MOST_FINDINGS = 50


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


class AnswerCache:
    """Answers of the last minute, so that reloading a page does not hash everything again. Refusals are not cached."""

    def __init__(self, lifetime_s: float = LIFETIME_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._lifetime_s, self._clock = lifetime_s, clock
        self._answers: dict[tuple[str, ...], tuple[float, Any]] = {}
        self._lock = threading.Lock()

    def get(self, key: tuple[str, ...], ask: Callable[[], Any]) -> Any:
        """Return the cached answer of a key, or ask."""
        with self._lock:
            cached = self._answers.get(key)
        if cached is not None and self._clock() - cached[0] < self._lifetime_s:
            return cached[1]
        answer = ask()
        with self._lock:
            if len(self._answers) >= MOST_ANSWERS:
                self._answers.clear()
            self._answers[key] = (self._clock(), answer)
        return answer


def check_explainer(store: ServerStore, card: VersionCard, tag: ExplainerTag) -> Checked:
    """Hash every file of an attached explainer and compare with its manifest, and the manifest with the tag."""
    entry = (tag.name, tag.kind, tag.digest, tag.time)
    try:
        where = tag.usable().location.rpartition("/")[2]
        manifest = open_manifest(store.read(card.name, card.version, f"{tag.location}/{MANIFEST}"), where, tag.digest)
        for name in sorted(manifest["files"]):
            check_file(manifest, name, *store.sha256(card.name, card.version, f"{tag.location}/{name}"), where)
        check_kind(tag, manifest.get("kind"))
    except Refused:
        raise
    except AuditError as error:
        return Checked(*entry, str(error))
    metrics = manifest.get("metrics")
    return Checked(
        *entry,
        layer=str(manifest.get("layer") or ""),
        subject_digest=str(manifest.get("subject_digest") or ""),
        metrics={
            str(k): math.nan if v is None else float(v)
            for k, v in (metrics.items() if isinstance(metrics, dict) else ())
            if v is None or isinstance(v, (int, float))
        },
    )


@dataclass(frozen=True, slots=True)
class AuditRead:
    """A stored audit: its metrics and what its classes hang on, or why they cannot be shown."""

    measures: dict[str, Measure] = field(default_factory=dict)
    problem: str = ""
    relied: tuple[tuple[str, str], ...] = ()  # verdict and sentence of every class to look at
    not_measured: str = ""  # why it is not known what the classes hang on

    @property
    def of_people(self) -> dict[str, Measure]:
        """Return the metrics of studies with people.

        >>> list(AuditRead({"model/accuracy": Measure(0.9), "study/gulls/gain/xnn": Measure(0.1)}).of_people)
        ['study/gulls/gain/xnn']
        """
        return {name: measure for name, measure in self.measures.items() if name.startswith("study/")}


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
    return of_document(document) if isinstance(document, dict) else AuditRead()


def of_document(document: Mapping[str, Any]) -> AuditRead:
    """Return what the page shows of an audit's JSON; entries of another shape are left out.

    >>> of_document({}).not_measured
    'it is of a release that could not'
    """
    about = document.get("reliance")
    if not isinstance(about, dict):
        return AuditRead(measures(document), not_measured="it is of a release that could not")
    if about.get("status") != "measured":
        return AuditRead(measures(document), not_measured=str(about.get("reason") or "no reason is given")[:400])
    entries = about.get("findings")
    relied = [
        (str(f["verdict"]), str(f.get("sentence", ""))[:1000])
        for f in (entries if isinstance(entries, list) else ())
        if isinstance(f, dict) and f.get("verdict") in ("found", "look")
    ]
    return AuditRead(measures(document), relied=tuple(relied[:MOST_FINDINGS]))


def check_verdict(store: ServerStore, card: VersionCard, trusted: TrustedKeys | None = None) -> VersionCard:
    """Return the card with what its verdict is worth: the file it names is read, and its signature where keys are.

    A tag is written by hand in a second, so a verdict without a file that speaks of this version is none.
    """
    if card.gate is None or card.gate.problem:
        return card
    if not card.gate.digest:
        return replace(card, unverified="the tag names no verdict file, so anybody could have written it")
    try:
        content = store.read(card.name, card.version, f"{card.gate.location}/{VERDICT}")
        document = open_verdict(content, card.gate, card.uri)
        signer = _signer(store, card, trusted) if trusted is not None else ""
    except Refused:
        raise
    except AuditError as error:
        return replace(card, unverified=str(error))
    return replace(card, signer=signer, failed=failed_checks(document))


def failed_checks(document: Mapping[str, Any]) -> tuple[FailedCheck, ...]:
    """Return the limits that did not hold; entries of another shape are left out.

    >>> failed_checks({"checks": [{"metric": "m", "verdict": "fail", "value": None, "limit": "at least 1"}]})[0].limit
    'at least 1'
    """
    entries = document.get("checks")
    return tuple(
        FailedCheck(
            str(c.get("metric", ""))[:200],
            _float(c.get("value")),
            str(c.get("limit", ""))[:200],
            str(c.get("reason", ""))[:1000],
            None if c.get("baseline") is None else _float(c["baseline"]),
        )
        for c in (entries if isinstance(entries, list) else ())
        if isinstance(c, dict) and c.get("verdict") == "fail"
    )[:MOST_FINDINGS]


def _float(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def _signer(store: ServerStore, card: VersionCard, trusted: TrustedKeys) -> str:
    """Return who signed the verdict; where the server trusts keys, a verdict that none of them signed is an error."""
    assert card.gate is not None
    digest, where = card.gate.digest, f"the verdict of {card.uri}"
    paths = [signature_path(digest, key.keyid) for key in trusted.keys]
    if card.gate.signature not in ("", *paths):  # by a certificate: the tag says where, the certificate by whom
        paths.append(card.gate.signature)
    problem = ""
    for path in paths:
        try:
            content = store.read(card.name, card.version, path)
        except TamperError:
            continue  # this key has signed nothing here
        try:
            signed = open_envelope(content, trusted, where)
        except SignatureError as error:
            problem = problem or str(error)
            continue
        passed = signed.predicate.get("verificationResult") == "PASSED"
        if signed.subjects.get(VERDICT) == digest and passed == (card.gate.verdict == "pass"):
            return signed.key.name
    if problem:
        raise SignatureError(problem)
    raise SignatureError(f"{where} is signed by no key that this server trusts.")


def read_picture(store: ServerStore, card: VersionCard) -> bytes:
    """Return the picture of what the classes hang on, which must have the digest that the audit's tag names."""
    if card.audit is None or not card.picture:
        raise Refused(404, f"the audit of {card.uri} has no picture of what its classes hang on.")
    return _pinned(store, card, PICTURE, card.audit.usable().files[PICTURE])


def read_report(store: ServerStore, card: VersionCard) -> bytes:
    """Return the report of a version's latest audit, which must have the digest that the audit's tag names."""
    if card.audit is None:
        raise Refused(404, f"{card.uri} has not been audited, so there is no report.")
    digest = card.audit.usable().files.get("report.html")
    if digest is None:
        raise TamperError(f"{card.uri}: the registry holds no digest of its report; run the audit again.")
    return _pinned(store, card, "report.html", digest)


def _pinned(store: ServerStore, card: VersionCard, name: str, digest: str) -> bytes:
    assert card.audit is not None
    content = store.read(card.name, card.version, f"{card.audit.location}/{name}")
    return check_content(content, digest, f"{name} of {card.uri}", "run the audit again")
