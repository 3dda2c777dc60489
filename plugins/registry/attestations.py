"""Attestations: who signed what of a version.

Models, explainers and graphs are signed as folders by OpenSSF model-signing; an audit is an in-toto test result, a
verdict a verification summary, each in a DSSE envelope. A signature of the thing with digest D by key K lies at
``auditor/signatures/<D>/<K>`` beside the model. Nothing points to it and nothing needs to: it proves itself or not.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.errors import AuditError, SignatureError
from auditor.plugins.registry import history, model_files, tags
from auditor.plugins.registry.location import ModelVersion, mlflow_errors, resolve
from auditor.plugins.registry.verdicts import StoredVerdict, latest_verdict
from auditor.signing.bundles import open_bundle
from auditor.signing.folders import sign_folder, verify_folder
from auditor.signing.keys import Signer, TrustedKeys, current_signer
from auditor.signing.statements import SUMMARY, TEST_RESULT, Signed, make_statement, open_envelope, sign

if TYPE_CHECKING:
    from auditor.auditing.record import Audit
    from auditor.subject.subject import Subject

FOLDER = "auditor/signatures"
VERIFIER = "mlflow-auditor"
LENGTH = 16  # digits of digests in paths


@dataclass(frozen=True, slots=True)
class Attestation:
    """One signature of one part of a version; ``problem`` is empty when it verifies."""

    part: str  # model, explainer NAME, graph, audit, verdict
    digest: str
    signer: str = ""
    keyid: str = ""
    time: str = ""
    says: str = ""
    problem: str = ""
    expires: str = ""  # when the signer's certificate does, where it was signed with one

    def to_json(self) -> dict[str, str]:
        """Return what ``auditor verify --json`` prints."""
        return {k: getattr(self, k) for k in ("part", "digest", "signer", "keyid", "time", "says", "problem")}


def signature_path(digest: str, keyid: str) -> str:
    """Return where the envelope of a statement about a digest lies, if this key has signed one."""
    return f"{FOLDER}/{digest[:LENGTH]}/{keyid[:LENGTH]}.json"


# signing


def sign_version(uri: str | ModelVersion, key: Signer) -> list[str]:
    """Sign model, explainers and graph of a version after verifying each; return what was signed."""
    version = resolve(uri, registered=True)
    sign_model(version, key)
    parts = ["model"]
    for tag in tags.explainer_tags(version.tags):
        tag.usable()
        sign_stored(version, tag.location, tag.digest, key)
        parts.append(f"explainer {tag.name}")
    graph = tags.onnx_tag(version.tags)
    if graph is not None:
        graph.usable()
        sign_stored(version, graph.location, graph.digest, key)
        parts.append("graph")
    history.append(version, "sign", {}, ", ".join(parts))
    return parts


def sign_model(version: ModelVersion, key: Signer | None = None) -> bool:
    """Sign the model's files with the key given or chosen; False where there is no key."""
    key = key or current_signer()
    if key is None:
        return False
    with mlflow_errors(f"sign {version.label}"), tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        path = Path(folder) / (version.name or "model").replace("/", "-")
        files = model_files.fetch(version, path)
        model_files.check(version, files)
        bundle = sign_folder(path, key, sorted(model_files.NOT_THE_MODEL))
        _store(version, tags.digest_of_files(files), f"{key.keyid[:LENGTH]}.sig", bundle)
    return True


def sign_artifact(version: ModelVersion, folder: Path, digest: str, key: Signer | None = None) -> bool:
    """Sign the folder of an explainer or a graph with this digest; False where there is no key."""
    key = key or current_signer()
    if key is None:
        return False
    _store(version, digest, f"{key.keyid[:LENGTH]}.sig", sign_folder(folder, key))
    return True


def sign_stored(version: ModelVersion, location: str, digest: str, key: Signer) -> None:
    """Sign an artifact that is stored already, after verifying it."""
    from auditor.explainers.artifact import read_artifact

    with mlflow_errors(f"sign {location}"), tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        path = version.download(location, Path(folder))
        read_artifact(path, digest=digest)
        sign_artifact(version, path, digest, key)


def sign_audit(version: ModelVersion, audit: Audit, key: Signer | None = None) -> str:
    """Sign an audit as an in-toto test result; return where that lies, empty where there is no key."""
    return _sign_statement(
        version, audit.digest, key, lambda: make_statement(audited_subjects(audit), TEST_RESULT, test_result(audit))
    )


def sign_verdict(version: ModelVersion, verdict: StoredVerdict, key: Signer | None = None) -> str:
    """Sign a verdict as a verification summary; return where that lies, empty where there is no key."""
    subjects, summary = judged_subjects(verdict), verification_summary(verdict)
    return _sign_statement(version, verdict.digest, key, lambda: make_statement(subjects, SUMMARY, summary))


def _sign_statement(
    version: ModelVersion, digest: str, key: Signer | None, statement: Callable[[], dict[str, Any]]
) -> str:
    key = key or current_signer()
    if key is None:
        return ""
    path = signature_path(digest, key.keyid)
    _store(version, digest, path.rpartition("/")[2], sign(statement(), key))
    return path


def audited_subjects(audit: Audit) -> dict[str, str]:
    """Return what an audit speaks of: model files, explainers and graph, each with its sha256."""
    files = {f"model/{name}": digest for name, digest in audit.model.get("files", {}).items()}
    explainers = {f"explainer/{k}": info["digest"] for k, info in audit.explainers.items() if info.get("digest")}
    graph = {"graph": audit.model["onnx"]} if audit.model.get("onnx") else {}
    return {**files, **explainers, **graph, "audit.json": audit.digest}


def test_result(audit: Audit) -> dict[str, Any]:
    """Return an audit as in-toto's test result: every metric is a test, and what was measured with is configuration."""
    by_status = {
        s: sorted(n for n, m in audit.metrics.items() if m.status == s) for s in ("passed", "skipped", "failed")
    }
    result = "FAILED" if by_status["failed"] else "WARNED" if by_status["skipped"] else "PASSED"
    return {
        "result": result,
        "time": audit.time,
        "configuration": [
            {"name": "data", "uri": audit.data["spec"], "digest": {"sha256": audit.data["digest"]}},
            {"name": "subject", "digest": {"sha256": audit.model["digest"]}},
            {"name": "audit.json", "digest": {"sha256": audit.digest}},
        ],
        "passedTests": by_status["passed"],
        "warnedTests": by_status["skipped"],
        "failedTests": by_status["failed"],
    }


def judged_subjects(verdict: StoredVerdict) -> dict[str, str]:
    """Return what a verdict speaks of: model files, explainers, graph, data, policy and baseline, with their sha256."""
    d = verdict.document
    named = {"graph": d["onnx"], "data": d["data_digest"], "policy": d["policy_digest"], "subject": d["model_digest"]}
    named |= {"baseline": d["baseline_digest"], "audit.json": d["audit_digest"], "verdict.json": verdict.digest}
    files = {f"model/{name}": digest for name, digest in d["files"].items()}
    explainers = {f"explainer/{name}": digest for name, digest in d["explainers"].items()}
    return {name: digest for name, digest in {**files, **explainers, **named}.items() if digest}


def verification_summary(verdict: StoredVerdict) -> dict[str, Any]:
    """Return a verdict as SLSA's verification summary."""
    from importlib.metadata import version

    d = verdict.document
    return {
        "verifier": {"id": VERIFIER, "version": {VERIFIER: version("mlflow-auditor")}},
        "timeVerified": d["time"],
        "resourceUri": d["model"],
        "policy": {"uri": d["policy"], "digest": {"sha256": d["policy_digest"]}},
        "inputAttestations": [{"uri": "audit.json", "digest": {"sha256": d["audit_digest"]}}],
        "verificationResult": "PASSED" if d["verdict"] == "pass" else "FAILED",
        "verifiedLevels": [],
    }


# verifying


def signed_audit(version: ModelVersion, audit: Audit, trusted: TrustedKeys) -> list[Signed]:
    """Return the audit as trusted keys have signed it; an error when none has."""
    statements = _statements(version, audit.digest, trusted, f"the audit of {version.label}")
    wanted = audited_subjects(audit)
    for signed in statements:
        _check_says(signed, TEST_RESULT, wanted, f"the audit of {version.label}")
    return statements


def passed_by(version: ModelVersion, subject: Subject, trusted: TrustedKeys) -> Attestation:
    """Return the attestation of a trusted key that this version, as it is now, has passed a gate; else an error."""
    verdict = latest_verdict(version)
    if verdict is None:
        raise SignatureError(f"{version.label} has no verdict; run auditor gate --sign-key KEY first.")
    where = f"the verdict of {version.label}"
    signed = _statements(version, verdict.digest, trusted, where)[0]
    _check_says(signed, SUMMARY, judged_subjects(verdict), where)
    if verdict.verdict != "pass" or signed.predicate.get("verificationResult") != "PASSED":
        raise SignatureError(f"{where} is a fail, so it is not served.")
    _check_is_current(version, subject, verdict, where)
    expires = signed.key.expires.isoformat() if signed.key.expires is not None else ""
    return Attestation(
        "verdict", verdict.digest, signed.key.name, signed.key.keyid, signed.time, "PASSED", expires=expires
    )


def attestations_of(uri: str | ModelVersion, trusted: TrustedKeys) -> list[Attestation]:
    """Return who signed what of a version, its stored audit included."""
    from auditor.plugins.registry.audits import latest_audit

    version = resolve(uri, registered=True)
    try:
        audit = latest_audit(version)
    except AuditError as error:
        return [*attestations(version, trusted, None), Attestation("audit", "", problem=str(error))]
    return attestations(version, trusted, audit)


def attestations(version: ModelVersion, trusted: TrustedKeys, audit: Audit | None) -> list[Attestation]:
    """Return who signed what of a version: an entry per signature, and one with a problem for a part without any."""
    entries: list[Attestation] = []
    entries += _of_model(version, trusted)
    for tag in tags.explainer_tags(version.tags):
        entries += _of_artifact(version, trusted, f"explainer {tag.name}", tag.digest, tag.location)
    graph = tags.onnx_tag(version.tags)
    if graph is not None:
        entries += _of_artifact(version, trusted, "graph", graph.digest, graph.location)
    if audit is not None:
        entries += _entries("audit", audit.digest, lambda: signed_audit(version, audit, trusted))
    if tags.GATE in version.tags:
        entries += _of_verdict(version, trusted)
    return entries


def model_signers(version: ModelVersion, trusted: TrustedKeys) -> list[str]:
    """Return the names of the trusted keys that signed the model's files."""
    return [entry.signer for entry in _of_model(version, trusted) if not entry.problem]


def _of_verdict(version: ModelVersion, trusted: TrustedKeys) -> list[Attestation]:
    try:
        verdict = latest_verdict(version)
        assert verdict is not None
    except AuditError as error:
        return [Attestation("verdict", "", problem=str(error))]
    where = f"the verdict of {version.label}"
    return _entries("verdict", verdict.digest, lambda: _statements(version, verdict.digest, trusted, where))


def _entries(part: str, digest: str, ask: Callable[[], list[Signed]]) -> list[Attestation]:
    try:
        return [Attestation(part, digest, s.key.name, s.key.keyid, s.time, _result(s)) for s in ask()]
    except AuditError as error:
        return [Attestation(part, digest, problem=str(error))]


def _result(signed: Signed) -> str:
    return str(signed.predicate.get("result") or signed.predicate.get("verificationResult") or "")


def _of_model(version: ModelVersion, trusted: TrustedKeys) -> list[Attestation]:
    with mlflow_errors(f"model {version.label}"), tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        path = Path(folder) / "model"
        digest = tags.digest_of_files(model_files.fetch(version, path))
        return _of_folder(version, trusted, "model", digest, path)


def _of_artifact(
    version: ModelVersion, trusted: TrustedKeys, part: str, digest: str, location: str
) -> list[Attestation]:
    try:
        with mlflow_errors(f"{part} of {version.label}"), tempfile.TemporaryDirectory(prefix="auditor-") as folder:
            return _of_folder(version, trusted, part, digest, version.download(location, Path(folder)))
    except AuditError as error:
        return [Attestation(part, digest, problem=str(error))]


def _of_folder(version: ModelVersion, trusted: TrustedKeys, part: str, digest: str, path: Path) -> list[Attestation]:
    entries, strangers = [], []
    where = f"{part} of {version.label}"
    for name, content in _stored(version, digest).items():
        if not name.endswith(".sig"):
            continue
        named = next((key for key in trusted.keys if key.keyid[:LENGTH] == Path(name).stem), None)
        try:
            bundle = open_bundle(content, where)
            key = trusted.signer_of(content, bundle, where) if bundle.certificates else named
            if key is None:
                continue
            verify_folder(path, content, key, where)
            entries.append(Attestation(part, digest, key.name, key.keyid, "", "signed"))
        except AuditError as error:
            if named is None:  # anybody who may write to the store can put one there
                strangers.append(str(error))
            else:
                entries.append(Attestation(part, digest, named.name, named.keyid, problem=str(error)))
    nobody = f"no key of {trusted.folder} has signed it; auditor sign signs it."
    return entries or [Attestation(part, digest, problem=next(iter(strangers), nobody))]


def _statements(version: ModelVersion, digest: str, trusted: TrustedKeys, where: str) -> list[Signed]:
    """Return the statements about a digest that trusted keys have signed; the first problem is the error of none."""
    statements, problems = [], []
    for name, content in _stored(version, digest).items():
        if not name.endswith(".json"):
            continue
        try:
            statements.append(open_envelope(content, trusted, where))
        except SignatureError as error:
            problems.append(error)
    if statements:
        return statements
    if problems:
        raise problems[0]
    raise SignatureError(f"{where} is not signed; sign it by running the command with --sign-key KEY.")


def _check_says(signed: Signed, predicate_type: str, wanted: Mapping[str, str], where: str) -> None:
    """Raise unless a statement is of the kind wanted and about exactly these subjects."""
    if signed.statement.get("predicateType") != predicate_type:
        raise SignatureError(
            f"{where}: {signed.key.name} signed something else ({signed.statement.get('predicateType')})."
        )
    subjects = signed.subjects
    differing = sorted(name for name in {*subjects, *wanted} if subjects.get(name) != wanted.get(name))
    if differing:
        raise SignatureError(f"{where}: the signature of {signed.key.name} is of another {differing[0]}.")


def _check_is_current(version: ModelVersion, subject: Subject, verdict: StoredVerdict, where: str) -> None:
    """Raise where the version is no longer what was judged."""
    d = verdict.document
    graph = tags.onnx_tag(version.tags)
    attached = {tag.name: tag.digest for tag in tags.explainer_tags(version.tags)}
    pairs = {
        "model": (d["model_digest"], subject.digest),
        "model files": (d["files"], subject.files),
        "explainers": (d["explainers"], attached),
        "graph": (d["onnx"], graph.digest if graph is not None else ""),
    }
    changed = [name for name, (then, now) in pairs.items() if then != now]
    if changed:
        raise SignatureError(
            f"{where} is of another {' and '.join(changed)} than there is now; run auditor gate again."
        )


def _store(version: ModelVersion, digest: str, name: str, content: bytes) -> None:
    with tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        (Path(folder) / name).write_bytes(content)
        version.repository().log_artifacts(folder, f"{FOLDER}/{digest[:LENGTH]}")


def _stored(version: ModelVersion, digest: str) -> dict[str, bytes]:
    """Return the signatures of a digest by file name."""
    location = f"{FOLDER}/{digest[:LENGTH]}"
    repository = version.repository()
    with mlflow_errors(f"signatures of {version.label}"), tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        paths = [e.path for e in repository.list_artifacts(location) or [] if not e.is_dir]
        return {Path(p).name: Path(repository.download_artifacts(p, folder)).read_bytes() for p in sorted(paths)}
