"""Audits of registered versions.

An audit's files go to ``audits/<digest12>/`` beside the model; then the tag ``auditor.audit`` on the version, the
commit point, says where.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.errors import AuditError, ModelError, TamperError
from auditor.plugins.registry import history, tags
from auditor.plugins.registry.attachments import load, names
from auditor.plugins.registry.attestations import sign_audit
from auditor.plugins.registry.location import ModelVersion, mlflow_errors, resolve, set_tag
from auditor.plugins.registry.metrics_log import logged_metrics
from auditor.plugins.registry.model_files import pin
from auditor.plugins.registry.studies import with_studies
from auditor.plugins.registry.subjects import load_subject
from auditor.plugins.registry.tags import PICTURE, AuditTag
from auditor.plugins.registry.version_page import update, without_section

if TYPE_CHECKING:
    from collections.abc import Callable

    from auditor.auditing.config import AuditConfig
    from auditor.auditing.record import Audit
    from auditor.explainers.base import Explainer
    from auditor.progress import Progress
    from auditor.subject.subject import Subject


def run_audit(
    uri: str | ModelVersion,
    data: Any,
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
    from auditor.auditing.parts import unsaid
    from auditor.data.source import open_data
    from auditor.data.user_cache import default_folder
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
    graph = tags.onnx_tag(version.tags)
    about = {"uri": version.uri, "files": subject.files, "onnx": graph.digest if graph is not None else ""}
    if graph is not None:
        from auditor.plugins.registry.onnx_exports import COMPARED, compared

        about[COMPARED] = compared(version, subject)
    result = replace(result, model=result.model | about, card=fill(from_registry | (card or {})))
    result = with_studies(result, version)
    if store and version.name:
        pin(version, subject)
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
    from auditor.reports.finding_picture import finding_picture

    sealed, digest = audit.sealed(), audit.digest
    location = f"audits/{digest[:12]}"
    with mlflow_errors(f"store the audit of {version.label}"), tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        (Path(folder) / "audit.json").write_bytes(sealed)
        (Path(folder) / "report.html").write_text(report_html(audit), encoding="utf-8")
        picture = finding_picture(audit)
        if picture is not None:
            (Path(folder) / PICTURE).write_bytes(picture)
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
        sign_audit(version, audit)
        with (
            history.noted(version, "audit", {"audit.json": digest, "data": audit.data["digest"]}),
            logged_metrics(
                version, metrics, run_name=run_name, data_digest=audit.data["digest"], on_page=_headlines(audit)
            ),
        ):
            set_tag(version, tags.AUDIT, tag.encode())
        update(version, audit)
    return location


def _headlines(audit: Audit) -> frozenset[str]:
    """Return the few metrics that stand on the model's own page; all of them stand in the audit's run."""
    from auditor.explainers.base import explainer_class

    names = {"model/accuracy", "model/reliance/worst/score"}
    for name, about in audit.explainers.items():
        try:
            first = explainer_class(str(about.get("kind", ""))).headline[:1]
        except AuditError:  # its package is missing here
            continue
        names |= {f"explainer/{name}/{metric}" for metric in first}
    return frozenset(names)


def latest_audit(uri: str | ModelVersion) -> Audit | None:
    """Return the stored audit of a version, verified byte by byte; None when there is none."""
    from auditor.auditing.record import Audit
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


def check_audit(version: ModelVersion) -> None:
    """Raise when a file of the stored audit is not what the version's tag says: the audit, its page or its card."""
    from auditor.explainers.manifest import check_content

    latest_audit(version)
    tag = tags.audit_tag(version.tags)
    for name, digest in (tag.files if tag is not None else {}).items():
        assert tag is not None
        content = _stored(version, tag.location, tags.safe_path(name))
        if content is None:
            raise TamperError(f"{tag.location}/{name} of {version.label} is missing; run the audit again.")
        check_content(content, digest, f"{tag.location}/{name} of {version.label}", "run the audit again")


def _stored(version: ModelVersion, location: str, name: str = "audit.json") -> bytes | None:
    repository = version.repository()
    path = f"{location}/{name}"
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
            text = without_section(client.get_model_version(version.name, version.version).description)
            text = text or client.get_registered_model(version.name).description
    except ModelError:
        return fields
    if text:
        fields.setdefault("description", str(text))
    return fields
