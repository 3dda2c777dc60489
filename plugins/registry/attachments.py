"""Registry: explainers attached to model versions.

The artifact folder goes to ``explainers/<name>/<digest12>/`` beside the model, so nothing is ever overwritten; then one
tag on the version, ``auditor.explainers.base.<name>``, points to it. The tag is the commit point: before it nothing is
visible, after it everything is. Detaching removes the tag.
"""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.errors import AuditError, ModelError, OptionError, TamperError
from auditor.plugins.registry.metrics_log import log_metrics
from auditor.plugins.registry.subjects import check_notes, load_subject
from auditor.plugins.registry.location import Place, mlflow_errors, resolve, set_tag

if TYPE_CHECKING:
    from auditor.explainers.base import Explainer
    from auditor.subject.subject import Subject

TAG = "auditor.explainers.base."
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")


@dataclass(frozen=True, slots=True)
class Attached:
    """One attached explainer as the registry tells it; ``problem`` is empty when it verifies."""

    name: str
    kind: str
    digest: str
    location: str  # relative to the model's artifact folder
    time: str
    problem: str = ""
    layer: str | None = None
    target: int | str | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def verified(self) -> bool:
        """Whether every byte and the model itself are what was attached."""
        return not self.problem

    def to_json(self) -> dict[str, Any]:
        """Return what ``auditor list --json`` prints."""
        own = {
            k: getattr(self, k) for k in ("name", "kind", "digest", "layer", "target", "location", "time", "metrics")
        }
        return {**own, "verified": self.verified, "problem": self.problem}


def check_name(name: str) -> str:
    """Return a name that can stand in tags and paths, or an error."""
    if not NAME.match(name):
        raise OptionError(
            f"explainer name {name!r}: want 1 to 64 letters, digits, '_', '-' or '.', starting with a letter or digit."
        )
    return name


def attach(
    explainer: Explainer,
    uri: str,
    name: str | None = None,
    *,
    subject: Subject | None = None,
    export: bool | None = None,
) -> Attached:
    """Attach a fitted explainer to a model version: ``attach(concepts, "models:/m@champion", name="concepts")``.

    ``subject`` saves loading the model again when it was loaded from the same version. Killed at any moment, readers
    see the old state or the new one. Attaching under a name again replaces what the name points to; nothing is deleted.
    ``export`` stores the ONNX graph of the version with this explainer, as ``auditor export`` does; None does so where
    the version has a graph that lacks what this explainer reads, False leaves it.
    """
    from auditor.plugins.registry.onnx_exports import renew

    name = check_name(name or explainer.name or explainer.kind)
    place = resolve(uri, registered=True)
    own = subject if subject is not None and (subject.name, subject.version) == (place.name, place.version) else None
    own = own if own is not None else load_subject(uri)
    if explainer.subject_digest_ != own.digest:
        raise TamperError(
            f"attach {name}: the explainer was fitted to a model with digest {str(explainer.subject_digest_)[:12]}, "
            f"{place.label} has {own.digest[:12]}; fit it to this version."
        )
    with mlflow_errors(f"attach {name} to {place.label}"), tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        artifact = Path(folder) / "artifact"
        digest = explainer.save(artifact)
        location = f"explainers/{name}/{digest[:12]}"
        if _problem_at(place, location, digest, None):  # not there yet, or not whole
            place.repository().log_artifacts(str(artifact), location)
            problem = _problem_at(place, location, digest, own.digest)
            if problem:
                raise TamperError(f"attach {name}: the artifact store did not keep what was sent: {problem}")
        not_exported = renew(place, own, name, explainer, asked=bool(export)) if export is not False else ""
        stamp = datetime.now(timezone.utc).isoformat(timespec="seconds")
        value = {"location": location, "kind": explainer.kind, "digest": digest, "time": stamp}
        set_tag(place, TAG + name, json.dumps(value, sort_keys=True))
    explainer.name = name
    log_metrics(
        place,
        {f"explainer/{name}/{key}": float(value) for key, value in explainer.metrics.items()},
        run_name=f"attach {name} to {place.name}/{place.version}",
        data_digest=explainer.data_digest_,
    )
    if export and not_exported:
        raise ModelError(f"{name} is attached to {place.label}, but the ONNX graph was not exported: {not_exported}")
    return Attached(name, explainer.kind, digest, location, stamp, "", explainer.layer_, None, dict(explainer.metrics))


def list_attached(uri: str, *, subject: Subject | None = None) -> list[Attached]:
    """Return every explainer attached to a version, verified byte by byte and against the model itself."""
    place = resolve(uri, registered=True)
    tags = _tags(place)
    if not tags:
        return []
    own = subject if subject is not None else load_subject(uri)
    return [_look(place, name, value, own.digest) for name, value in tags.items()]


def load(uri: str, name: str, *, subject: Subject | None = None) -> Any:
    """Load an attached explainer after verifying every checksum and the model's digest."""
    place = resolve(uri, registered=True)
    entry = _entry(place, name)
    own = subject if subject is not None else load_subject(uri)
    from auditor.explainers.base import Explainer

    with mlflow_errors(f"load {name} of {place.label}"), tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        explainer = Explainer.load(download(place, entry["location"], Path(folder)), own, entry["digest"])
    if explainer.kind != entry["kind"]:
        raise TamperError(
            f"explainer {name} of {place.label}: its tag says {entry['kind']}, the artifact {explainer.kind}."
        )
    explainer.name = name
    return explainer


def detach(uri: str, name: str) -> None:
    """Remove an explainer from a version; its files stay in the artifact store, unseen."""
    place = resolve(uri, registered=True)
    _entry(place, name)
    with mlflow_errors(f"detach {name} of {place.label}"):
        from mlflow import MlflowClient

        MlflowClient().delete_model_version_tag(place.name, place.version, TAG + name)


def verify(uri: str, *, allow_pickle: bool | None = None) -> list[Attached]:
    """Return every attached explainer with its problem; ``subject.json`` and the ONNX graph where they have one."""
    from auditor.plugins.registry import onnx_exports as exports

    place = resolve(uri, registered=True)
    has_graph = exports.TAG in place.tags
    subject = load_subject(uri, allow_pickle=allow_pickle) if _tags(place) or has_graph else None
    found = list_attached(uri, subject=subject) if subject is not None else []
    try:
        if subject is not None:
            exports.load_export(place, subject)
    except AuditError as error:
        found.append(Attached(exports.FILE, "onnx", "", "auditor/exports", "", str(error)))
    try:
        with mlflow_errors(f"verify {place.label}"):
            check_notes(place)
    except AuditError as error:
        found.append(Attached("subject.json", "subject", "", "auditor", "", str(error)))
    return found


def names(uri: str) -> list[str]:
    """Return the names of what is attached, unverified."""
    place = resolve(uri, registered=True)
    return list(_tags(place))


def _tags(place: Place) -> dict[str, str]:
    return {key.removeprefix(TAG): value for key, value in sorted(place.tags.items()) if key.startswith(TAG)}


def _entry(place: Place, name: str) -> dict[str, str]:
    value = place.tags.get(TAG + name)
    if value is None:
        known = ", ".join(_tags(place)) or "none"
        raise ModelError(f"{place.label} has no explainer called {name!r}; attached are: {known}.")
    return _parse(value, name)


def _parse(value: str, name: str) -> dict[str, str]:
    try:
        entry = json.loads(value)
        return {key: str(entry[key]) for key in ("location", "kind", "digest", "time")}
    except (ValueError, KeyError, TypeError):
        raise TamperError(f"the tag {TAG}{name} is not what was attached; attach the explainer again.") from None


def _look(place: Place, name: str, value: str, subject_digest: str) -> Attached:
    try:
        entry = _parse(value, name)
    except AuditError as error:
        return Attached(name, "", "", "", "", str(error))
    from auditor.explainers.artifact import read_artifact

    known = (name, entry["kind"], entry["digest"], entry["location"], entry["time"])
    try:
        with mlflow_errors(f"explainer {name} of {place.label}"), tempfile.TemporaryDirectory() as folder:
            path = download(place, entry["location"], Path(folder))
            manifest = read_artifact(path, digest=entry["digest"], subject_digest=subject_digest).manifest
        if manifest["kind"] != entry["kind"]:
            raise TamperError(f"its tag says kind {entry['kind']}, the artifact {manifest['kind']}.")
    except AuditError as error:
        return Attached(*known, str(error))
    metrics = {k: float("nan") if v is None else float(v) for k, v in manifest["metrics"].items()}
    return Attached(*known, "", manifest["layer"], manifest["target"], metrics)


def _problem_at(place: Place, location: str, digest: str, subject_digest: str | None) -> str:
    """Return what is wrong with the artifact at a location, or nothing."""
    from auditor.explainers.artifact import read_artifact

    try:
        with tempfile.TemporaryDirectory(prefix="auditor-") as folder:
            read_artifact(download(place, location, Path(folder)), digest=digest, subject_digest=subject_digest)
    except AuditError as error:
        return str(error)
    return ""


def download(place: Place, location: str, folder: Path) -> Path:
    """Bring an artifact folder into a local one, and return where it is."""
    repository = place.repository()
    entries = repository.list_artifacts(location)
    if not entries:
        raise TamperError(
            f"{location} is missing from the artifact store of {place.label}; attach the explainer again."
        )
    for entry in entries:
        try:
            repository.download_artifacts(entry.path, str(folder))
        except OSError as error:
            raise TamperError(f"{entry.path} of {place.label} cannot be read ({error.strerror or error}).") from error
    return folder / location
