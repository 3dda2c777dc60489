"""Verdicts: what a gate said of a version, as a sealed file beside the model, and the tag that points to it.

The file names everything that was judged by its digest: model files, explainers, graph, data, audit, policy, baseline.
A tag alone is no verdict: whoever reads one checks the file's bytes, and that it speaks of this version and this audit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.errors import TamperError
from auditor.explainers.manifest import check_content, seal, sha256, unseal
from auditor.plugins.registry import history, tags
from auditor.plugins.registry.location import ModelVersion, mlflow_errors, resolve, set_tag
from auditor.plugins.registry.tags import GateTag
from auditor.plugins.registry.version_page import update

if TYPE_CHECKING:
    from auditor.auditing.record import Audit
    from auditor.plugins.registry.model_record import ModelRecord
    from auditor.release.gate import Gate

SCHEMA_VERSION = 1
FILE = "verdict.json"
AGAIN = "run the gate again"


@dataclass(frozen=True, slots=True)
class StoredVerdict:
    """A verdict read back: the sealed document and its digest."""

    document: dict[str, Any]
    digest: str

    @property
    def verdict(self) -> str:
        """``pass`` or ``fail``."""
        return str(self.document["verdict"])


def store_verdict(
    gate: Gate,
    version: ModelVersion,
    model: ModelRecord,
    audit: Audit,
    baseline: ModelRecord | None = None,
    sign: Callable[[ModelVersion, StoredVerdict], str] | None = None,
) -> StoredVerdict:
    """Store a verdict beside the model; the tag is set last, after ``sign`` returned where it put a signature."""
    document = verdict_document(gate, version, model, audit, baseline)
    content = seal(document)
    digest = sha256(content)
    location = f"auditor/verdicts/{digest[:12]}"
    with mlflow_errors(f"gate verdict of {version.label}"), tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        (Path(folder) / FILE).write_bytes(content)
        version.repository().log_artifacts(folder, location)
        check_content(_read(version, f"{location}/{FILE}"), digest, f"{location}/{FILE}", AGAIN)
        stored = StoredVerdict(document, digest)
        tag = GateTag(
            gate.verdict,
            document["time"],
            policy=gate.policy,
            policy_digest=gate.policy_digest,
            baseline=gate.baseline,
            checks=len(gate.checks),
            failed=tuple(gate.failed[:50]),
            audit_digest=gate.audit_digest,
            digest=digest,
            location=location,
            signature="" if sign is None else sign(version, stored),
        )
        digests = {"verdict.json": digest, "audit.json": gate.audit_digest}
        with history.noted(version, "gate", digests, gate.verdict):
            set_tag(version, tags.GATE, tag.encode())
        update(version, audit)
    return stored


def verdict_document(
    gate: Gate, version: ModelVersion, model: ModelRecord, audit: Audit, baseline: ModelRecord | None
) -> dict[str, Any]:
    """Return a verdict with the digests of all that was judged."""
    graph = tags.onnx_tag(version.tags)
    return {
        **gate.to_json(),
        "schema_version": SCHEMA_VERSION,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model_digest": model.digest,
        "files": dict(model.files),
        "explainers": {name: info.get("digest") for name, info in audit.explainers.items()},
        "onnx": graph.digest if graph is not None else "",
        "data_digest": audit.data["digest"],
        "baseline_digest": "" if baseline is None else baseline.digest,
    }


def latest_verdict(uri: str | ModelVersion) -> StoredVerdict | None:
    """Return the stored verdict of a version, verified byte by byte; None when there is none."""
    version = resolve(uri, registered=True)
    tag = tags.gate_tag(version.tags)
    if tag is None:
        return None
    tag.usable()
    if not tag.digest:
        raise TamperError(
            f"the tag {tags.GATE} of {version.label} names no verdict file, so it proves nothing; {AGAIN}."
        )
    path = f"{tag.location}/{FILE}"
    with mlflow_errors(f"verdict of {version.label}"):
        content = _read(version, path)
    return StoredVerdict(open_verdict(content, tag, version.label), tag.digest)


def open_verdict(content: bytes, tag: GateTag, label: str) -> dict[str, Any]:
    """Return a verdict whose bytes are those of its tag and which speaks of this version; else an error."""
    what = f"{FILE} of {label}"
    document = unseal(check_content(content, tag.digest, what, AGAIN), what, AGAIN)
    for name, wanted in (("model", label), ("verdict", tag.verdict), ("audit_digest", tag.audit_digest)):
        if document.get(name) != wanted:
            came = str(document.get(name))[:60]
            raise TamperError(f"{what} has {name} {came!r}, the version {str(wanted)[:60]!r}; {AGAIN}.")
    return document


def _read(version: ModelVersion, path: str) -> bytes:
    repository = version.repository()
    if not any(entry.path == path for entry in repository.list_artifacts(str(Path(path).parent)) or []):
        raise TamperError(f"{path} of {version.label} is missing; {AGAIN}.")
    with tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        return Path(repository.download_artifacts(path, folder)).read_bytes()
