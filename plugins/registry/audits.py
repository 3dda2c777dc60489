"""Audits and gates of registered versions.

An audit's files go to ``audits/<digest12>/`` beside the model; then the tag ``auditor.audit`` on the version, the
commit point, says where. A gate's verdict is the tag ``auditor.gate``.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.errors import AuditError, ModelError, OptionError, TamperError
from auditor.plugins.registry import tags
from auditor.plugins.registry.attachments import load, names
from auditor.plugins.registry.honest_versions import honest_subjects, passed_before
from auditor.plugins.registry.location import ModelVersion, mlflow_errors, resolve, set_tag
from auditor.plugins.registry.metrics_log import logged_metrics
from auditor.plugins.registry.staleness import stale_reason
from auditor.plugins.registry.subjects import load_subject
from auditor.plugins.registry.tags import AuditTag, GateTag

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from auditor.auditing.audit import Audit, AuditConfig
    from auditor.data.source import Data
    from auditor.explainers.base import Explainer
    from auditor.metrics.measure import Measure
    from auditor.progress import Progress
    from auditor.release.gate import Gate
    from auditor.release.policy import Policy
    from auditor.subject.subject import Subject

log = logging.getLogger(__name__)


def run_audit(
    uri: str | ModelVersion,
    data: str | Data,
    *,
    config: AuditConfig | None = None,
    card: dict[str, str] | None = None,
    store: bool = True,
    fresh: bool = False,
    allow_pickle: bool | None = None,
    progress: Progress | None = None,
    say: Callable[[str], object] | None = None,
    command: str = "",
    subject: Subject | None = None,
) -> Audit:
    """Audit a model and everything attached to it, log the metrics, and store the audit with the version.

    An explainer that does not verify is part of the audit, as failed. A model that is not registered is audited too,
    but there is nowhere to store the result. ``fresh`` forgets what an interrupted audit has finished. ``say`` gets
    the budget of each check before it starts.
    """
    from auditor.auditing.audit import audit
    from auditor.auditing.cache import default_folder
    from auditor.auditing.parts import unsaid
    from auditor.data.source import open_data
    from auditor.progress import silent
    from auditor.release.model_card import fill

    version = resolve(uri)
    source = open_data(data)
    subject = subject if subject is not None else load_subject(version, allow_pickle=allow_pickle)
    explainers, broken = attached_explainers(version, subject)
    result = audit(
        subject,
        source,
        explainers,
        config,
        broken=broken,
        cache=None if fresh else default_folder(),
        progress=progress or silent,
        say=say or unsaid,
        command=command,
    )
    from_registry = _card_of(version)
    result = replace(result, model=result.model | {"uri": version.uri}, card=fill(from_registry | (card or {})))
    if store and version.name:
        store_audit(result, version)
    return result


def attached_explainers(version: ModelVersion, subject: Subject) -> tuple[dict[str, Explainer], dict[str, str]]:
    """Return the explainers that verify, and what is wrong with the others."""
    explainers: dict[str, Explainer] = {}
    broken: dict[str, str] = {}
    for name in names(version) if version.name else []:
        try:
            explainers[name] = load(version, name, subject=subject)
        except AuditError as error:
            broken[name] = " ".join(str(error).split())
    return explainers, broken


def store_audit(audit: Audit, version: ModelVersion) -> str:
    """Store an audit, its page and its model card beside the model; returns the location. The tag is set last."""
    from auditor.explainers.manifest import finite, sha256
    from auditor.release.model_card import card_json
    from auditor.reports.audit_report import report_html

    sealed, digest = audit.sealed(), audit.digest
    location = f"audits/{digest[:12]}"
    with mlflow_errors(f"store the audit of {version.label}"), tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        (Path(folder) / "audit.json").write_bytes(sealed)
        (Path(folder) / "report.html").write_text(report_html(audit), encoding="utf-8")
        card = json.dumps(finite(card_json(audit)), indent=1, sort_keys=True)
        (Path(folder) / "model_card.json").write_text(card + "\n", encoding="utf-8")
        version.repository().log_artifacts(folder, location)
        if _stored(version, location) != sealed:
            raise TamperError(f"audit of {version.label}: the artifact store did not keep what was sent; try again.")
        tag = AuditTag(
            digest,
            location,
            audit.time,
            data=audit.data["spec"],
            data_digest=audit.data["digest"],
            seed=audit.seed,
            n_metrics=len(audit.metrics),
            explainers={name: info.get("digest") for name, info in audit.explainers.items()},
            files={  # what the server's page shows has no checksum of its own
                path.name: sha256(path.read_bytes())
                for path in sorted(Path(folder).iterdir())
                if path.name != "audit.json"
            },
        )
        run_name = f"audit {version.name}/{version.version}"
        metrics = {name: m.value for name, m in audit.metrics.items() if m.status == "passed"}
        with logged_metrics(version, metrics, run_name=run_name, data_digest=audit.data["digest"]):
            set_tag(version, tags.AUDIT, tag.encode())
    return location


def latest_audit(uri: str | ModelVersion) -> Audit | None:
    """Return the stored audit of a version, verified byte by byte; None when there is none."""
    from auditor.auditing.audit import Audit
    from auditor.explainers.manifest import check_content

    version = resolve(uri, registered=True)
    tag = tags.audit_tag(version.tags)
    if tag is None:
        return None
    with mlflow_errors(f"audit of {version.label}"):
        content = _stored(version, tag.usable().location)
    if content is None:
        raise TamperError(f"{tag.location}/audit.json of {version.label} is missing; run the audit again.")
    check_content(content, tag.digest, f"{tag.location}/audit.json of {version.label}", "run the audit again")
    return Audit.from_json(content, f"the audit of {version.label}")


def run_gate(
    uri: str | ModelVersion,
    policy: Policy | str | Path,
    *,
    baseline: str | ModelVersion | None = None,
    honest: Sequence[str] = (),
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
    """Hold a version against a policy, on the stored audit unless it is stale, else on a new one.

    ``promote`` moves the alias to the version, only when the gate passes. URIs are resolved once, at the beginning: the
    version that is promoted is the one that was judged, wherever an alias points by then.
    """
    from auditor.release.gate import judge
    from auditor.release.policy import Policy, read_policy

    rules = policy if isinstance(policy, Policy) else read_policy(policy)
    version = resolve(uri, registered=True)
    base = None if baseline is None else resolve(baseline, registered=True)
    subject = load_subject(version, allow_pickle=allow_pickle)
    source = _source(data)
    options: dict[str, Any] = {"config": config, "allow_pickle": allow_pickle, "progress": progress, "command": command}
    options["with_reliance"] = any(name.startswith("model/reliance/") for name in rules.limits)
    audited = _fitting(version, subject, audit, source, fresh=fresh, store=store, **options)
    other = None
    drift = None
    if rules.needs_baseline and base is None:
        judge(audited, rules)  # says which limit needs one
    if base is not None:
        base_subject = load_subject(base, allow_pickle=allow_pickle)
        _same_task(subject, base_subject, version.label, base.uri)
        same = source if source is not None else _again(audited)
        other = _fitting(base, base_subject, None, same, fresh=fresh, store=False, **options)
        if rules.needs_drift:
            earlier = passed_before(version, base, same.digest)
            others = honest_subjects(base_subject, honest, earlier, allow_pickle=allow_pickle)
            drift = _drift(base_subject, subject, same, others, progress) | _reliance_change(other, audited)
    gate = judge(audited, rules, other, drift)
    gate = replace(gate, model=version.label, baseline=base.uri if base is not None else "")
    if store:
        _store_verdict(gate, version)
    if promote is not None and gate.verdict == "pass":
        from mlflow import MlflowClient

        with mlflow_errors(f"alias {promote} of {version.name}"):
            MlflowClient().set_registered_model_alias(version.name, promote, version.version)
        gate = replace(gate, promoted=promote)
    return gate


def _source(data: str | Data | None) -> Data | None:
    from auditor.data.source import open_data

    return None if data is None else open_data(data)


def _again(audit: Audit) -> Data:
    """Open the data of an audit again, and make sure that it is the same."""
    from auditor.data.source import open_data

    try:
        source = open_data(audit.data["spec"], limit=audit.data.get("limit"), seed=audit.data.get("seed", 0))
        same = source.digest == audit.data["digest"]
    except (AuditError, OSError):
        same = False
    if not same:
        raise OptionError(
            f"gate: the data of the audit ({audit.data['spec']}) is not there as it was; give --data DATA."
        )
    return source


def _fitting(
    version: ModelVersion,
    subject: Subject,
    supplied: Audit | None,
    data: Data | None,
    *,
    fresh: bool,
    store: bool,
    with_reliance: bool = False,
    **options: Any,
) -> Audit:
    """Return an audit that is not stale: the one given, the stored one, or a new one."""
    explainers, broken = attached_explainers(version, subject)
    attached: dict[str, str | None] = {name: e.digest_ for name, e in explainers.items()} | dict.fromkeys(broken)
    if supplied is not None:
        reason = stale_reason(supplied, subject, attached, data)
        if reason:
            raise TamperError(f"gate: the audit given is stale: {reason}; audit {version.label} again.")
        return supplied
    stored = None if fresh else latest_audit(version)
    reason = "there is none" if stored is None else stale_reason(stored, subject, attached, data)
    if not reason and with_reliance and stored is not None and stored.reliance is None:
        reason = "it does not say what the classes hang on, and the policy asks for it"
    if stored is not None and not reason:
        return stored
    if data is None and stored is not None:
        data = _again(stored)
    if data is None:
        raise OptionError(f"gate: {version.label} has no stored audit; give --data DATA, or run auditor audit first.")
    log.info("auditing %s: of the stored audit, %s", version.label, reason)
    return run_audit(version, data, store=store, fresh=fresh, subject=subject, **options)


def _same_task(a: Subject, b: Subject, name: str, baseline: str) -> None:
    from auditor.release.drift import check_comparable

    try:
        check_comparable(b, a)
    except AuditError as error:
        reason = str(error).removeprefix("compare: ")
        raise OptionError(f"gate: the baseline {baseline} is of another task than {name}: {reason}") from None


def _reliance_change(before: Audit, after: Audit) -> dict[str, Measure]:
    """Return by how much the worst rise of a class's reliance is, from both audits."""
    from auditor.metrics.measure import of_value, skipped

    ends = "/score"
    names = [n for n in after.metrics if n.startswith("model/reliance/") and n.endswith(ends) and "/worst/" not in n]
    pairs = [(before.metrics.get(n), after.metrics[n]) for n in names]
    rises = [b.value - a.value for a, b in pairs if a is not None and a.is_taken and b.is_taken]
    if not rises:
        return {"drift/reliance": skipped("what classes hang on was not measured in both audits", "down")}
    return {"drift/reliance": of_value(max(rises), "down", n=len(rises))}


def _drift(
    a: Subject, b: Subject, data: Data, honest: Mapping[str, Subject], progress: Progress | None
) -> dict[str, Measure]:
    from auditor.metrics.measure import of_items, of_value, skipped
    from auditor.metrics.names import DRIFT_DIRECTION
    from auditor.progress import silent
    from auditor.release.drift import compare
    from auditor.release.version_changes import deciding_regions

    drift = compare(a, b, data, honest=honest, progress=progress or silent)
    regions = deciding_regions(a, b, data, 24, 0)
    ways: Any = {f"drift/{name}": way for name, way in DRIFT_DIRECTION.items()}
    measures = {
        name: of_value(value, ways.get(name, "up"), n=drift.n_images, null=drift.null_low if "simil" in name else None)
        if math.isfinite(value)
        else skipped(f"{drift.band.words()}; name honest versions with --honest", ways.get(name, "up"))
        for name, value in drift.metrics().items()
    }
    return measures | {"drift/regions": of_items(regions.overlap, "up", null=regions.null)}


def _store_verdict(gate: Gate, version: ModelVersion) -> None:
    tag = GateTag(
        gate.verdict,
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
        policy=gate.policy,
        policy_digest=gate.policy_digest,
        baseline=gate.baseline,
        checks=len(gate.checks),
        failed=tuple(gate.failed[:50]),
        audit_digest=gate.audit_digest,
    )
    with mlflow_errors(f"gate verdict of {version.label}"):
        set_tag(version, tags.GATE, tag.encode())


def _stored(version: ModelVersion, location: str) -> bytes | None:
    repository = version.repository()
    path = f"{location}/audit.json"
    if not any(entry.path == path for entry in repository.list_artifacts(location) or []):
        return None
    with tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        return Path(repository.download_artifacts(path, folder)).read_bytes()


def _card_of(version: ModelVersion) -> dict[str, str]:
    """Return card fields that the registry knows: the descriptions, and tags ``card.<field>`` of the version."""
    from auditor.release.model_card import FIELDS

    fields = tags.card_fields(version.tags, FIELDS)
    if not version.name:
        return fields
    fields.setdefault("name", version.name)
    from mlflow import MlflowClient

    try:
        with mlflow_errors(f"model {version.label}"):
            client = MlflowClient()
            text = client.get_model_version(version.name, version.version).description
            text = text or client.get_registered_model(version.name).description
    except ModelError:
        return fields
    if text:
        fields.setdefault("description", str(text))
    return fields
