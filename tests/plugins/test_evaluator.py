"""mlflow.models.evaluate with the auditor: image tensors, tables and flat rows; where metrics land; what is refused."""

import io
import subprocess
import sys

import mlflow
import numpy as np
import pandas as pd
import pytest
from mlflow.exceptions import MlflowException
from mlflow.models import MetricThreshold
from PIL import Image

from auditor import plugins
from auditor.plugins import ImageDataset
from auditor.plugins.registry.location import resolve

QUICK = {"images": 20, "layers": False}


@pytest.fixture(scope="module")
def digits_arrays():
    from sklearn.datasets import load_digits

    digits = load_digits()
    rows = slice(4, 300, 5)  # sixty images that the fit of the concepts held out
    return (digits.images[rows, None] / 16).astype("float32"), digits.target[rows]


@pytest.fixture(scope="module")
def audited(store, trained, concepts):
    """``models:/evaluated/1`` with one explainer: a logged model of its own, so that its id leads to one version."""
    mlflow.set_tracking_uri(store)
    mlflow.set_registry_uri(store)
    uri = plugins.log_subject(trained[0], "evaluated", experiment="tests")
    plugins.attach(concepts, uri, "concepts")
    return uri


def evaluate(uri, data, config=None, **options):
    with mlflow.start_run(experiment_id=mlflow.get_experiment_by_name("tests").experiment_id) as run:
        evaluation = mlflow.models.evaluate(
            uri,
            data,
            model_type=options.pop("model_type", "classifier"),
            evaluators="auditor",
            evaluator_config={**QUICK, **(config or {})},
            **options,
        )
    return evaluation, mlflow.MlflowClient().get_run(run.info.run_id)


@pytest.fixture(scope="module")
def once(audited, digits_arrays):
    """One evaluation of image tensors by the version's URI."""
    return evaluate(audited, ImageDataset(*digits_arrays, name="sixty"))


def test_metrics_land_on_the_run_and_on_the_logged_model(registry, once, audited, digits_arrays):
    result, run = once
    assert {"model/accuracy", "explainer/concepts/verified"} <= set(result.metrics)
    assert run.data.metrics == pytest.approx(result.metrics)
    version = resolve(audited)
    logged = {
        m.key: m
        for m in mlflow.MlflowClient().get_logged_model(version.model_id).metrics
        if m.run_id == run.info.run_id
    }
    assert logged.keys() == result.metrics.keys()
    data = ImageDataset(*digits_arrays)
    assert {(m.dataset_name, m.dataset_digest) for m in logged.values()} == {("sixty", data.digest)}
    assert [d.dataset.digest for d in run.inputs.dataset_inputs] == [data.digest]
    assert [m.model_id for m in run.inputs.model_inputs] == [version.model_id]


def test_report_and_audit_are_artifacts(registry, once, audited):
    from auditor.auditing.audit import Audit

    result, run = once
    paths = [f.path for f in mlflow.MlflowClient().list_artifacts(run.info.run_id, "auditor")]
    assert paths == ["auditor/audit.json", "auditor/report.html"]
    stored = mlflow.artifacts.load_text(result.artifacts["audit.json"].uri)
    audit = Audit.from_json(stored)
    assert audit.digest == run.data.tags["auditor.audit_digest"]
    assert audit.model["digest"] == plugins.load_subject(audited).digest
    assert result.artifacts["report.html"].content.lstrip().lower().startswith("<!doctype html")
    assert plugins.latest_audit(audited) is None  # nothing is stored with the version unless asked


def test_mlflows_own_gate_works_on_the_result(once):
    result, _ = once

    def gate(metric, **limits):
        mlflow.validate_evaluation_results(
            validation_thresholds={metric: MetricThreshold(greater_is_better=True, **limits)}, candidate_result=result
        )

    gate("model/accuracy", threshold=0.5)
    with pytest.raises(mlflow.models.evaluation.validation.ModelValidationFailedException):
        gate("model/accuracy", threshold=1.01)
    with pytest.raises(mlflow.models.evaluation.validation.ModelValidationFailedException):
        gate("model/no_such_metric", threshold=0.0)


def png(image) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray((image[0] * 255).round().astype("uint8")).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("form", ["arrays", "lists", "bytes", "paths", "flat"])
def test_tables_and_flat_rows_are_the_same_images(registry, audited, digits_arrays, once, form, tmp_path):
    images, labels = digits_arrays
    if form == "flat":
        data, options = images.reshape(len(images), -1), {"targets": labels}
    else:
        if form == "paths":
            for k, image in enumerate(images):
                (tmp_path / f"{k}.png").write_bytes(png(image))
        cells = {
            "arrays": list(images),
            "lists": images.tolist(),
            "bytes": [png(image) for image in images],
            "paths": [str(tmp_path / f"{k}.png") for k in range(len(images))],
        }
        data, options = pd.DataFrame({"picture": cells[form], "y": labels}), {"targets": "y"}
    result, _ = evaluate(audited, data, {"explainers": []}, **options)
    assert result.metrics["model/accuracy"] == pytest.approx(once[0].metrics["model/accuracy"], abs=0.05)
    explained = {name for name in result.metrics if name.startswith("explainer/") and "/fit/" not in name}
    assert explained == {"explainer/concepts/verified"}  # and what the fit measured, which costs nothing


def test_a_model_given_by_its_id_is_logged_once(registry, audited, digits_arrays):
    version = resolve(audited)
    result, run = evaluate(
        f"models:/{version.model_id}", ImageDataset(*digits_arrays, name="by-id"), {"explainers": []}
    )
    logged = mlflow.MlflowClient().get_logged_model(version.model_id).metrics
    assert len([m for m in logged if m.run_id == run.info.run_id]) == len(result.metrics)
    assert run.data.metrics == pytest.approx(result.metrics)


def test_an_audit_can_be_stored_and_its_report_is_pinned(registry, audited, digits_arrays):
    import json

    evaluate(audited, ImageDataset(*digits_arrays), {"store": True, "explainers": []})
    tag = json.loads(resolve(audited).tags["auditor.audit"])
    assert set(tag["files"]) == {"report.html", "model_card.json"}
    assert plugins.latest_audit(audited).digest == tag["digest"]
    mlflow.MlflowClient().delete_model_version_tag("evaluated", "1", "auditor.audit")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"imges": 30}, "evaluator_config: unknown imges; the auditor takes allow_pickle"),
        ({"images": 3}, "evaluator_config: images: input should be greater than or equal to 20, got 3"),
        ({"explainers": ["nosuch"]}, "there is no explainer 'nosuch'; attached are: concepts"),
        ({"explainers": "concepts"}, "explainers: input should be a valid tuple"),
        ({"model_uri": "models:/nosuch/1"}, "no registered model is called 'nosuch'"),
    ],
)
def test_bad_config_is_refused_in_one_sentence(registry, audited, digits_arrays, config, message):
    with pytest.raises(MlflowException, match=message):
        evaluate(audited, ImageDataset(*digits_arrays), config)


def test_bad_data_is_refused_in_one_sentence(registry, audited, digits_arrays):
    images, labels = digits_arrays
    for wrong, message in (
        (ImageDataset(images, labels + 5), "labels must be 0 to 9 for this model, got 5 to 14"),
        (ImageDataset(np.repeat(images, 2, axis=1), labels), r"images must be .* for this model, got \(60, 2, 8, 8\)"),
    ):
        with pytest.raises(MlflowException, match=message):
            evaluate(audited, wrong)
    with pytest.raises(MlflowException, match="63 numbers per row, but an image of this model has 1 x 8 x 8"):
        evaluate(audited, images.reshape(60, -1)[:, :63], targets=labels)
    two = pd.DataFrame({"a": list(images), "b": list(images), "y": labels})
    with pytest.raises(MlflowException, match=r"2 columns may hold images \(a, b\)"):
        evaluate(audited, two, targets="y")


def test_another_model_than_the_one_evaluated_is_refused(registry, audited, tiny, digits_arrays):
    plugins.log_subject(tiny, "another", experiment="tests")
    with pytest.raises(MlflowException, match="another model than the one given to evaluate"):
        evaluate(audited, ImageDataset(*digits_arrays), {"model_uri": "models:/another/1"})


@pytest.mark.slow  # mlflow's own evaluator imports shap
def test_what_is_no_image_model_is_left_alone(registry):
    """With all evaluators asked for, a table model is evaluated as if we were not installed."""
    frame = pd.DataFrame({"x": [0.0, 1.0, 2.0, 3.0], "y": [0, 1, 0, 1], "p": [0, 1, 0, 0]})
    with mlflow.start_run(experiment_id=mlflow.get_experiment_by_name("tests").experiment_id):
        evaluation = mlflow.models.evaluate(data=frame, targets="y", predictions="p", model_type="classifier")
    assert evaluation.metrics["accuracy_score"] == 0.75
    assert not [k for k in evaluation.metrics if k.startswith(("model/", "explainer/"))]


def test_importing_mlflow_with_the_plugins_stays_free_of_torch():
    code = (
        "import sys, mlflow, mlflow.models.evaluation.evaluator_registry; "
        "from mlflow.models.evaluation.base import list_evaluators; assert 'auditor' in list_evaluators(); "
        "from mlflow.deployments import get_deploy_client; get_deploy_client('auditor'); "
        "import auditor.plugins.server; "
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
