"""Metrics into MLflow: against the logged model and the data set, in a run of their own."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping

from auditor.plugins.registry.location import Place

log = logging.getLogger(__name__)
AT_ONCE = 500  # MLflow takes at most 1000 per call


def log_metrics(place: Place, metrics: Mapping[str, float], *, run_name: str, data_digest: str | None) -> None:
    """Log finite metrics by their full names; that MLflow refuses is a warning, since what was attached is attached."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric
    from mlflow.exceptions import MlflowException

    now = int(time.time() * 1000)
    entries = [
        Metric(
            key,
            float(value),
            now,
            0,
            model_id=place.model_id,
            dataset_name="auditor" if data_digest else None,
            dataset_digest=(data_digest or "")[:32] or None,
        )
        for key, value in metrics.items()
        if math.isfinite(value)
    ]
    client = MlflowClient()
    try:
        run = client.create_run(place.experiment_id, run_name=run_name)
        for start in range(0, len(entries), AT_ONCE):
            client.log_batch(run.info.run_id, metrics=entries[start : start + AT_ONCE])
        client.set_terminated(run.info.run_id)
    except MlflowException as error:
        log.warning("the metrics of %s were not logged to MLflow: %s", run_name, " ".join(str(error).split())[:160])
