"""Gates: a version held against a policy, on the stored audit or a new one, and promoted when it passes.

Everything is written before an alias moves; the alias moves last, and only while the version is what was judged.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.errors import AuditError, OptionError, SignatureError, TamperError
from auditor.plugins.registry import history, model_files, tags
from auditor.plugins.registry.attachments import list_attached, load
from auditor.plugins.registry.attestations import model_signers, sign_verdict, signed_audit
from auditor.plugins.registry.audits import latest_audit, run_audit, store_audit
from auditor.plugins.registry.honest_versions import honest_subjects, passed_before
from auditor.plugins.registry.location import ModelVersion, mlflow_errors, resolve
from auditor.plugins.registry.model_record import VersionModel
from auditor.plugins.registry.onnx_exports import check_graph
from auditor.plugins.registry.staleness import stale_reason
from auditor.plugins.registry.studies import with_studies
from auditor.plugins.registry.verdicts import store_verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from auditor.auditing.config import AuditConfig
    from auditor.auditing.record import Audit
    from auditor.data.source import Data
    from auditor.metrics.measure import Measure
    from auditor.plugins.registry.model_record import ModelRecord
    from auditor.progress import Progress
    from auditor.release.gate import Gate, SignedBy
    from auditor.release.policy import Policy
    from auditor.signing.keys import TrustedKeys
    from auditor.subject.subject import Subject

log = logging.getLogger(__name__)


def run_gate(
    uri: str | ModelVersion,
    policy: Policy | str | Path,
    *,
    baseline: str | ModelVersion | None = None,
    honest: Sequence[str] = (),
    data: Any = None,
    audit: Audit | None = None,
    config: AuditConfig | None = None,
    fresh: bool = False,
    promote: str | None = None,
    store: bool = True,
    allow_pickle: bool | None = None,
    progress: Progress | None = None,
    command: str = "",
    trusted: TrustedKeys | None = None,
    require_signed_audit: bool = False,
    before_promotion: Callable[[Gate], None] | None = None,
) -> Gate:
    """Hold a version against a policy, on the stored audit unless it is stale, else on a new one.

    ``trusted`` are the keys whose signatures count; the audit must carry one where ``require_signed_audit`` or the
    policy says so. ``promote`` moves the alias, last and only when the gate passes, to the version that was judged.
    ``before_promotion`` is called with the stored verdict before; what it raises, stops it.
    """
    from auditor.release.gate import judge
    from auditor.release.policy import Policy, read_policy

    rules = policy if isinstance(policy, Policy) else read_policy(policy)
    version = resolve(uri, registered=True)
    base = None if baseline is None else resolve(baseline, registered=True)
    _check_options(version, base, rules, trusted, require_signed_audit)
    _check_tags(*filter(None, (version, base)))
    model = VersionModel(version, allow_pickle)
    source = _source(data)
    options: dict[str, Any] = {"config": config, "allow_pickle": allow_pickle, "progress": progress, "command": command}
    options |= {"fresh": fresh, "with_reliance": any(name.startswith("model/reliance/") for name in rules.limits)}
    audited = _fitting(model, audit, source, store=store, **options)
    other = drift = base_record = None
    if rules.needs_baseline and base is None:
        judge(audited, rules)  # says which limit needs one
    if base is not None:
        base_model = VersionModel(base, allow_pickle)
        _same_task(model.record, base_record := base_model.record, version.label, base.uri)
        same = source if source is not None else _again(audited)
        other = _fitting(base_model, None, same, store=False, **options)
        if rules.needs_drift:
            others = _honest(version, base, base_model.subject, same, honest, allow_pickle)
            drift = _drift(base_model.subject, model.subject, same, others, progress) | _reliance_change(other, audited)
    gate = judge(audited, rules, other, drift, _signed_by(version, audited, trusted, require_signed_audit))
    gate = replace(gate, model=version.label, baseline="" if base is None else base.uri)
    if store:
        store_verdict(gate, version, model.record, audited, base_record, sign=sign_verdict)
    gate = replace(gate, promoted=(promote or "") if gate.verdict == "pass" else "")
    if before_promotion is not None:
        before_promotion(gate)
    if promote is not None and gate.verdict == "pass":
        _check_unchanged(version, model.record, rules, audited if store and audit is None else None)
        _promote(version, promote)
    return gate


def _signed_by(version: ModelVersion, audit: Audit, trusted: TrustedKeys | None, required: bool) -> SignedBy:
    """Return which trusted keys signed the audit and the model."""
    from auditor.release.gate import SignedBy

    if trusted is None:
        return SignedBy()
    names: tuple[str, ...] = ()
    problem = ""
    try:
        names = tuple(signed.key.name for signed in signed_audit(version, audit, trusted))
    except SignatureError as error:
        problem = str(error)
    return SignedBy(names, tuple(model_signers(version, trusted)), problem, required)


def _honest(
    version: ModelVersion,
    base: ModelVersion,
    base_subject: Subject,
    data: Data,
    honest: Sequence[str],
    allow_pickle: bool | None,
) -> dict[str, Subject]:
    """Return the versions that show the noise of retraining: those given, else earlier ones that passed."""
    earlier = passed_before(version, base, data.digest)
    return honest_subjects(base_subject, honest, earlier, allow_pickle=allow_pickle)


def _check_options(
    version: ModelVersion, base: ModelVersion | None, rules: Policy, trusted: TrustedKeys | None, signed: bool
) -> None:
    """Raise when nobody is trusted and signatures are asked for, or the baseline is the version itself, or a copy."""
    if trusted is None and (signed or rules.signers.asked):
        raise OptionError("gate: signatures are asked for; say whom you trust with --trusted keys/.")
    if base is not None and (version.name, version.version) == (base.name, base.version):
        raise OptionError(f"gate: the baseline {base.uri} is {version.label} itself; name another version.")
    if base is not None and version.root == base.root:
        raise OptionError(f"gate: the baseline {base.label} is a copy of {version.label}; name another version.")


def _check_tags(*versions: ModelVersion) -> None:
    """Raise where somebody has edited a tag that a verdict would rest on; its own tag is written anew."""
    for version in versions:
        edited = [key for key in tags.altered(version.tags) if key != tags.GATE]
        if edited:
            raise TamperError(
                f"gate: the tag {edited[0]} of {version.label} is not as it was written; restore it, or write it anew "
                f"({tags.written_by(edited[0])})."
            )


def _check_unchanged(version: ModelVersion, model: ModelRecord, rules: Policy, audit: Audit | None) -> None:
    """Raise when the version or the policy is not what was judged: the alias would speak of something else."""
    import tempfile

    from auditor.release.policy import read_policy

    now = resolve(version.label, registered=True)
    judged = {k: v for k, v in version.tags.items() if k.startswith((tags.EXPLAINER, tags.ONNX, tags.SUBJECT))}
    current = {k: v for k, v in now.tags.items() if k.startswith((tags.EXPLAINER, tags.ONNX, tags.SUBJECT))}
    if tags.SUBJECT not in judged:
        current.pop(tags.SUBJECT, None)  # the description was pinned by the audit
    changed = sorted(k for k in {*judged, *current} if judged.get(k) != current.get(k))
    stored = tags.audit_tag(now.tags)
    if audit is not None and (stored is None or stored.digest != audit.digest):
        changed.append(tags.AUDIT)
    with mlflow_errors(f"model {version.label}"), tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        files = model_files.fetch(now, Path(folder) / "model")
    changed += sorted(name for name in {*files, *model.files} if files.get(name) != model.files.get(name))
    if changed:
        raise TamperError(
            f"gate: {version.label} has changed while it was judged ({', '.join(changed[:5])}); nothing was promoted, "
            "run the gate again."
        )
    if rules.path is not None and read_policy(rules.path).digest != rules.digest:
        raise TamperError(f"gate: the policy {rules.path} has changed meanwhile; nothing was promoted.")


def _promote(version: ModelVersion, alias: str) -> None:
    from mlflow import MlflowClient

    with mlflow_errors(f"alias {alias} of {version.name}"), history.noted(version, "promote", {}, alias):
        MlflowClient().set_registered_model_alias(version.name, alias, version.version)


def _source(data: Any) -> Data | None:
    if data is None:
        return None
    from auditor.data.source import open_data  # loads torch, which a stored audit does not need

    return open_data(data)


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
    model: VersionModel,
    supplied: Audit | None,
    data: Data | None,
    *,
    fresh: bool,
    store: bool,
    with_reliance: bool = False,
    **options: Any,
) -> Audit:
    """Return an audit that is not stale: the one given, the stored one, or a new one. The graph is verified with it.

    The model is loaded only where its files alone do not show that the audit is about it.
    """
    version = model.version
    if supplied is not None:
        reason = _stale(model, supplied, data)
        if reason:
            raise TamperError(f"gate: the audit given is stale: {reason}; audit {version.label} again.")
        check_graph(version, model, supplied)
        return supplied
    stored = None if fresh else latest_audit(version)
    if stored is not None:
        current = with_studies(stored, version)
        if current is not stored and store:
            store_audit(current, version)
        stored = current
    reason = "there is none" if stored is None else _stale(model, stored, data)
    if not reason and with_reliance and stored is not None and stored.reliance is None:
        reason = "it does not say what the classes hang on, and the policy asks for it"
    check_graph(version, model, None if reason else stored)
    if stored is not None and not reason:
        return stored
    if stored is not None:
        _check_weights(version, model.subject, stored)
    if data is None and stored is not None:
        data = _again(stored)
    if data is None:
        raise OptionError(f"gate: {version.label} has no stored audit; give --data DATA, or run auditor audit first.")
    log.info("auditing %s: of the stored audit, %s", version.label, reason)
    return run_audit(version, data, store=store, fresh=fresh, subject=model.subject, **options)


def _stale(model: VersionModel, audit: Audit, data: Data | None) -> str:
    """Return why an audit is not about the version as it is now; a record that differs is read again by torch."""
    graph = tags.onnx_tag(model.version.tags)
    digest = graph.digest if graph is not None else ""
    reason = stale_reason(audit, model.record, _digests(model, audit), data, digest)
    if reason and not model.is_loaded:
        model.load()
        reason = stale_reason(audit, model.record, _digests(model, audit), data, digest)
    return reason


def _digests(model: VersionModel, audit: Audit) -> dict[str, str | None]:
    """Return the digest of each explainer, None of one that does not verify or cannot be loaded.

    Where one verifies that could not be loaded when the version was audited, it is loaded now.
    """
    digests: dict[str, str | None] = {}
    for entry in list_attached(model.version, model=model):
        digests[entry.name] = entry.digest if entry.verified else None
        if entry.verified and entry.name in audit.explainers and audit.explainers[entry.name].get("digest") is None:
            try:
                load(model.version, entry.name, subject=model.subject)
            except AuditError:
                digests[entry.name] = None
    return digests


def _check_weights(version: ModelVersion, subject: Subject, stored: Audit) -> None:
    """Raise when the weights or the graph are not those that were audited: a version's never change by themselves."""
    from auditor.subject.identity import Identity

    audited = Identity.from_json(stored.model.get("identity"))
    parts = [p for p in (audited.differences(subject.identity) if audited else []) if p in ("weights", "graph")]
    if parts:
        raise TamperError(
            f"gate: {version.label} has other {' and '.join(parts)} than when it was audited ({stored.time[:10]}), and "
            "those of a version never change; restore its files, or register them as a new version. Nothing was stored."
        )


def _same_task(a: ModelRecord, b: ModelRecord, name: str, baseline: str) -> None:
    from auditor.release.same_task import check_comparable

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
