"""Lineage: a network made out of an explainer, registered as a version of its own that says where it came from."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
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


def register_trained(
    made: Subject,
    source: str | ModelVersion | None,
    name: str,
    *,
    source_digest: str,
    change: str,
    curves: Sequence[Sequence[float]],
    picture: Path,
) -> str:
    """Register a network that was trained here, with its curves in a run; return the version's URI.

    It is the next version of ``source``, whose network (of ``source_digest``) it was trained from, or the model
    ``name``. ``curves`` are the accuracies of each seed by epoch.
    """
    version = None if source is None else resolve(source, registered=True)
    with mlflow_errors(f"register {name}"):
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        client, experiment = MlflowClient(), None
        if version is not None:
            name, experiment = version.name, client.get_experiment(version.experiment_id).name
    new = log_subject(made, name, experiment=experiment)
    with mlflow_errors(f"store the curves of {name}"):
        registered, now = resolve(new, registered=True), datetime.now(timezone.utc)
        run = client.create_run(registered.experiment_id, run_name=f"train {name}").info.run_id
        stamp = int(now.timestamp() * 1000)
        entries = [
            Metric(f"accuracy/seed_{seed}", value, stamp, epoch)
            for seed, accuracies in enumerate(curves)
            for epoch, value in enumerate(accuracies, 1)
        ]
        for start in range(0, len(entries), 500):  # MLflow takes at most 1000 at once
            client.log_batch(run, metrics=entries[start : start + 500])
        client.log_artifact(run, str(picture))
        client.set_terminated(run)
        tag = tags.LineageTag(
            source="" if version is None else version.label,
            source_digest=source_digest,
            time=now.isoformat(timespec="seconds"),
            change=f"{change}; curves in run {run}",
        )
        set_tag(registered, tags.LINEAGE, tag.encode())
    return new


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
