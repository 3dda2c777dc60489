"""Verification: a version byte by byte: model files, explainers, graph, audit, verdict, tags, history, leftovers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from auditor.errors import AuditError, TamperError
from auditor.plugins.registry import history, leftovers, logged_state, tags
from auditor.plugins.registry.attachments import Attached, list_attached
from auditor.plugins.registry.audits import check_audit, latest_audit
from auditor.plugins.registry.location import ModelVersion, mlflow_errors, resolve
from auditor.plugins.registry.model_record import VersionModel
from auditor.plugins.registry.onnx_exports import FILE, check_graph
from auditor.plugins.registry.studies import check_studies
from auditor.plugins.registry.subjects import check_notes
from auditor.plugins.registry.verdicts import latest_verdict

if TYPE_CHECKING:
    from auditor.auditing.record import Audit
    from auditor.subject.subject import Subject


def verify(
    uri: str | ModelVersion, *, allow_pickle: bool | None = None, subject: Subject | None = None
) -> list[Attached]:
    """Return every attached explainer with its problem, and everything else of the version that has one.

    ``subject`` saves reading the model again; its files are then not looked at. The model is loaded only where its
    files alone do not show that it is the one that was fitted to and audited.
    """
    version = resolve(uri, registered=True)
    model = VersionModel(version, allow_pickle, subject)
    results: list[Attached] = []
    try:
        model.record  # noqa: B018  its files are compared with the pin
    except TamperError as error:
        results.append(Attached("model", "model", "", "", "", str(error)))
    else:
        results = list_attached(version, model=model)
        try:
            check_graph(version, model, _audit(version))
        except AuditError as error:
            results.append(Attached(FILE, "onnx", "", "auditor/exports", "", str(error)))
    for name, kind, check in (
        ("subject.json", "subject", check_notes),
        ("audit", "audit", check_audit),
        ("verdict", "verdict", latest_verdict),
        ("studies", "study", check_studies),
        ("history", "history", _check_history),
    ):
        problem = _problem(version, check)
        if problem:
            results.append(Attached(name, kind, "", "auditor", "", problem))
    for left in leftovers.check(version):
        if left.problem:
            results.append(Attached(left.location, "leftover", "", left.location, "", left.problem))
    for key in tags.altered(version.tags):
        results.append(Attached(key, "tag", "", "", "", f"the tag {key} is not as it was written; restore it."))
    return results


def _audit(version: ModelVersion) -> Audit | None:
    """Return the stored audit if it verifies; what is wrong with it is reported by itself."""
    try:
        return latest_audit(version)
    except AuditError:
        return None


def _problem(version: ModelVersion, check: Callable[[ModelVersion], object]) -> str:
    try:
        with mlflow_errors(f"verify {version.label}"):
            check(version)
    except AuditError as error:
        return str(error)
    return ""


def _check_history(version: ModelVersion) -> None:
    """Raise when the version is not what its model's history says, or names an entry that is not there."""
    heads = {version.version: version.tags[tags.LOG]} if tags.LOG in version.tags else {}
    entries = history.verify(history.entries(version.name), heads=heads)
    for entry in entries:
        if entry.problem:
            raise TamperError(f"the tag {tags.LOG} or the history of {version.name}: {entry.problem}.")
    if problem := logged_state.contradiction(version, entries):
        raise TamperError(f"{problem}.")
