"""Exports: the ONNX graph of a version, stored beside it and verified like an explainer.

The folder goes to ``auditor/exports/<digest12>/``, then the tag ``auditor.onnx`` points to it, the commit point.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.errors import TamperError
from auditor.plugins.models import load_subject
from auditor.plugins.place import Place, mlflow_errors, resolve, set_tag
from auditor.plugins.registry import download, load, names

if TYPE_CHECKING:
    from auditor.explainer import Explainer
    from auditor.subject import Subject

TAG = "auditor.onnx"
FILE = "explain.onnx"


@dataclass(frozen=True, slots=True)
class Exported:
    """A stored graph: where it is, what it was made of, how far it is from torch."""

    digest: str
    location: str
    layers: tuple[str, ...]
    features: Mapping[str, str]
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


def export(uri: str, *, allow_pickle: bool | None = None) -> Exported:
    """Export a version with everything attached to one ONNX graph, check it against torch and store it."""
    from auditor.artifact import write_artifact
    from auditor.onnx_graph import export_graph

    place = resolve(uri, registered=True)
    subject = load_subject(place.label, allow_pickle=allow_pickle)
    explainers = {name: load(place.label, name, subject=subject) for name in names(place.label)}
    graph = export_graph(subject, explainers)
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
        value = {"location": location, "digest": digest, "time": stamp}
        found = read_export(place, value, subject)  # what the store gives back is what was sent
        set_tag(place, TAG, json.dumps(value, sort_keys=True))
    return found


def load_export(place: Place, subject: Subject, explainers: Mapping[str, Explainer]) -> Exported | None:
    """Return the stored graph after verifying it, or None when there is none or it lacks a layer that is needed now."""
    text = place.tags.get(TAG)
    if text is None:
        return None
    try:
        entry = json.loads(text)
        value = {key: str(entry[key]) for key in ("location", "digest")}
    except (ValueError, KeyError, TypeError):
        raise TamperError(
            f"the tag {TAG} of {place.label} is not what was attached; run auditor export again."
        ) from None
    with mlflow_errors(f"load the graph of {place.label}"):
        found = read_export(place, value, subject)
    wanted = {layer for e in explainers.values() for layer in e.layers()}
    return found if wanted <= set(found.layers) else None


def read_export(place: Place, value: Mapping[str, str], subject: Subject) -> Exported:
    """Download and verify a graph."""
    from auditor.artifact import read_artifact

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
