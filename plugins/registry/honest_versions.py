"""Honest versions: earlier versions of a registered model that passed a gate, for the noise of retraining."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from auditor.errors import AuditError, OptionError
from auditor.plugins.registry import tags
from auditor.plugins.registry.location import ModelVersion, mlflow_errors, resolve
from auditor.plugins.registry.subjects import load_subject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from auditor.subject.subject import Subject

log = logging.getLogger(__name__)
MOST = 3  # versions beside the baseline: six pairs


def passed_before(version: ModelVersion, baseline: ModelVersion, data_digest: str) -> list[str]:
    """Return the URIs of versions that passed a gate on an audit of the same data, newest first, without these two."""
    from mlflow import MlflowClient

    if not version.name or version.name != baseline.name:
        return []
    with mlflow_errors(f"versions of {version.name}"):
        quote = "'" if "'" not in version.name else '"'
        entries = MlflowClient().search_model_versions(f"name = {quote}{version.name}{quote}", max_results=200)
    uris = []
    for entry in sorted(entries, key=lambda v: -int(v.version)):
        gate, audit = tags.gate_tag(entry.tags), tags.audit_tag(entry.tags)
        number = int(entry.version)  # text or a number, by the store
        if number in (int(version.version), int(baseline.version)) or gate is None or audit is None:
            continue
        if number < int(version.version) and gate.verdict == "pass" and audit.data_digest == data_digest:
            uris.append(f"models:/{entry.name}/{entry.version}")
    return uris


def honest_subjects(
    a: Subject, named: Sequence[str], earlier: Sequence[str] = (), *, allow_pickle: bool | None = None
) -> dict[str, Subject]:
    """Load honest versions by URI: those given, which must be like ``a``, else as many earlier ones as are."""
    subjects: dict[str, Subject] = {}
    for uri in named:
        subject = load_subject(resolve(uri), allow_pickle=allow_pickle)
        if not same_architecture(a, subject):
            raise OptionError(
                f"--honest {uri}: it has other layers, images or classes than the first version, so its training is "
                "not the only difference; give versions of the same architecture."
            )
        if subject.identity.weights in _weights(a, subjects):
            raise OptionError(f"--honest {uri}: it is the same model as another one given; give other trainings.")
        subjects[uri] = subject
    if named:
        return subjects
    for uri in earlier:
        try:
            subject = load_subject(resolve(uri), allow_pickle=allow_pickle)
        except AuditError as error:
            log.info("%s is left out of the retraining noise: %s", uri, error)
            continue
        if same_architecture(a, subject) and subject.identity.weights not in _weights(a, subjects):
            subjects[uri] = subject
        if len(subjects) == MOST:
            break
    return subjects


def _weights(a: Subject, subjects: Mapping[str, Subject]) -> set[str]:
    """Return the digests of weights that are there already: equal weights are no other training."""
    return {subject.identity.weights for subject in (a, *subjects.values())}


def same_architecture(a: Subject, b: Subject) -> bool:
    """Whether two models have the same layers, images and classes."""

    def shape(subject: Subject) -> tuple[Any, ...]:
        weights = [(name, tuple(p.shape)) for name, p in subject.module.state_dict().items()]
        return weights, tuple(subject.input_shape), tuple(subject.class_names)

    return shape(a) == shape(b)
