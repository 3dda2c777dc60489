"""Lineage: a network made out of an explainer, registered as a version of its own that says where it came from."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from auditor.errors import OptionError
from auditor.plugins.registry import tags
from auditor.plugins.registry.location import ModelVersion, mlflow_errors, resolve, set_tag
from auditor.plugins.registry.subjects import log_subject

if TYPE_CHECKING:
    from auditor.explainers.base import Explainer
    from auditor.release.repair import Repair
    from auditor.subject.subject import Subject


def register_network(explainer: Any, uri: str | ModelVersion, *, subject: Subject) -> str:
    """Register the network inside an attached explainer as the next version of its model; return the version's URI.

    ``subject`` is the model the explainer was fitted to, loaded from ``uri``. The new version's tag ``auditor.lineage``
    names the source version, its digest, and the explainer with its digest.
    """
    check_has_network(type(explainer))
    if explainer.digest_ is None:
        raise OptionError(
            "register: the explainer is not stored yet; attach it first, so that the lineage can name it."
        )
    version = resolve(uri, registered=True)
    with explainer.network(subject) as made:
        return _register(made, explainer, version, subject, "")


def register_repair(repair: Repair, explainer: Any, uri: str | ModelVersion, *, subject: Subject) -> str:
    """Register a model without some concepts as the next version of its model; return the version's URI."""
    change = repair.words
    with repair.network(subject) as made:
        return _register(made, explainer, resolve(uri, registered=True), subject, change)


def _register(made: Subject, explainer: Any, version: ModelVersion, subject: Subject, change: str) -> str:
    with mlflow_errors(f"register the network of {explainer.name}"):
        from mlflow import MlflowClient

        experiment = MlflowClient().get_experiment(version.experiment_id).name
    new = log_subject(made, version.name, experiment=experiment)
    tag = tags.LineageTag(
        source=version.label,
        source_digest=subject.digest,
        explainer=explainer.name,
        explainer_digest=explainer.digest_,
        kind=explainer.kind,
        layer=explainer.layer_,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        change=change,
    )
    with mlflow_errors(f"register the network of {explainer.name}"):
        set_tag(resolve(new, registered=True), tags.LINEAGE, tag.encode())
    return new


def check_has_network(cls: type[Explainer]) -> None:
    """Refuse a kind that has no network of its own, before it is fitted."""
    if not cls.makes_network:
        raise OptionError(f"register: kind {cls.kind} makes no network of its own.")
