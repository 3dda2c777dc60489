"""Exports: the ONNX graph of a version, stored beside it and verified like an explainer.

The folder goes to ``auditor/exports/<digest12>/``, then the tag ``auditor.onnx`` points to it, the commit point. Once a
version has a graph, attaching another explainer renews it before the explainer is visible, so a server that follows the
version never finds one without the other. Where that fails the graph is left as it is, and servers tell what it lacks.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.errors import AuditError, TamperError
from auditor.plugins.registry.subjects import load_subject
from auditor.plugins.registry.location import Place, mlflow_errors, resolve, set_tag
from auditor.plugins.registry.attachments import download, load, names

if TYPE_CHECKING:
    from auditor.explainers.base import Explainer
    from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

TAG = "auditor.onnx"
FILE = "explain.onnx"


@dataclass(frozen=True, slots=True)
class Exported:
    """A stored graph: where it is, what it was made of, how far it is from torch."""

    digest: str
    location: str
    layers: tuple[str, ...]
    features: Mapping[str, str]  # explainer name -> digest of its heads
    worst: float
    content: bytes

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


def export(
    uri: str,
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

    place = resolve(uri, registered=True)
    if subject is None:
        subject = load_subject(place.label, allow_pickle=allow_pickle)
    fresh = dict(attaching or {})
    kept = {name: load(place.label, name, subject=subject) for name in names(place.label) if name not in fresh}
    graph = export_graph(subject, {**kept, **fresh})
    manifest = {
        "kind": "onnx",
        "subject_digest": subject.digest,
        "layers": list(graph.layers),
        "features": dict(graph.features),
        "worst_difference": graph.worst,
    }
    with mlflow_errors(f"export {place.label}"), tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        artifact = Path(folder) / "artifact"
        digest = write_artifact(artifact, manifest, {}, {FILE: graph.content})
        location = f"auditor/exports/{digest[:12]}"
        place.repository().log_artifacts(str(artifact), location)
        stamp = datetime.now(timezone.utc).isoformat(timespec="seconds")
        value: dict[str, Any] = {"location": location, "digest": digest, "time": stamp}
        found = read_export(place, value, subject)  # what the store gives back is what was sent
        value |= {"layers": list(graph.layers), "features": sorted(graph.features.values())}
        set_tag(place, TAG, json.dumps(value, sort_keys=True))
    return found


def renew(place: Place, subject: Subject, name: str, explainer: Explainer, *, asked: bool) -> str:
    """Export before an explainer is attached: when asked to, or when there is a graph and it lacks what this one reads.

    Returns what went wrong, or nothing: an explainer that took minutes to fit is attached all the same.
    """
    from auditor.explainers.onnx_export import lacking

    try:
        if not asked:
            if TAG not in place.tags:
                return ""
            entry = _entry(place)
            if not lacking(entry.get("layers", ()), entry.get("features", ()), explainer):
                return ""
        export(place.label, subject=subject, attaching={name: explainer})
    except AuditError as error:
        if not asked:
            log.warning("the ONNX graph of %s was not renewed, it will not be used: %s", place.label, error)
        return str(error)
    return ""


def load_export(place: Place, subject: Subject) -> Exported | None:
    """Return the stored graph after verifying it, or None when there is none."""
    if TAG not in place.tags:
        return None
    entry = _entry(place)
    with mlflow_errors(f"load the graph of {place.label}"):
        return read_export(place, entry, subject)


def _entry(place: Place) -> dict[str, Any]:
    try:
        entry = json.loads(place.tags[TAG])
        return {**entry, **{key: str(entry[key]) for key in ("location", "digest")}}
    except (ValueError, KeyError, TypeError):
        raise TamperError(
            f"the tag {TAG} of {place.label} is not what was attached; run auditor export again."
        ) from None


def read_export(place: Place, value: Mapping[str, Any], subject: Subject) -> Exported:
    """Download and verify a graph."""
    from auditor.explainers.artifact import read_artifact

    with tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        path = download(place, value["location"], Path(folder))
        artifact = read_artifact(path, digest=value["digest"], subject_digest=subject.digest)
    m = artifact.manifest
    return Exported(
        artifact.digest,
        value["location"],
        tuple(m["layers"]),
        dict(m["features"]),
        float(m["worst_difference"]),
        artifact.files[FILE],
    )
