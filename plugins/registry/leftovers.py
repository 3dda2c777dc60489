"""Leftovers: folders beside a model to which no tag points, of what was replaced, detached or never finished.

Nobody reads them, but an attachment of the same digest takes them up again, and whoever changes one may write to the
store. So they are checked for what can be known without a tag: a folder is named by the digest of its manifest, and
the manifest lists the others. One that lacks something is what a killed upload leaves, and no problem.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from auditor.errors import ArtifactError, AuditError
from auditor.plugins.registry import tags
from auditor.plugins.registry.location import ModelVersion, mlflow_errors

EXPLAINERS, EXPORTS = "explainers", "auditor/exports"
DIGEST = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Leftover:
    """A folder that nothing points to; ``problem`` is empty when it is whole, or was never finished."""

    location: str
    problem: str = ""


def find(version: ModelVersion) -> list[str]:
    """Return the folders of explainers and graphs that no tag of the version points to."""
    repository = version.repository()

    def below(folder: str) -> list[str]:
        return [entry.path for entry in repository.list_artifacts(folder) or [] if entry.is_dir]

    with mlflow_errors(f"artifacts of {version.label}"):
        stored = [path for name in below(EXPLAINERS) for path in below(name)] + below(EXPORTS)
    graph = tags.onnx_tag(version.tags)
    used = {tag.location for tag in tags.explainer_tags(version.tags)} | ({graph.location} if graph else set())
    return sorted(path for path in stored if DIGEST.fullmatch(path.rsplit("/", 1)[-1]) and path not in used)


def check(version: ModelVersion) -> list[Leftover]:
    """Return the leftovers of a version, each with what is wrong with it."""
    return [Leftover(location, _problem(version, location)) for location in find(version)]


def _problem(version: ModelVersion, location: str) -> str:
    """Return what was changed in a folder since it was written, or nothing."""
    try:
        with mlflow_errors(location), tempfile.TemporaryDirectory(prefix="auditor-") as folder:
            if not version.repository().list_artifacts(location):
                return ""  # an upload that was killed before its first file
            return changed(version.download(location, Path(folder)), location)
    except AuditError as error:
        return str(error)


def changed(folder: Path, location: str) -> str:
    """Return what was changed in the folder of an artifact since it was written, or nothing."""
    from auditor.explainers.manifest import MANIFEST, check_file, open_manifest, sha256

    present = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
    sealed = present.pop(MANIFEST, None)
    content = b"" if sealed is None else sealed.read_bytes()
    if not content:
        return ""
    if not sha256(content).startswith(location.rsplit("/", 1)[-1]):
        return _words(f"{MANIFEST} in {location} is not what was stored")
    try:
        manifest = open_manifest(content, location)
    except ArtifactError as error:
        return _words(str(error).rstrip("."))
    for name, path in present.items():
        if name not in manifest["files"]:
            return _words(f"{name} in {location} is not listed in its manifest")
        file = path.read_bytes()
        if len(file) < _size(manifest, name):
            continue  # what a killed upload leaves
        try:
            check_file(manifest, name, sha256(file), len(file), location)
        except ArtifactError:
            return _words(f"{name} in {location} is not what was stored")
    return ""


def _size(manifest: Mapping[str, Any], name: str) -> int:
    return int(manifest["files"][name]["size"])


def _words(problem: str) -> str:
    return f"{problem}; nothing points to the folder, remove it and find out who wrote there."
