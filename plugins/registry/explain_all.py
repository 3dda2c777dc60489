"""Explain all: every image of a source by what is attached to a version, into a folder of Parquet files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from auditor.errors import ModelError
from auditor.plugins.registry.attachments import names as attached_names
from auditor.plugins.registry.explain_image import explained_version
from auditor.plugins.registry.location import resolve
from auditor.plugins.registry.subjects import load_subject

if TYPE_CHECKING:
    from auditor.explainers.answer_options import AnswerOptions
    from auditor.explainers.explain_runs import Explained


def explain_version(
    uri: str,
    data: Any,
    out: str,
    options: AnswerOptions,
    *,
    allow_pickle: bool | None = None,
    progress: Any = None,
) -> Explained:
    """Explain every image of ``data`` by what is attached to a version; see `auditor.explainers.explain_runs`.

    Workers of a cluster load the version and its explainers from the registry themselves, and verify them there.
    """
    from auditor.data.source import open_data
    from auditor.explainers.answer import class_of
    from auditor.explainers.explain_runs import explain_all
    from auditor.progress import silent

    version = resolve(uri, registered=True)
    if not attached_names(version):
        raise ModelError(f"nothing is attached to {uri}; fit something first: auditor fit nmf {uri} --data DATA.")
    subject = load_subject(version, allow_pickle=allow_pickle)
    if options.target is not None:
        class_of(subject, options.target)  # before artifacts are fetched
    model = explained_version(version, subject, options)
    return explain_all(model, open_data(data), out, options, progress=progress or silent)
