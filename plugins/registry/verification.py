"""Verification: a version byte by byte: model files, explainers, graph, audit, verdict, tags, history, leftovers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from auditor.errors import AuditError, TamperError
from auditor.plugins.registry import history, leftovers, tags
from auditor.plugins.registry.attachments import Attached, list_attached
from auditor.plugins.registry.audits import check_audit
from auditor.plugins.registry.location import ModelVersion, mlflow_errors, resolve
from auditor.plugins.registry.onnx_exports import FILE, check_export
from auditor.plugins.registry.studies import check_studies
from auditor.plugins.registry.subjects import check_notes, load_subject
from auditor.plugins.registry.verdicts import latest_verdict

if TYPE_CHECKING:
    from auditor.subject.subject import Subject


def verify(
    uri: str | ModelVersion, *, allow_pickle: bool | None = None, subject: Subject | None = None
) -> list[Attached]:
    """Return every attached explainer with its problem, and everything else of the version that has one.

    ``subject`` saves loading the model again; its files are then not looked at.
    """
    version = resolve(uri, registered=True)
    results: list[Attached] = []
    try:
        if subject is None:
            subject = load_subject(version, allow_pickle=allow_pickle)
    except TamperError as error:
        results.append(Attached("model", "model", "", "", "", str(error)))
    else:
        results = list_attached(version, subject=subject)
        try:
            check_export(version, subject)
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


def _problem(version: ModelVersion, check: Callable[[ModelVersion], object]) -> str:
    try:
        with mlflow_errors(f"verify {version.label}"):
            check(version)
    except AuditError as error:
        return str(error)
    return ""


def _check_history(version: ModelVersion) -> None:
    """Raise when the version names an entry of its model's history that is not there, or the history is not whole."""
    heads = {version.version: version.tags[tags.LOG]} if tags.LOG in version.tags else {}
    for entry in history.verify(history.entries(version.name), heads=heads):
        if entry.problem:
            raise TamperError(f"the tag {tags.LOG} or the history of {version.name}: {entry.problem}.")
