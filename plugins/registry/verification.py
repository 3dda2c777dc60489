"""Verification: everything stored beside a version, checked byte by byte: explainers, ONNX graph, ``subject.json``."""

from __future__ import annotations

from auditor.errors import AuditError
from auditor.plugins.registry import tags
from auditor.plugins.registry.attachments import Attached, list_attached
from auditor.plugins.registry.location import ModelVersion, mlflow_errors, resolve
from auditor.plugins.registry.onnx_exports import FILE, load_export
from auditor.plugins.registry.subjects import check_notes, load_subject


def verify(uri: str | ModelVersion, *, allow_pickle: bool | None = None) -> list[Attached]:
    """Return every attached explainer with its problem; ``subject.json`` and the ONNX graph where they have one."""
    version = resolve(uri, registered=True)
    results: list[Attached] = []
    if tags.explainer_names(version.tags) or tags.ONNX in version.tags:
        subject = load_subject(version, allow_pickle=allow_pickle)
        results = list_attached(version, subject=subject)
        try:
            load_export(version, subject)
        except AuditError as error:
            results.append(Attached(FILE, "onnx", "", "auditor/exports", "", str(error)))
    try:
        with mlflow_errors(f"verify {version.label}"):
            check_notes(version)
    except AuditError as error:
        results.append(Attached("subject.json", "subject", "", "auditor", "", str(error)))
    return results
