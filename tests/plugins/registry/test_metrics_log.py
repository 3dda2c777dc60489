"""Metrics in MLflow: finite ones, by name, with model and data; a run is removed when nothing is committed."""

import math

import mlflow
import pytest
from mlflow.exceptions import MlflowException

from auditor import plugins
from auditor.errors import RegistryError
from auditor.plugins.registry import attachments, metrics_log
from auditor.plugins.registry.location import resolve
from auditor.plugins.registry.metrics_log import logged_metrics

MODEL = "models:/digits/1"


def runs(name: str):
    return mlflow.MlflowClient().search_runs(
        [resolve(MODEL).experiment_id], f"attributes.run_name = '{name}'", mlflow.entities.ViewType.ACTIVE_ONLY
    )


def test_finite_metrics_are_logged_with_model_and_data(registry, monkeypatch):
    monkeypatch.setattr(metrics_log, "AT_ONCE", 2)  # three metrics take two calls
    values = {"one": 1.0, "two": -2.5, "none": math.nan, "many": math.inf, "three": 3.0}
    version = resolve(MODEL)
    with logged_metrics(version, values, run_name="logged", data_digest="d" * 64):
        (run,) = runs("logged")
        assert run.info.status == "RUNNING"
    (run,) = runs("logged")
    assert run.info.status == "FINISHED"
    assert run.data.metrics == {"one": 1.0, "two": -2.5, "three": 3.0}
    logged = [
        m for m in mlflow.MlflowClient().get_logged_model(version.model_id).metrics if m.run_id == run.info.run_id
    ]
    assert {(m.key, m.dataset_name, m.dataset_digest) for m in logged} == {
        (key, "auditor", "d" * 32) for key in ("one", "two", "three")
    }


@pytest.mark.parametrize("error", [RuntimeError("commit failed"), KeyboardInterrupt()])
def test_no_run_is_left_of_what_was_not_committed(registry, error):
    with (
        pytest.raises(type(error)),
        logged_metrics(resolve(MODEL), {"one": 1.0}, run_name="uncommitted", data_digest=None),
    ):
        raise error
    assert runs("uncommitted") == []


def test_metrics_that_mlflow_refuses_are_a_warning_and_the_commit_stands(registry, monkeypatch, caplog):
    def refuse(*args, **kwargs):
        raise MlflowException("too\nmany")

    committed = []
    for name in ("create_run", "log_batch", "set_terminated"):
        with monkeypatch.context() as patch:
            patch.setattr(mlflow.MlflowClient, name, refuse)
            with logged_metrics(resolve(MODEL), {"one": 1.0}, run_name="refused", data_digest=None):
                committed.append(name)
    assert committed == ["create_run", "log_batch", "set_terminated"]
    assert [r.getMessage() for r in caplog.records if r.name.startswith("auditor")] == [
        "the metrics of refused were not logged to MLflow: too many"
    ] * 3


def test_attaching_leaves_all_or_nothing(registry, concepts, monkeypatch):
    def refuse(*args, **kwargs):
        raise RegistryError("the tag was refused.")

    with monkeypatch.context() as patch:
        patch.setattr(attachments, "set_tag", refuse)
        with pytest.raises(RegistryError, match="the tag was refused"):
            plugins.attach(concepts, MODEL, "halfway")
    assert "halfway" not in plugins.registry.attachments.names(MODEL)
    assert runs("attach halfway to digits/1") == []
