"""A worker follows its alias: loads, verifies, swaps; what fails verification is never served."""

import asyncio
import copy
import json
from pathlib import Path

import mlflow
import pytest
import torch

from auditor.data.source import open_data
from auditor.errors import ModelError, OptionError, TamperError
from auditor.explainers.nmf.explainer import NmfExplainer
from auditor.plugins import attach, load_subject, log_subject, verify
from auditor.plugins.registry.onnx_exports import export
from auditor.service import worker as worker_module
from auditor.service.batch_answer import Job, answer_batch
from auditor.service.served_version import load_model
from auditor.service.problems import Problem
from auditor.service.settings import Settings
from auditor.service.types import Options
from auditor.service.worker import Worker, warm_up

QUICK = Options(heatmaps="none", stability="off")


@pytest.fixture
def quick(monkeypatch):
    """Warming up is tested elsewhere."""
    monkeypatch.setattr(worker_module, "warm_up", lambda loaded, settings: None)


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
    worker.loaded = first
    assert first.version == "1"
    assert worker._look() is None  # nothing has changed

    client.set_registered_model_alias("followed", "champion", "2")
    second = worker._look()
    assert second is not None
    assert second.version == "2"

    # version 2 is damaged before the worker takes it: version 1 is served on
    location = json.loads(client.get_model_version("followed", "2").tags["auditor.explainers.base.concepts"])["location"]
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


def test_mlflow_out_of_reach_keeps_serving_and_is_told(registry, served, quick, capsys):
    worker = Worker(Settings(model=served))
    worker.loaded = worker._look()
    assert worker.loaded is not None
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


def test_a_started_worker_loads_answers_and_stops(registry, served, images):
    async def story():
        worker = Worker(Settings(model=served, poll_s=3600))
        await worker.start()
        for _ in range(6000):
            if worker.loaded is not None:
                break
            await asyncio.sleep(0.05)
        loaded = worker.current()
        job = Job(loaded, images[0], QUICK, loaded.default_names, None, False)
        (answer,) = await worker.answer([job])
        assert answer["model"]["version"] == loaded.version
        await worker.stop()
        assert worker.loaded is None

    asyncio.run(story())


def test_the_exported_graph_is_used_and_says_the_same(registry, trained, concepts, heads, images):
    pytest.importorskip("onnxscript")
    uri = log_subject(trained[0], "exported", experiment="tests")
    subject = load_subject(uri)
    attach(concepts, uri, "concepts", subject=subject)
    attach(heads, uri, "heads", subject=subject)
    concepts.name = heads.name = ""
    with pytest.raises(OptionError, match="auditor export models:/exported/1 makes one"):
        load_model(Settings(model=uri, engine="onnx"))
    found = export(uri)
    assert found.worst < 1e-4
    by_onnx, by_torch = load_model(Settings(model=uri)), load_model(Settings(model=uri, engine="torch"))
    assert (by_onnx.runner.engine, by_torch.runner.engine) == ("onnx", "torch")
    warm_up(by_onnx, Settings())

    def answers(loaded):
        pairs = zip(images, targets, strict=True)
        return answer_batch([Job(loaded, x, QUICK, loaded.default_names, t, False) for x, t in pairs])

    targets = [None, 3, None, 7, 1, None, 0]
    for a, b in zip(answers(by_onnx), answers(by_torch), strict=True):
        assert a["prediction"]["index"] == b["prediction"]["index"]
        for one, two in zip(a["explanations"], b["explanations"], strict=True):
            assert one["target_value"] == pytest.approx(two["target_value"], rel=1e-4)
            got, want = ([c["contribution"] for c in e["concepts"]] for e in (one, two))
            torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-3, atol=2e-3)  # float32 twice
    check_a_mixed_batch(by_onnx, by_torch, images)


def check_a_mixed_batch(by_onnx, by_torch, images):
    """Jobs that ask for different things share one pass, copies for the stability too, and each gets its own answer."""
    asked = [
        (["concepts"], {}),
        (["heads"], {"stability": "fast", "samples": 5}),
        (["heads", "concepts"], {"stability": "fast", "samples": 5}),
        ([], {"stability": "fast", "samples": 1}),
        (["heads"], {"stability": "fast", "samples": 2, "seed": 3}),
    ]

    def jobs(loaded):
        return [
            Job(loaded, x, Options.model_validate({"heatmaps": "none", "stability": "off", **told}), names, i, True)
            for i, (x, (names, told)) in enumerate(zip(images, asked, strict=False))
        ]

    told = {}
    for loaded in (by_onnx, by_torch):
        sizes = []
        with pytest.MonkeyPatch.context() as patch:
            run = loaded.runner.run
            patch.setattr(loaded.runner, "run", lambda x, run=run, sizes=sizes: sizes.append(len(x)) or run(x))
            told[loaded.runner.engine] = answer_batch(jobs(loaded))
        assert sizes == [5 + 2 * 2 + 1], "five images, two copies of two of them, one of another"
        told[f"{loaded.runner.engine} alone"] = [answer_batch([job])[0] for job in jobs(loaded)]
    for one, other in (("onnx", "onnx alone"), ("torch", "torch alone"), ("onnx", "torch")):
        for a, b in zip(told[one], told[other], strict=True):
            for ours, theirs in zip(a["explanations"], b["explanations"], strict=True):
                assert ours["name"] == theirs["name"]
                got, want = (torch.tensor([c["contribution"] for c in e["concepts"]]) for e in (ours, theirs))
                torch.testing.assert_close(got, want, rtol=1e-3, atol=2e-3)
            assert (a["stability"] is None) == (b["stability"] is None)
            for key in ("c1", "c2", "score") if a["stability"] else ():
                assert a["stability"][key] == pytest.approx(b["stability"][key], rel=2e-3, abs=1e-4), (one, other, key)
    assert len({a["stability"]["c1"] for a in told["torch"] if a["stability"]}) == 4


def test_a_graph_is_renewed_when_something_else_is_attached(registry, trained, concepts, heads, caplog, capsys):
    pytest.importorskip("onnxscript")
    uri = log_subject(trained[0], "renewed", experiment="tests")
    subject = load_subject(uri)
    client = mlflow.MlflowClient()

    def graph():
        tags = client.get_model_version("renewed", uri.rpartition("/")[2]).tags
        return json.loads(tags["auditor.onnx"])["digest"] if "auditor.onnx" in tags else None

    attach(concepts, uri, "concepts", subject=subject)
    assert graph() is None, "nobody asked for a graph"
    attach(concepts, uri, "concepts", subject=subject, export=True)
    first = graph()
    assert load_model(Settings(model=uri, engine="onnx")).runner.keys == concepts.layers()
    attach(heads, uri, "heads", subject=subject)
    second = graph()
    assert second != first, "the heads' x-features were not in it"
    loaded = load_model(Settings(model=uri, engine="onnx"))
    assert set(loaded.runner.keys) == {*concepts.layers(), *heads.layers(), heads.features_key()}

    named = copy.copy(heads)
    named.labels = {0: "a name"}  # another artifact, the same numbers
    attach(named, uri, "heads", subject=subject)
    assert graph() == second
    renamed = load_model(Settings(model=uri, engine="onnx"))
    assert renamed.explainers["heads"].digest_ != loaded.explainers["heads"].digest_
    assert heads.features_key() in renamed.runner.keys

    # a graph that lacks a layer: auto tells and takes torch, onnx refuses and serves on what it has
    other = next(layer for layer in subject.layers() if layer.name not in concepts.layers() + heads.layers()).name
    worker = Worker(Settings(model=uri, engine="onnx"))
    worker.loaded = renamed
    elsewhere = NmfExplainer(layer=other, rank=2, refits=1, max_eval=10).fit(
        subject, open_data("sklearn:digits", limit=60)
    )
    attach(elsewhere, uri, "elsewhere", subject=subject, export=False)
    assert graph() == second
    by_torch = load_model(Settings(model=uri))
    assert by_torch.runner.engine == "torch"
    assert f"lacks layer {other}" in by_torch.runner.reason
    assert f"lacks layer {other}" in caplog.text
    assert worker._look() is None
    assert f"lacks layer {other}" in capsys.readouterr().out
    assert worker._look() is None
    assert capsys.readouterr().out == "", "and it is left alone for a while"
    export(uri)
    assert worker._look().runner.engine == "onnx"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("auditor.explainers.onnx_export.TOLERANCE", -1.0)
        with pytest.raises(
            ModelError, match=r"twice is attached to .*, but the ONNX graph was not exported: .* off by"
        ):
            attach(concepts, uri, "twice", subject=subject, export=True)
    assert "twice" in load_model(Settings(model=uri)).explainers
    concepts.name = heads.name = ""


def test_verify_tells_of_a_graph_that_was_changed(registry, trained, concepts):
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
        load_model(Settings(model=uri))


def test_a_class_without_a_head_is_told_and_refused_only_when_asked_for(registry, served, images):
    loaded = load_model(Settings(model=served, engine="torch"))
    loaded.explainers["heads"].classes_ = [0]
    told, refused = answer_batch(
        [
            Job(loaded, images[1], QUICK, ["heads", "concepts"], 3, False),
            Job(loaded, images[1], QUICK, ["heads"], 3, True),
        ]
    )
    assert isinstance(told, dict)
    assert "cannot explain class" in told["explanations"][0]["problem"]
    assert told["explanations"][1]["concepts"]
    assert isinstance(refused, Problem)
    assert refused.status == 422


def test_an_explainer_that_breaks_on_one_image_hurts_no_other(registry, served, images, monkeypatch):
    loaded = load_model(Settings(model=served, engine="torch"))
    concepts = loaded.explainers["concepts"]
    plain = concepts.explain_from

    def moody(subject, x, *args, **options):
        if bool((x == images[2]).flatten(1).all(1).any()):
            raise RuntimeError("this image")
        return plain(subject, x, *args, **options)

    monkeypatch.setattr(concepts, "explain_from", moody)
    answers = answer_batch([Job(loaded, x, QUICK, ["concepts"], None, False) for x in images])
    assert [isinstance(a, Problem) for a in answers] == [i == 2 for i in range(7)]


def test_requests_wait_for_the_first_loading_and_not_for_a_later_one(registry, served, quick):
    async def story():
        worker = Worker(Settings(model=served, engine="torch"))
        early = [asyncio.create_task(worker.ready()) for _ in range(3)]  # before it has even begun
        await asyncio.sleep(0)
        await worker.start()
        found = await asyncio.wait_for(asyncio.gather(*early), 300)
        assert all(loaded is worker.loaded for loaded in found)
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
