"""Model files: the sha256 of every file of a model, pinned by a tag once it is registered, attached to or audited.

MLflow's versions never change, so the first pin stands; a file that is not what it was is an error that names it. The
bytes that are compared are those of the local copy that is then opened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from auditor.errors import ModelError, TamperError
from auditor.plugins.registry import tags
from auditor.plugins.registry.location import ModelVersion, resolve, set_tag

if TYPE_CHECKING:
    from auditor.subject.subject import Subject

ADDED_BY_MLFLOW = "registered_model_meta"  # beside a model, when a version is loaded through MLflow
NOT_THE_MODEL = {"explainers", "audits", "auditor", ADDED_BY_MLFLOW}
LONGEST_TAG = 90_000  # characters; MLflow takes 100,000
CHUNK = 1 << 20


def fetch(version: ModelVersion, folder: Path) -> dict[str, str]:
    """Download the model itself, without what is attached, and return the sha256 of each file by its path."""
    folder.mkdir(parents=True, exist_ok=True)
    repository = version.repository()
    entries = [entry.path for entry in repository.list_artifacts()]
    if "MLmodel" not in entries:
        raise ModelError(f"model {version.uri}: there is no MLmodel file at its source, so this is no MLflow model.")
    for entry in entries:
        if entry not in NOT_THE_MODEL:
            repository.download_artifacts(entry, str(folder))
    return digests(folder)


def digests(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file of a model's folder by its path; a link that leads out of it is an error."""
    files: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.resolve().is_relative_to(folder.resolve()):
            raise TamperError(f"{name} of the model leads out of its own folder; log the model again.")
        if path.is_file():
            files[name] = _sha256(path)
    return files


def check(version: ModelVersion, files: Mapping[str, str]) -> None:
    """Raise when files are not those that were pinned; a version without a pin has nothing to compare with."""
    tag = tags.model_tag(version.tags)
    if tag is None:
        return
    tag.usable()
    if tag.digest == tags.digest_of_files(files):
        return
    for name in sorted({*tag.files, *files}):
        if tag.files.get(name) != files.get(name):
            what = "is missing" if name not in files else "was added" if name not in tag.files else "has changed"
            raise TamperError(
                f"{name} of {version.label} {what} since the model's files were pinned ({tag.time[:10]}); "
                "restore the file, or register the model as a new version."
            )
    raise TamperError(f"the files of {version.label} are not those that were pinned; register a new version.")


def pin(version: ModelVersion, subject: Subject) -> None:
    """Pin the files that a subject was loaded from, and its description, where the version has no pin yet.

    Where it has one, the subject must be the one that was pinned: it may have been loaded an hour ago.
    """
    if not version.name or not subject.files:
        return
    current = resolve(version.label, registered=True)
    if tags.MODEL in current.tags:
        check(current, subject.files)
    else:
        set_tag(current, tags.MODEL, pinned(subject.files).encode())
    if tags.SUBJECT not in current.tags:
        set_tag(current, tags.SUBJECT, tags.encode_subject(subject.describe()))


def pinned(files: Mapping[str, str]) -> tags.ModelTag:
    """Return the tag that pins files; of very many only the digest over all of them stands in it."""
    stamp = datetime.now(timezone.utc).isoformat(timespec="seconds")
    tag = tags.ModelTag(tags.digest_of_files(files), dict(files), stamp)
    return tag if len(tag.encode()) <= LONGEST_TAG else tags.ModelTag(tag.digest, {}, stamp)


def _sha256(path: Path) -> str:
    h = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            h.update(chunk)
    return h.hexdigest()
