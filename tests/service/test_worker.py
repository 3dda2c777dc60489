"""A worker follows its alias: loads, verifies, swaps; what fails verification is never served."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import mlflow
import pytest

from auditor.errors import TamperError
from auditor.explainers.answer import Question
from auditor.plugins import attach, load_subject, log_subject, verify
from auditor.service import worker as worker_module
from auditor.service.batch_answer import Job
from auditor.service.problems import Problem
from auditor.service.request_cost import Pace
from auditor.service.served_version import load_version
from auditor.service.settings import Settings
from auditor.service.types import Options
from auditor.service.worker import Worker

QUICK = Options(heatmaps="none", stability="off")


@pytest.fixture
def quick(monkeypatch):
    """Warming up is tested elsewhere."""
    monkeypatch.setattr(worker_module, "warm_up", lambda loaded, settings: Pace())


def versions(trained, concepts, name: str, n: int) -> None:
    for _ in range(n):
        uri = log_subject(trained[0], name, experiment="tests")
        attach(concepts, uri, "concepts", subject=load_subject(uri))
    concepts.name = ""


def test_the_alias_is_followed_and_a_tampered_version_is_not_served(registry, trained, concepts, quick, capsys):
    versions(trained, concepts, "followed", 2)
    client = mlflow.MlflowClient()
    client.set_registered_model_alias("followed", "champion", "1")
    worker = Worker(Settings(model="models:/followed@champion", engine="torch"))
    with pytest.raises(Problem, match="not ready") as early:
        worker.current()
    assert early.value.status == 503
    first = worker._look()
    assert first is not None
    worker.served = first
    assert first.version == "1"
    assert worker._look() is None  # nothing has changed

    client.set_registered_model_alias("followed", "champion", "2")
    second = worker._look()
    assert second is not None
    assert second.version == "2"

    # version 2 is damaged before the worker takes it: version 1 is served on
    location = json.loads(client.get_model_version("followed", "2").tags["auditor.explainer.concepts"])["location"]
    source = client.get_model_version("followed", "2").source.removeprefix("models:/")
    root = Path(client.get_logged_model(source).artifact_location.removeprefix("file://"))
    tensors = root / location / "tensors.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(bytes(content))
    assert worker._look() is None
    assert worker.current().version == "1"
    assert "failed verification" in capsys.readouterr().out
    assert worker._look() is None  # and it is not tried again while nothing changes
    assert "failed verification" not in capsys.readouterr().out
    client.set_registered_model_alias("followed", "champion", "1")
    assert worker._look() is None
    assert worker._refused_mark == ""


def test_mlflow_out_of_reach_keeps_serving_and_is_logged(registry, served, quick, capsys):
    worker = Worker(Settings(model=served))
    worker.served = worker._look()
    assert worker.served is not None
    try:
        mlflow.set_tracking_uri("http://127.0.0.1:9")
        mlflow.set_registry_uri("http://127.0.0.1:9")
        assert worker._look() is None
    finally:
        mlflow.set_tracking_uri(registry)
        mlflow.set_registry_uri(registry)
    assert worker.current().name == "served"
    line = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert line["event"] == "MLflow cannot be reached"
    assert line["still_serving"] == served


def job(version, x, options, names, target, strict):
    return Job(version, Question(x, options, names, target, strict))


def test_a_started_worker_loads_answers_and_stops(registry, served, images):
    async def story():
        worker = Worker(Settings(model=served, poll_s=3600))
        await worker.start()
        for _ in range(6000):
            if worker.served is not None:
                break
            await asyncio.sleep(0.05)
        loaded = worker.current()
        first_job = job(loaded, images[0], QUICK, loaded.explained.default_names, None, False)
        (answer,) = await worker.answer([first_job])
        assert answer["model"]["version"] == loaded.version
        await worker.stop()
        assert worker.served is None

    asyncio.run(story())


def test_verify_reports_a_graph_that_was_changed(registry, trained, concepts):
    pytest.importorskip("onnxscript")
    uri = log_subject(trained[0], "graphed", experiment="tests")
    attach(concepts, uri, "concepts", subject=load_subject(uri), export=True)
    concepts.name = ""
    assert all(x.verified for x in verify(uri))
    client = mlflow.MlflowClient()
    version = client.get_model_version("graphed", uri.rpartition("/")[2])
    root = Path(
        client.get_logged_model(version.source.removeprefix("models:/")).artifact_location.removeprefix("file://")
    )
    (path,) = root.rglob("explain.onnx")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    (bad,) = [x for x in verify(uri) if not x.verified]
    assert (bad.name, bad.kind) == ("explain.onnx", "onnx")
    with pytest.raises(TamperError):
        load_version(Settings(model=uri))


def test_requests_wait_for_the_first_loading_and_not_for_a_later_one(registry, served, quick):
    async def story():
        worker = Worker(Settings(model=served, engine="torch"))
        early = [asyncio.create_task(worker.ready()) for _ in range(3)]  # before it has even begun
        await asyncio.sleep(0)
        await worker.start()
        answers = await asyncio.wait_for(asyncio.gather(*early), 300)
        assert all(loaded is worker.served for loaded in answers)
        await worker.stop()
        with pytest.raises(Problem, match="not ready"):  # nothing is being loaded: nobody is kept waiting
            await worker.ready()

    asyncio.run(story())


def test_requests_do_not_wait_where_loading_has_failed(registry, quick, capsys):
    async def story():
        worker = Worker(Settings(model="models:/nosuch/1", engine="torch"))
        await worker.start()
        with pytest.raises(Problem, match="cannot be loaded"):
            await asyncio.wait_for(worker.ready(), 300)
        await worker.stop()

    asyncio.run(story())


def test_a_worker_learns_its_pace_from_answers_and_not_from_problems(monkeypatch):
    worker = Worker(Settings())
    worker.pace = Pace(1000.0, 0.0)
    version = SimpleNamespace(explainers={})
    asked = job(version, None, QUICK, [], None, False)
    monkeypatch.setattr(worker_module, "answer_batch", lambda jobs: [Problem(503)])
    assert isinstance(worker._answer_batch([asked])[0], Problem)
    assert worker.pace.explain_s == 1000.0
    monkeypatch.setattr(worker_module, "answer_batch", lambda jobs: [{}])
    assert worker._answer_batch([asked]) == [{}]
    assert worker.pace.explain_s == 500.0
