"""Lineage: a network made out of an explainer, registered as a version of its own that says where it came from."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from auditor.errors import OptionError
from auditor.plugins.registry.subjects import log_subject
from auditor.plugins.registry.location import mlflow_errors, resolve, set_tag

if TYPE_CHECKING:
    from auditor.subject.subject import Subject

LINEAGE_TAG = "auditor.lineage"


def register_network(explainer: Any, uri: str, *, subject: Subject) -> str:
    """Register the network inside an attached explainer as the next version of its model; return the version's URI.

    ``subject`` is the model the explainer was fitted to, loaded from ``uri``. The new version's tag ``auditor.lineage``
    names the source version, its digest, and the explainer with its digest.
    """
    check_has_network(type(explainer))
    if explainer.digest_ is None:
        raise OptionError(
            "register: the explainer is not stored yet; attach it first, so that the lineage can name it."
        )
    place = resolve(uri, registered=True)
    with mlflow_errors(f"register the network of {explainer.name}"):
        from mlflow import MlflowClient

        experiment = MlflowClient().get_experiment(place.experiment_id).name
    with explainer.network(subject) as made:
        new = log_subject(made, place.name, experiment=experiment)
    told = {
        "source": place.label,
        "source_digest": subject.digest,
        "explainer": explainer.name,
        "explainer_digest": explainer.digest_,
        "kind": explainer.kind,
        "layer": explainer.layer_,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    with mlflow_errors(f"register the network of {explainer.name}"):
        set_tag(resolve(new, registered=True), LINEAGE_TAG, json.dumps(told, sort_keys=True))
    return new


def check_has_network(cls: type) -> None:
    """Refuse a kind that has no network of its own."""
    if not hasattr(cls, "network"):
        kind = getattr(cls, "kind", cls.__name__)
        raise OptionError(f"register: kind {kind} makes no network of its own; only deepfacto does.")
