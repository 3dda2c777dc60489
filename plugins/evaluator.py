"""Evaluator: ``mlflow.models.evaluate("models:/m/1", data, evaluators="auditor", …)`` runs an audit.

MLflow imports this module for everybody who has the plugin installed, so its top is light: torch loads when an
evaluation begins. Called for "all evaluators", it runs for every kind of model and returns nothing for one without images.
"""  # noqa: E501

from __future__ import annotations

import hashlib
import json
import logging
import math
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow.exceptions import MlflowException
from mlflow.models.evaluation.base import EvaluationResult, ModelEvaluator

from auditor.errors import AuditError, ModelError, OptionError

if TYPE_CHECKING:
    from auditor.auditing.config import AuditConfig
    from auditor.auditing.record import Audit
    from auditor.plugins.registry.location import ModelVersion
    from auditor.subject.subject import Subject

log = logging.getLogger(__name__)

OWN_KEYS = ("allow_pickle", "image_column", "model_uri", "store")
OTHER_TASKS = ("regressor", "question-answering", "text-summarization", "text", "retriever")
AT_ONCE = 500  # MLflow takes at most 1000 metrics per call


class AuditEvaluator(ModelEvaluator):
    """Audits an image classifier with every explainer attached to it.

    ``evaluator_config`` may hold what ``auditor audit`` takes (``seed``, ``images``, ``explainers``, …) and ``model_uri``
    (which version's explainers to audit, when MLflow does not say), ``image_column`` of a table, ``store`` (keep the audit with the version, for the gate and the Audits page), ``allow_pickle``. Unknown keys are
    refused. Metrics land on the run and on the logged model; the report and the audit are artifacts of the run.
    """  # noqa: E501

    name = "auditor"

    @classmethod
    def can_evaluate(cls, *, model_type: str, evaluator_config: dict[str, Any], **kwargs: Any) -> bool:
        """Whether this may be an image classifier; MLflow passes no more than the type here."""
        return model_type not in OTHER_TASKS

    def evaluate(
        self,
        *,
        model_type: str,
        dataset: Any,
        run_id: str,
        evaluator_config: dict[str, Any],
        model: Any = None,
        model_id: str | None = None,
        **kwargs: Any,
    ) -> EvaluationResult | None:
        """Audit and return metrics and artifacts; None for a model without images when no option is ours."""
        config = dict(evaluator_config or {})
        reason = _not_for_us(model, dataset)
        if reason and not set(config) & set(OWN_KEYS):
            log.warning("the auditor evaluator does nothing here: %s", reason)
            return None
        try:
            return self._audit(config, dataset, run_id, model, model_id)
        except AuditError as error:
            raise MlflowException.invalid_parameter_value(" ".join(str(error).split())) from error

    def _audit(
        self, config: dict[str, Any], dataset: Any, run_id: str, model: Any, model_id: str | None
    ) -> EvaluationResult:
        ours, effort = split_config(config)
        from auditor.auditing.audit import audit
        from auditor.plugins.registry.audits import attached_explainers, store_audit
        from auditor.plugins.registry.location import resolve
        from auditor.plugins.registry.subjects import load_subject
        from auditor.plugins.table_images import data_of

        uri = ours.get("model_uri") or _uri_of(model, model_id)
        version = resolve(uri)
        subject = load_subject(version, allow_pickle=ours.get("allow_pickle"))
        _check_same(model, subject, uri)
        explainers, broken = attached_explainers(version, subject)
        data = data_of(dataset, subject, ours.get("image_column"))
        command = f"mlflow.models.evaluate({uri!r}, …, evaluators='auditor')"
        result = audit(subject, data, explainers, effort, broken=broken, command=command)
        metrics = {k: m.value for k, m in result.metrics.items() if m.status == "passed" and math.isfinite(m.value)}
        if model_id is None:  # else MLflow logs what we return, to the run and to the logged model
            _log_metrics(metrics, run_id, version, dataset, result)
        if ours.get("store"):
            if not version.name:
                raise OptionError(f"store: {uri} is no version of a registered model, so there is nowhere to store it.")
            store_audit(result, version)
        artifacts = _log_artifacts(result, run_id)
        return EvaluationResult(metrics=metrics, artifacts=artifacts, run_id=run_id)  # type: ignore[no-untyped-call]


def split_config(config: dict[str, Any]) -> tuple[dict[str, Any], AuditConfig]:
    """Return the options of this plugin and the audit's; an unknown key or a value out of range is an error."""
    from pydantic import ValidationError

    from auditor.auditing.config import AuditConfig

    ours = {k: v for k, v in config.items() if k in OWN_KEYS}
    unknown = sorted(set(config) - set(OWN_KEYS) - set(AuditConfig.model_fields))
    if unknown:
        allowed = ", ".join(sorted({*OWN_KEYS, *AuditConfig.model_fields}))
        raise OptionError(f"evaluator_config: unknown {', '.join(map(str, unknown))}; the auditor takes {allowed}.")
    try:
        return ours, AuditConfig(**{k: v for k, v in config.items() if k not in OWN_KEYS})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise OptionError(f"evaluator_config: {where}: {first['msg'].lower()}, got {first['input']!r}.") from None


def _not_for_us(model: Any, dataset: Any) -> str:
    """Return why this is no image model on images; empty when it may be one."""
    from auditor.plugins.table_images import holds_images

    flavors = getattr(getattr(model, "metadata", None), "flavors", None)
    if not flavors or "pytorch" not in flavors:
        return "the model is no MLflow model of flavor pytorch"
    schema = model.metadata.get_input_schema()
    if schema is not None and not (schema.is_tensor_spec() and len(schema.inputs[0].shape) == 4):
        return "the model takes no image tensors"
    return "" if holds_images(dataset) else "the data holds no images"


def _uri_of(model: Any, model_id: str | None) -> str:
    """Return the registered version of the model that is evaluated, or the logged model when it is not registered."""
    from mlflow import MlflowClient

    from auditor.plugins.registry.location import mlflow_errors

    logged_id = model_id or getattr(model, "model_id", None)
    if not logged_id:
        raise ModelError(
            "MLflow does not say which version of which model this is; name it: "
            "evaluator_config={'model_uri': 'models:/name/3'}."
        )
    with mlflow_errors(f"model {logged_id}"):
        versions = MlflowClient().search_model_versions(f"source_path = 'models:/{logged_id}'")
    if len(versions) > 1:
        names = ", ".join(sorted(f"models:/{v.name}/{v.version}" for v in versions)[:6])
        raise ModelError(f"this model is registered as {names}; say which: evaluator_config={{'model_uri': …}}.")
    return f"models:/{versions[0].name}/{versions[0].version}" if versions else f"models:/{logged_id}"


def _check_same(model: Any, subject: Subject, uri: str) -> None:
    """Refuse to audit another model than the one MLflow evaluates: a stale id, or a model_uri that was mistyped."""
    try:
        state = model.get_raw_model().state_dict()
    except (AttributeError, NotImplementedError):
        return
    if _weights(state) != _weights(subject.module.state_dict()):
        raise ModelError(f"{uri} is another model than the one given to evaluate; their weights differ.")


def _weights(state: Any) -> Counter[str]:
    """Return the digests of all tensors, whatever their names: exporting may rename them."""
    import torch

    tensors = (t.detach().cpu().contiguous() for t in state.values() if isinstance(t, torch.Tensor))
    return Counter(
        hashlib.sha256(
            f"{t.dtype}|{tuple(t.shape)}".encode() + t.reshape(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for t in tensors
    )


def _log_metrics(metrics: dict[str, float], run_id: str, version: ModelVersion, dataset: Any, result: Audit) -> None:
    """Log metrics to the run and, where there is one, to the logged model, against the data set."""
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModelInput, Metric

    from auditor.plugins.image_dataset import DIGEST_LENGTH

    now = int(time.time() * 1000)
    client = MlflowClient()
    digest = str(result.data["digest"])[:DIGEST_LENGTH]
    name = str(dataset.name or "dataset")
    entries = [
        Metric(k, v, now, 0, model_id=version.model_id, dataset_name=name, dataset_digest=digest)
        for k, v in metrics.items()
    ]
    if version.model_id is not None:
        client.log_inputs(run_id, models=[LoggedModelInput(version.model_id)])
    for start in range(0, len(entries), AT_ONCE):
        client.log_batch(run_id, metrics=entries[start : start + AT_ONCE])


def _log_artifacts(result: Audit, run_id: str) -> dict[str, Any]:
    """Log report and audit to the run, below ``auditor/``, and return them as MLflow's artifacts."""
    from mlflow import MlflowClient
    from mlflow.models.evaluation import artifacts

    from auditor.plugins.registry.tags import RUN_AUDIT
    from auditor.reports.audit_report import report_html

    client = MlflowClient()
    sealed, page = result.sealed(), report_html(result)
    with tempfile.TemporaryDirectory(prefix="auditor-") as folder:
        (Path(folder) / "audit.json").write_bytes(sealed)
        (Path(folder) / "report.html").write_text(page, encoding="utf-8")
        client.log_artifacts(run_id, folder, "auditor")
    client.set_tag(run_id, RUN_AUDIT, result.digest)
    root = client.get_run(run_id).info.artifact_uri
    kinds: Any = artifacts  # untyped there
    return {
        "audit.json": kinds.JsonEvaluationArtifact(f"{root}/auditor/audit.json", json.loads(sealed)),
        "report.html": kinds.TextEvaluationArtifact(f"{root}/auditor/report.html", page),
    }
