"""Audits and gates of registered versions.

An audit's files go to ``audits/<digest12>/`` beside the model; then the tag ``auditor.auditing.audit`` on the version, the
commit point, says where. A gate's verdict is the tag ``auditor.release.gate``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.errors import AuditError, ModelError, OptionError, TamperError
from auditor.plugins.registry.metrics_log import log_metrics
from auditor.plugins.registry.subjects import load_subject
from auditor.plugins.registry.location import Place, mlflow_errors, resolve, set_tag
from auditor.plugins.registry.attachments import load, names

if TYPE_CHECKING:
    from auditor.auditing.audit import Audit, AuditConfig
    from auditor.data.source import Data
    from auditor.explainers.base import Explainer, Progress
    from auditor.release.gate import Gate
    from auditor.metrics.measure import Measure
    from auditor.release.policy import Policy
    from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

AUDIT_TAG, GATE_TAG = "auditor.auditing.audit", "auditor.release.gate"


def run_audit(
    uri: str,
    data: str | Data,
    *,
    config: AuditConfig | None = None,
    card: dict[str, str] | None = None,
    store: bool = True,
    fresh: bool = False,
    allow_pickle: bool | None = None,
    progress: Progress | None = None,
    command: str = "",
    subject: Subject | None = None,
) -> Audit:
    """Audit a model and everything attached to it, log the metrics, and store the audit with the version.

    An explainer that does not verify is part of the audit, as failed. A model that is not registered is audited too,
    but there is nowhere to store the result. ``fresh`` forgets what an interrupted audit has finished.
    """
    from auditor.auditing.audit import audit
    from auditor.auditing.cache import default_folder
    from auditor.data.source import open_data
    from auditor.explainers.base import silent
    from auditor.release.model_card import fill

    place = resolve(uri)
    source = open_data(data)
    own = subject if subject is not None else load_subject(uri, allow_pickle=allow_pickle)
    explainers, broken = attached_explainers(uri, place, own)
    found = audit(
        own,
        source,
        explainers,
        config,
        broken=broken,
        cache=None if fresh else default_folder(),
        progress=progress or silent,
        command=command,
    )
    known = _card_of(place)
    found = replace(found, model=found.model | {"uri": uri}, card=fill(known | (card or {})))
    if store and place.name:
        store_audit(found, place)
    return found


def attached_explainers(uri: str, place: Place, subject: Subject) -> tuple[dict[str, Explainer], dict[str, str]]:
    """Return the explainers that verify, and what is wrong with the others."""
    explainers: dict[str, Explainer] = {}
    broken: dict[str, str] = {}
    for name in names(uri) if place.name else []:
        try:
            explainers[name] = load(uri, name, subject=subject)
        except AuditError as error:
            broken[name] = " ".join(str(error).split())
    return explainers, broken


def store_audit(found: Audit, place: Place) -> str:
    """Store an audit, its page and its model card beside the model; returns the location. The tag is set last."""
    from auditor.explainers.artifact import finite
    from auditor.release.model_card import card_json
    from auditor.reports.audit_report import report_html

    sealed, digest = found.sealed(), found.digest
    location = f"audits/{digest[:12]}"
    with mlflow_errors(f"store the audit of {place.label}"), tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        (Path(folder) / "audit.json").write_bytes(sealed)
        (Path(folder) / "report.html").write_text(report_html(found), encoding="utf-8")
        card = json.dumps(finite(card_json(found)), indent=1, sort_keys=True)
        (Path(folder) / "model_card.json").write_text(card + "\n", encoding="utf-8")
        place.repository().log_artifacts(folder, location)
        if _stored(place, location) != sealed:
            raise TamperError(f"audit of {place.label}: the artifact store did not keep what was sent; try again.")
        value = {
            "location": location,
            "digest": digest,
            "time": found.time,
            "data": found.data["spec"],
            "data_digest": found.data["digest"],
            "seed": found.seed,
            "n_metrics": len(found.metrics),
            "explainers": {name: info.get("digest") for name, info in found.explainers.items()},
            "files": {  # what the server's page shows has no checksum of its own
                path.name: hashlib.sha256(path.read_bytes()).hexdigest()
                for path in sorted(Path(folder).iterdir())
                if path.name != "audit.json"
            },
        }
        set_tag(place, AUDIT_TAG, json.dumps(value, sort_keys=True))
    log_metrics(
        place,
        {name: m.value for name, m in found.metrics.items() if m.status == "passed"},
        run_name=f"audit {place.name}/{place.version}",
        data_digest=found.data["digest"],
    )
    return location


def latest_audit(uri: str) -> Audit | None:
    """Return the stored audit of a version, verified byte by byte; None when there is none."""
    from auditor.auditing.audit import Audit

    place = resolve(uri, registered=True)
    tag = place.tags.get(AUDIT_TAG)
    if tag is None:
        return None
    try:
        entry = json.loads(tag)
        location, digest = str(entry["location"]), str(entry["digest"])
    except (ValueError, KeyError, TypeError):
        raise TamperError(f"the tag {AUDIT_TAG} of {place.label} is not what was set; run the audit again.") from None
    with mlflow_errors(f"audit of {place.label}"):
        content = _stored(place, location)
    if content is None:
        raise TamperError(f"{location}/audit.json of {place.label} is missing; run the audit again.")
    if hashlib.sha256(content).hexdigest() != digest:
        raise TamperError(
            f"{location}/audit.json of {place.label} is not what was stored (its sha256 does not match); run the audit "
            "again."
        )
    return Audit.from_json(content, f"the audit of {place.label}")


def stale_reason(found: Audit, subject: Subject, attached: dict[str, str | None], data: Data | None) -> str:
    """Return why an audit does not speak of what is there now; empty when it does."""
    if found.model["digest"] != subject.digest:
        return f"it is of a model with digest {found.model['digest'][:12]}, this one has {subject.digest[:12]}"
    if list(subject.class_names) != found.model["classes"]:
        return "the class names have changed since"
    then = {name: info.get("digest") for name, info in found.explainers.items()}
    if then != attached:
        changed = sorted(n for n in {*then, *attached} if then.get(n, "") != attached.get(n, ""))
        return f"what is attached has changed since ({', '.join(changed)})"
    if data is not None and found.data["digest"] != data.digest:
        return f"it was made on other data ({found.data['spec']})"
    return ""


def run_gate(
    uri: str,
    policy: Policy | str | Path,
    *,
    baseline: str | None = None,
    data: str | Data | None = None,
    audit: Audit | None = None,
    config: AuditConfig | None = None,
    fresh: bool = False,
    promote: str | None = None,
    store: bool = True,
    allow_pickle: bool | None = None,
    progress: Progress | None = None,
    command: str = "",
) -> Gate:
    """Hold a version against a policy, on a stored audit when it speaks of what is there now, else on a new one.

    ``promote`` moves the alias to the version, only when the gate passes.
    """
    from auditor.release.gate import judge
    from auditor.release.policy import Policy, read_policy

    rules = policy if isinstance(policy, Policy) else read_policy(policy)
    place = resolve(uri, registered=True)
    subject = load_subject(uri, allow_pickle=allow_pickle)
    source = _source(data)
    options: dict[str, Any] = {"config": config, "allow_pickle": allow_pickle, "progress": progress, "command": command}
    mine = _fitting(uri, place, subject, audit, source, fresh=fresh, store=store, **options)
    other = None
    drift = None
    if rules.needs_baseline and baseline is None:
        judge(mine, rules)  # says which limit needs one
    if baseline is not None:
        base_subject = load_subject(baseline, allow_pickle=allow_pickle)
        _same_task(subject, base_subject, place.label, baseline)
        same = source if source is not None else _again(mine)
        other = _fitting(
            baseline, resolve(baseline, registered=True), base_subject, None, same, fresh=fresh, store=False, **options
        )
        if rules.needs_drift:
            drift = _drift(base_subject, subject, same, progress)
    gate = judge(mine, rules, other, drift)
    gate = replace(gate, model=place.label, baseline=baseline or "")
    if store:
        _store_verdict(gate, place)
    if promote is not None and gate.verdict == "pass":
        from mlflow import MlflowClient

        with mlflow_errors(f"alias {promote} of {place.name}"):
            MlflowClient().set_registered_model_alias(place.name, promote, place.version)
        gate = replace(gate, promoted=promote)
    return gate


def _source(data: str | Data | None) -> Data | None:
    from auditor.data.source import open_data

    return None if data is None else open_data(data)


def _again(found: Audit) -> Data:
    """Open the data of an audit again, and make sure that it is the same."""
    from auditor.data.source import open_data

    try:
        source = open_data(found.data["spec"])
        same = source.digest == found.data["digest"]
    except (AuditError, OSError):
        same = False
    if not same:
        raise OptionError(
            f"gate: the data of the audit ({found.data['spec']}) is not there as it was; give --data DATA."
        )
    return source


def _fitting(
    uri: str,
    place: Place,
    subject: Subject,
    given: Audit | None,
    data: Data | None,
    *,
    fresh: bool,
    store: bool,
    **options: Any,
) -> Audit:
    """Return an audit that speaks of what is there now: the one given, the stored one, or a new one."""
    explainers, broken = attached_explainers(uri, place, subject)
    attached: dict[str, str | None] = {name: e.digest_ for name, e in explainers.items()} | dict.fromkeys(broken)
    if given is not None:
        reason = stale_reason(given, subject, attached, data)
        if reason:
            raise TamperError(f"gate: the audit given is stale: {reason}; audit {place.label} again.")
        return given
    stored = None if fresh else latest_audit(uri)
    reason = "there is none" if stored is None else stale_reason(stored, subject, attached, data)
    if stored is not None and not reason:
        return stored
    if data is None and stored is not None:
        data = _again(stored)
    if data is None:
        raise OptionError(f"gate: {place.label} has no stored audit; give --data DATA, or run auditor audit first.")
    log.info("auditing %s: of the stored audit, %s", place.label, reason)
    return run_audit(uri, data, store=store, fresh=fresh, subject=subject, **options)


def _same_task(a: Subject, b: Subject, mine: str, baseline: str) -> None:
    from auditor.release.drift import check_comparable

    try:
        check_comparable(b, a)
    except AuditError as error:
        reason = str(error).removeprefix("compare: ")
        raise OptionError(f"gate: the baseline {baseline} is of another task than {mine}: {reason}") from None


def _drift(a: Subject, b: Subject, data: Data, progress: Progress | None) -> dict[str, Measure]:
    from auditor.release.drift import compare
    from auditor.explainers.base import silent
    from auditor.metrics.measure import of_value
    from auditor.metrics.names import DRIFT_DIRECTION

    found = compare(a, b, data, progress=progress or silent)
    ways: Any = {f"drift/{name}": way for name, way in DRIFT_DIRECTION.items()}
    return {
        name: of_value(value, ways.get(name, "up"), n=found.n_images, null=found.null_low if "simil" in name else None)
        for name, value in found.metrics().items()
    }


def _store_verdict(gate: Gate, place: Place) -> None:
    value = {
        "verdict": gate.verdict,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "policy": gate.policy,
        "policy_digest": gate.policy_digest,
        "baseline": gate.baseline,
        "checks": len(gate.checks),
        "failed": gate.failed[:50],
        "audit_digest": gate.audit_digest,
    }
    with mlflow_errors(f"gate verdict of {place.label}"):
        set_tag(place, GATE_TAG, json.dumps(value, sort_keys=True))


def _stored(place: Place, location: str) -> bytes | None:
    repository = place.repository()
    path = f"{location}/audit.json"
    if not any(entry.path == path for entry in repository.list_artifacts(location) or []):
        return None
    with tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        return Path(repository.download_artifacts(path, folder)).read_bytes()


def _card_of(place: Place) -> dict[str, str]:
    """Return card fields that the registry knows: the descriptions, and tags ``card.<field>`` of the version."""
    from auditor.release.model_card import FIELDS

    fields = {k: place.tags[f"card.{k}"] for k in FIELDS if place.tags.get(f"card.{k}")}
    if not place.name:
        return fields
    fields.setdefault("name", place.name)
    from mlflow import MlflowClient

    try:
        with mlflow_errors(f"model {place.label}"):
            client = MlflowClient()
            text = client.get_model_version(place.name, place.version).description
            text = text or client.get_registered_model(place.name).description
    except ModelError:
        return fields
    if text:
        fields.setdefault("description", str(text))
    return fields
