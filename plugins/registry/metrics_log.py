"""Metrics into MLflow: against the logged model and the data set, in a run of their own."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from auditor.plugins.registry.location import ModelVersion

if TYPE_CHECKING:
    from mlflow.entities import Metric

log = logging.getLogger(__name__)
AT_ONCE = 500  # MLflow takes at most 1000 per call


@contextmanager
def logged_metrics(
    version: ModelVersion,
    metrics: Mapping[str, float],
    *,
    run_name: str,
    data_digest: str | None,
    on_page: Collection[str] | None = None,
) -> Iterator[None]:
    """Log finite metrics by their full names, then commit inside the block what they are about.

    All of them stand together in a run of their own; those of ``on_page`` (default: all) also on the model's page.

    When the block fails, the run goes too: no run describes what was never committed. Metrics that MLflow refuses are
    a warning, since what took an hour to fit is committed all the same.
    """
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client = MlflowClient()
    run_id = None
    try:
        with _refusal_is_a_warning(run_name):
            run_id = client.create_run(version.experiment_id, run_name=run_name).info.run_id
            entries = _entries(version, metrics, data_digest, on_page)
            for start in range(0, len(entries), AT_ONCE):
                client.log_batch(run_id, metrics=entries[start : start + AT_ONCE])
        yield
    except BaseException:
        if run_id is not None:
            with suppress(MlflowException):
                client.delete_run(run_id)
        raise
    if run_id is not None:
        with _refusal_is_a_warning(run_name):
            client.set_terminated(run_id)


def _entries(
    version: ModelVersion, metrics: Mapping[str, float], data_digest: str | None, on_page: Collection[str] | None
) -> list[Metric]:
    from mlflow.entities import Metric

    about: dict[str, Any] = {"model_id": version.model_id}
    if data_digest:
        about |= {"dataset_name": "auditor", "dataset_digest": data_digest[:32]}
    now = int(time.time() * 1000)
    return [
        Metric(key, float(value), now, 0, **(about if on_page is None or key in on_page else {}))
        for key, value in metrics.items()
        if math.isfinite(value)
    ]


@contextmanager
def _refusal_is_a_warning(run_name: str) -> Iterator[None]:
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        log.warning("the metrics of %s were not logged to MLflow: %s", run_name, " ".join(str(error).split())[:160])
