"""Attachments: explainers attached to model versions.

The artifact folder goes to ``explainers/<name>/<digest12>/`` beside the model, so nothing is ever overwritten; then one
tag on the version, ``auditor.explainer.<name>``, points to it. The tag is the commit point: before it nothing is
visible, after it everything is. Detaching removes the tag.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.errors import AuditError, ModelError, OptionError, TamperError
from auditor.plugins.registry import history, tags
from auditor.plugins.registry.attestations import sign_artifact
from auditor.plugins.registry.location import ModelVersion, mlflow_errors, resolve, set_tag
from auditor.plugins.registry.metrics_log import logged_metrics
from auditor.plugins.registry.model_files import pin
from auditor.plugins.registry.model_record import VersionModel
from auditor.plugins.registry.origins import AttachedExplainer, Registry
from auditor.plugins.registry.subjects import load_subject
from auditor.plugins.registry.tags import ExplainerTag

if TYPE_CHECKING:
    from auditor.explainers.base import Explainer
    from auditor.subject.identity import Identity
    from auditor.subject.subject import Subject

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")


@dataclass(frozen=True, slots=True)
class Attached:
    """One attached explainer, by its tag and its manifest; ``problem`` is empty when it verifies."""

    name: str
    kind: str
    digest: str
    location: str  # relative to the model's artifact folder
    time: str
    problem: str = ""
    layer: str | None = None
    target: int | str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    headline: tuple[str, ...] = ()  # names of the metrics that sum up the fit; artifacts before 0.2 name none
    needs: str = ""  # what to install before it can be used here, when its kind is missing
    digest_version: int = 2  # 1: of the first release, which compares the model's weights alone

    @property
    def verified(self) -> bool:
        """Whether every byte and the model itself are what was attached."""
        return not self.problem

    def to_json(self) -> dict[str, Any]:
        """Return what ``auditor list --json`` prints."""
        entry = {
            k: getattr(self, k) for k in ("name", "kind", "digest", "layer", "target", "location", "time", "metrics")
        }
        return {
            **entry,
            "verified": self.verified,
            "problem": self.problem,
            "needs": self.needs,
            "digest_version": self.digest_version,
        }


def check_name(name: str) -> str:
    """Return a name that can stand in tags and paths, or an error."""
    if not NAME.match(name):
        raise OptionError(
            f"explainer name {name!r}: want 1 to 64 letters, digits, '_', '-' or '.', starting with a letter or digit."
        )
    return name


def attach(
    explainer: Explainer,
    uri: str | ModelVersion,
    name: str | None = None,
    *,
    subject: Subject | None = None,
    attach_anyway: bool = False,
    before_commit: Callable[[ModelVersion, Subject, str], None] | None = None,
    action: str = "attach",
) -> Attached:
    """Attach a fitted explainer to a model version: ``attach(concepts, "models:/m@champion", name="concepts")``.

    ``subject`` saves loading the model again when it was loaded from the same version. Killed at any moment, readers
    see the old state or the new one. Attaching under a name again replaces what the name points to; nothing is deleted.
    One that does not stand in for the model (`Explainer.shortcomings`) is refused unless ``attach_anyway``.
    ``before_commit(version, subject, name)`` is called when the artifact is stored and not yet visible. ``action`` is
    what the model's history calls it.
    """
    name = check_name(name or explainer.name or explainer.kind)
    current = (
        uri.label if isinstance(uri, ModelVersion) else uri
    )  # with the tags of now: fitting may have taken an hour
    version = resolve(current, registered=True)
    if subject is None or (subject.name, subject.version) != (version.name, version.version):
        subject = load_subject(version)
    try:
        explainer.check_subject(subject)
    except TamperError as error:
        raise TamperError(f"attach {name} to {version.label}: {error}") from None
    if not attach_anyway:
        explainer.check_stands_in()
    with mlflow_errors(f"attach {name} to {version.label}"), tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        artifact = Path(folder) / "artifact"
        digest = explainer.save(artifact, subject)
        location = f"explainers/{name}/{digest[:12]}"
        if _problem_at(version, location, digest, None):  # not there yet, or not whole
            version.repository().log_artifacts(str(artifact), location)
            problem = _problem_at(version, location, digest, subject.identity)
            if problem:
                raise TamperError(f"attach {name}: the artifact store did not keep what was sent: {problem}")
        pin(version, subject)
        sign_artifact(version, artifact, digest)
        if before_commit is not None:
            before_commit(version, subject, name)
        stamp = datetime.now(timezone.utc).isoformat(timespec="seconds")
        tag = ExplainerTag(name, explainer.kind, digest, location, stamp)
        run_name = f"attach {name} to {version.name}/{version.version}"
        metrics = {f"explainer/{name}/fit/{key}": float(value) for key, value in explainer.metrics.items()}
        with (
            history.noted(version, action, {f"explainer/{name}": digest}),
            logged_metrics(version, metrics, run_name=run_name, data_digest=explainer.data_digest_),
        ):
            set_tag(version, tags.EXPLAINER + name, tag.encode())
    explainer.name = name
    return Attached(name, explainer.kind, digest, location, stamp, "", explainer.layer_, None, dict(explainer.metrics))


def list_attached(
    uri: str | ModelVersion,
    *,
    subject: Subject | None = None,
    model: VersionModel | None = None,
    allow_pickle: bool | None = None,
) -> list[Attached]:
    """Return every explainer attached to a version, verified byte by byte and against the model itself.

    ``subject``, or the version's ``model``, saves reading it again. It is loaded only where its files alone do not show
    that it is the one that was fitted to.
    """
    version = resolve(uri, registered=True)
    attached = tags.explainer_tags(version.tags)
    if not attached:
        return []
    model = model if model is not None else VersionModel(version, allow_pickle, subject)
    entries = [_verified(version, tag, model.record.identity) for tag in attached]
    if model.is_loaded or all(entry.verified for entry in entries):
        return entries
    identity = model.subject.identity
    return [
        entry if entry.verified else _verified(version, tag, identity)
        for entry, tag in zip(entries, attached, strict=True)
    ]


def load(uri: str | ModelVersion, name: str, *, subject: Subject | None = None) -> Any:
    """Load an attached explainer after verifying every checksum and the model's digest."""
    version = resolve(uri, registered=True)
    tag = _tag(version, name).usable()
    subject = subject if subject is not None else load_subject(version)
    from auditor.explainers.base import Explainer

    with mlflow_errors(f"load {name} of {version.label}"), tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        explainer = Explainer.load(version.download(tag.location, Path(folder)), subject, tag.digest)
    check_kind(tag, explainer.kind)
    explainer.name = name
    explainer.origin = AttachedExplainer(Registry.here(), version, name, subject)
    return explainer


def detach(uri: str | ModelVersion, name: str) -> None:
    """Remove an explainer from a version; its files stay in the artifact store, unseen."""
    version = resolve(uri, registered=True)
    tag = _tag(version, name)
    with mlflow_errors(f"detach {name} of {version.label}"):
        from mlflow import MlflowClient

        with history.noted(version, "detach", {f"explainer/{name}": tag.digest}):
            MlflowClient().delete_model_version_tag(version.name, version.version, tags.EXPLAINER + name)


def names(uri: str | ModelVersion) -> list[str]:
    """Return the names of what is attached, unverified."""
    version = resolve(uri, registered=True)
    return tags.explainer_names(version.tags)


def attached_layer(version: ModelVersion, name: str) -> str | None:
    """Return the layer that an attached explainer reads, off its manifest; nothing else is fetched."""
    from auditor.explainers.manifest import MANIFEST, unseal

    tag = _tag(version, name)
    tag.usable()
    with mlflow_errors(f"{name} of {version.label}"), tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        content = Path(version.repository().download_artifacts(f"{tag.location}/{MANIFEST}", folder)).read_bytes()
    if hashlib.sha256(content).hexdigest() != tag.digest:
        raise TamperError(f"{MANIFEST} of explainer {name} of {version.label} is not what was attached.")
    layer = unseal(content, f"{MANIFEST} of explainer {name}")["layer"]
    return None if layer is None else str(layer)


def _tag(version: ModelVersion, name: str) -> ExplainerTag:
    tag = tags.explainer_tag(version.tags, name)
    if tag is None:
        attached = ", ".join(tags.explainer_names(version.tags)) or "none"
        raise ModelError(f"{version.label} has no explainer called {name!r}; attached are: {attached}.")
    return tag


def _verified(version: ModelVersion, tag: ExplainerTag, identity: Identity) -> Attached:
    """Return an attached explainer with what is wrong with it."""
    from auditor.explainers.artifact import read_manifest

    entry = (tag.name, tag.kind, tag.digest, tag.location, tag.time)
    try:
        tag.usable()
        with mlflow_errors(f"explainer {tag.name} of {version.label}"), tempfile.TemporaryDirectory() as folder:
            path = version.download(tag.location, Path(folder))
            manifest = read_manifest(path, digest=tag.digest, identity=identity)
        check_kind(tag, manifest["kind"])
    except AuditError as error:
        return Attached(*entry, str(error))
    metrics = {k: float("nan") if v is None else float(v) for k, v in manifest["metrics"].items()}
    needs = _missing_kind(manifest)
    covers = 2 if "subject" in manifest else 1
    headline = tuple(str(name) for name in manifest.get("headline", ()))
    return Attached(*entry, "", manifest["layer"], manifest["target"], metrics, headline, needs, covers)


def _missing_kind(manifest: dict[str, Any]) -> str:
    """Return what to install for an artifact whose kind is not here; nothing of the kind's package is imported."""
    from auditor.explainers.kinds import find_kind

    try:
        find_kind(manifest["kind"], manifest.get("provider"))
    except AuditError as error:
        return str(error)
    return ""


def check_kind(tag: ExplainerTag, kind: Any) -> None:
    """Raise when an artifact is not of the kind that its tag names."""
    if kind != tag.kind:
        raise TamperError(f"explainer {tag.name}: its tag says kind {tag.kind}, the artifact {kind}.")


def _problem_at(version: ModelVersion, location: str, digest: str, identity: Identity | None) -> str:
    """Return what is wrong with the artifact at a location, or nothing."""
    from auditor.explainers.artifact import read_artifact

    try:
        with tempfile.TemporaryDirectory(prefix="auditor-") as folder:
            read_artifact(version.download(location, Path(folder)), digest=digest, identity=identity)
    except AuditError as error:
        return str(error)
    return ""
