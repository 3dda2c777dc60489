"""ONNX exports: the graph of a version, stored beside it and verified like an explainer.

The folder goes to ``auditor/exports/<digest12>/``, then the tag ``auditor.onnx`` points to it, the commit point. Once a
version has a graph, attaching another explainer renews it before the explainer is visible, so a server that follows the
version never finds one without the other. Where that fails the graph stays as it is, and servers log what it lacks.
"""

from __future__ import annotations

import logging
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.errors import ArtifactError, AuditError, LayerError, ModelError, TamperError
from auditor.plugins.registry import attachments, history, tags
from auditor.plugins.registry.attachments import Attached, load, names
from auditor.plugins.registry.attestations import sign_artifact
from auditor.plugins.registry.location import ModelVersion, mlflow_errors, resolve, set_tag
from auditor.plugins.registry.subjects import load_subject
from auditor.plugins.registry.tags import OnnxTag

if TYPE_CHECKING:
    from auditor.auditing.record import Audit
    from auditor.explainers.base import Explainer
    from auditor.plugins.registry.model_record import VersionModel
    from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

FILE = "explain.onnx"
COMPARED = "onnx_compared"  # what an audit calls the digest of a graph that was compared with torch
PROBES = (1, 4)  # images per pass when a graph is compared with torch at load


@dataclass(frozen=True, slots=True)
class Exported:
    """A stored graph: where it is, what it was made of, how far it is from torch."""

    digest: str
    location: str
    layers: tuple[str, ...]
    features: Mapping[str, str]  # explainer name -> digest of its heads
    worst: float
    content: bytes
    undone: str = "none"  # what of the model's end is undone in its logits

    def to_json(self) -> dict[str, Any]:
        """Return what ``auditor export --json`` prints."""
        return {
            "digest": self.digest,
            "location": self.location,
            "layers": list(self.layers),
            "features": dict(self.features),
            "worst_difference": self.worst,
            "bytes": len(self.content),
        }


def attach(
    explainer: Explainer,
    uri: str | ModelVersion,
    name: str | None = None,
    *,
    subject: Subject | None = None,
    export: bool | None = None,
    attach_anyway: bool = False,
    action: str = "attach",
) -> Attached:
    """Attach a fitted explainer to a model version: ``attach(concepts, "models:/m@champion", name="concepts")``.

    Does what ``attachments.attach`` does and keeps the version's ONNX graph in step with it. ``export`` stores the
    graph with this explainer, as ``auditor export`` does; None does so where the version has a graph that lacks what
    this explainer reads, False leaves it.
    An explainer that does not stand in for the model is refused (`WeakFitError`) unless ``attach_anyway``.
    """
    problem = ""

    def renew_graph(version: ModelVersion, subject: Subject, name: str) -> None:
        nonlocal problem
        problem = renew(version, subject, name, explainer, requested=bool(export))

    before_commit = renew_graph if export is not False else None
    attached = attachments.attach(
        explainer,
        uri,
        name,
        subject=subject,
        attach_anyway=attach_anyway,
        before_commit=before_commit,
        action=action,
    )
    if export and problem:
        current = uri.label if isinstance(uri, ModelVersion) else uri
        raise ModelError(f"{attached.name} is attached to {current}, but the ONNX graph was not exported: {problem}")
    return attached


def export(
    uri: str | ModelVersion,
    *,
    allow_pickle: bool | None = None,
    subject: Subject | None = None,
    attaching: Mapping[str, Explainer] | None = None,
) -> Exported:
    """Export a version with everything attached to one ONNX graph, check it against torch and store it.

    ``attaching`` are explainers that will be attached next; ``subject`` saves loading the model again.
    """
    from auditor.explainers.artifact import write_artifact
    from auditor.explainers.onnx_export import export_graph

    version = resolve(uri, registered=True)
    if subject is None:
        subject = load_subject(version, allow_pickle=allow_pickle)
    attaching = dict(attaching or {})
    attached = [name for name in names(version) if name not in attaching]
    graph = export_graph(subject, {**{n: load(version, n, subject=subject) for n in attached}, **attaching})
    manifest = {
        "kind": "onnx",
        "subject_digest": subject.digest,
        "subject": subject.identity.to_json(),
        "undone": subject.output.undone,
        "layers": list(graph.layers),
        "features": dict(graph.features),
        "worst_difference": graph.worst,
    }
    with mlflow_errors(f"export {version.label}"), tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        artifact = Path(folder) / "artifact"
        digest = write_artifact(artifact, manifest, {}, {FILE: graph.content})
        location = f"auditor/exports/{digest[:12]}"
        version.repository().log_artifacts(str(artifact), location)
        stamp = datetime.now(timezone.utc).isoformat(timespec="seconds")
        tag = OnnxTag(digest, location, stamp, tuple(graph.layers), tuple(sorted(graph.features.values())))
        exported = read_export(version, tag, subject)  # what the store gives back is what was sent
        sign_artifact(version, artifact, digest)
        with history.noted(version, "export", {"graph": digest}):
            set_tag(version, tags.ONNX, tag.encode())
    return exported


def renew(version: ModelVersion, subject: Subject, name: str, explainer: Explainer, *, requested: bool) -> str:
    """Export before an explainer is attached: when asked to, or when there is a graph and it lacks what this one reads.

    Returns what went wrong, or nothing: an explainer that took minutes to fit is attached all the same.
    """
    from auditor.explainers.onnx_export import lacking

    try:
        if not requested:
            tag = tags.onnx_tag(version.tags)
            if tag is None or not lacking(tag.usable().layers, tag.features, explainer):
                return ""
        export(version.label, subject=subject, attaching={name: explainer})
    except AuditError as error:
        if not requested:
            log.warning("the ONNX graph of %s was not renewed, it will not be used: %s", version.label, error)
        return str(error)
    return ""


def load_export(version: ModelVersion, subject: Subject) -> Exported | None:
    """Return the stored graph after verifying it, or None when there is none."""
    tag = tags.onnx_tag(version.tags)
    if tag is None:
        return None
    with mlflow_errors(f"load the graph of {version.label}"):
        return read_export(version, tag.usable(), subject)


def check_export(
    version: ModelVersion, subject: Subject, explainers: Mapping[str, Explainer] | None = None
) -> Exported | None:
    """Return the stored graph after verifying it and comparing its answers with torch on images drawn now.

    Whoever may edit the version can store a graph with the right digests that answers otherwise.
    """
    exported = load_export(version, subject)
    if exported is not None:
        compare_with_torch(exported, subject, version.label, explainers or {})
    return exported


def check_graph(version: ModelVersion, model: VersionModel, audit: Audit | None) -> None:
    """Verify the stored graph; its answers are compared with torch's unless the audit names it as compared.

    The audit is one that was verified itself. A graph that was changed since has another digest.
    """
    tag = tags.onnx_tag(version.tags)
    if tag is None:
        return
    if audit is None or audit.model.get(COMPARED) != tag.usable().digest:
        check_export(version, model.subject)
        return
    from auditor.explainers.artifact import read_manifest

    with mlflow_errors(f"the graph of {version.label}"), tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        path = version.download(tag.location, Path(folder))
        read_manifest(path, digest=tag.digest, identity=model.record.identity, remedy=_remedy(version))


def compared(version: ModelVersion, subject: Subject) -> str:
    """Return the digest of the stored graph if it answers as the model does, else nothing, and no message claims it."""
    tag = tags.onnx_tag(version.tags)
    if tag is None:
        return ""
    try:
        check_export(version, subject)
    except AuditError as error:
        log.warning("the ONNX graph of %s was not compared with the model: %s", version.label, error)
        return ""
    return tag.digest


def _remedy(version: ModelVersion) -> str:
    return f"export it again: auditor export {version.label}"


def compare_with_torch(exported: Exported, subject: Subject, label: str, explainers: Mapping[str, Explainer]) -> None:
    """Raise when a graph does not give torch's numbers on images that nobody could know before."""
    from auditor.explainers.onnx_export import compare, further_outputs

    outputs = further_outputs(explainers)
    fitting = {name: output.key for name, output in outputs.items()} == dict(exported.features)
    further = list(outputs.values()) if fitting else []
    seed = secrets.randbits(62)
    try:
        compare(exported.content, subject, exported.layers, further, batches=PROBES, seed=seed)
    except LayerError as error:
        raise TamperError(f"{FILE} of {label} names layers that the model has not: {error}") from None
    except ArtifactError as error:
        raise TamperError(f"{FILE} of {label} does not answer as the model does: {error}") from None


def read_export(version: ModelVersion, tag: OnnxTag, subject: Subject) -> Exported:
    """Download and verify the graph that a tag points to."""
    from auditor.explainers.artifact import read_artifact

    with tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        path = version.download(tag.location, Path(folder))
        artifact = read_artifact(path, digest=tag.digest, identity=subject.identity, remedy=_remedy(version))
    manifest = artifact.manifest
    return Exported(
        digest=artifact.digest,
        location=tag.location,
        layers=tuple(manifest["layers"]),
        features=dict(manifest["features"]),
        worst=float(manifest["worst_difference"]),
        content=artifact.files[FILE],
        undone=str(manifest.get("undone", "none")),
    )
