"""What runs the forward pass: torch or the exported graph, with the same answers."""

import copy
import json

import mlflow
import pytest
import torch

from auditor.data.source import open_data
from auditor.errors import ModelError, OptionError
from auditor.explainers.answer import Question
from auditor.explainers.nmf.explainer import NmfExplainer
from auditor.plugins import attach, load_subject, log_subject
from auditor.plugins.registry.onnx_exports import export
from auditor.service.batch_answer import Job, answer_batch
from auditor.service.served_version import load_version
from auditor.service.settings import Settings
from auditor.service.types import Options
from auditor.service.worker import Worker, warm_up

QUICK = Options(heatmaps="none", stability="off")


def job(version, x, options, names, target, strict):
    return Job(version, Question(x, options, names, target, strict))


def test_the_exported_graph_is_used_and_says_the_same(registry, trained, concepts, heads, images):
    pytest.importorskip("onnxscript")
    uri = log_subject(trained[0], "exported", experiment="tests")
    subject = load_subject(uri)
    attach(concepts, uri, "concepts", subject=subject)
    attach(heads, uri, "heads", subject=subject, attach_anyway=True)
    concepts.name = heads.name = ""
    with pytest.raises(OptionError, match="auditor export models:/exported/1 makes one"):
        load_version(Settings(model=uri, engine="onnx"))
    exported = export(uri)
    assert exported.worst < 1e-4
    by_onnx, by_torch = load_version(Settings(model=uri)), load_version(Settings(model=uri, engine="torch"))
    assert (by_onnx.forward.engine, by_torch.forward.engine) == ("onnx", "torch")
    warm_up(by_onnx, Settings())

    def answers(loaded):
        pairs = zip(images, targets, strict=True)
        return answer_batch([job(loaded, x, QUICK, loaded.explained.default_names, t, False) for x, t in pairs])

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
    requests = [
        (["concepts"], {}),
        (["heads"], {"stability": "fast", "noise_samples": 5}),
        (["heads", "concepts"], {"stability": "fast", "noise_samples": 5}),
        ([], {"stability": "fast", "noise_samples": 1}),
        (["heads"], {"stability": "fast", "noise_samples": 2, "seed": 3}),
    ]

    def jobs(loaded):
        return [
            job(loaded, x, Options.model_validate({"heatmaps": "none", "stability": "off", **document}), names, i, True)
            for i, (x, (names, document)) in enumerate(zip(images, requests, strict=False))
        ]

    document = {}
    for loaded in (by_onnx, by_torch):
        sizes = []
        with pytest.MonkeyPatch.context() as patch:
            run = loaded.forward.run
            patch.setattr(loaded.forward, "run", lambda x, run=run, sizes=sizes: sizes.append(len(x)) or run(x))
            document[loaded.forward.engine] = answer_batch(jobs(loaded))
        assert sizes == [5 + 2 * 4 + 1], "five images, four copies of two of them, one of another"
        document[f"{loaded.forward.engine} alone"] = [answer_batch([one])[0] for one in jobs(loaded)]
    for one, other in (("onnx", "onnx alone"), ("torch", "torch alone"), ("onnx", "torch")):
        for a, b in zip(document[one], document[other], strict=True):
            for ours, theirs in zip(a["explanations"], b["explanations"], strict=True):
                assert ours["name"] == theirs["name"]
                got, want = (torch.tensor([c["contribution"] for c in e["concepts"]]) for e in (ours, theirs))
                torch.testing.assert_close(got, want, rtol=1e-3, atol=2e-3)
            assert (a["stability"] is None) == (b["stability"] is None)
            for key in ("c1", "c2", "score") if a["stability"] else ():
                assert a["stability"][key] == pytest.approx(b["stability"][key], rel=2e-3, abs=1e-4), (one, other, key)
    assert len({a["stability"]["c1"] for a in document["torch"] if a["stability"]}) == 4


@pytest.mark.slow
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
    assert load_version(Settings(model=uri, engine="onnx")).forward.keys == concepts.layers()
    attach(heads, uri, "heads", subject=subject, attach_anyway=True)
    second = graph()
    assert second != first, "the heads' layer was not in it"
    loaded = load_version(Settings(model=uri, engine="onnx"))
    assert set(loaded.forward.keys) == {*concepts.layers(), *heads.reads().keys}

    named = copy.copy(heads)
    named.labels = {0: "a name"}  # another artifact, the same numbers
    attach(named, uri, "heads", subject=subject, attach_anyway=True)
    assert graph() == second
    renamed = load_version(Settings(model=uri, engine="onnx"))
    assert renamed.explainers["heads"].digest_ != loaded.explainers["heads"].digest_
    assert set(renamed.forward.keys) == set(loaded.forward.keys)

    # a graph that lacks a layer: auto logs it and takes torch, onnx refuses and serves on what it has
    other = next(layer for layer in subject.layers() if layer.name not in concepts.layers() + heads.layers()).name
    worker = Worker(Settings(model=uri, engine="onnx"))
    worker.served = renamed
    elsewhere = NmfExplainer(layer=other, rank=2, refits=1, max_eval=10).fit(
        subject, open_data("sklearn:digits", limit=60)
    )
    attach(elsewhere, uri, "elsewhere", subject=subject, export=False, attach_anyway=True)
    assert graph() == second
    by_torch = load_version(Settings(model=uri))
    assert by_torch.forward.engine == "torch"
    assert f"lacks layer {other}" in by_torch.forward.reason
    assert f"lacks layer {other}" in caplog.text
    assert worker._look() is None
    assert f"lacks layer {other}" in capsys.readouterr().out
    assert worker._look() is None
    assert capsys.readouterr().out == "", "and it is left alone for a while"
    export(uri)
    assert worker._look().forward.engine == "onnx"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("auditor.explainers.onnx_export.TOLERANCE", -1.0)
        with pytest.raises(
            ModelError, match=r"twice is attached to .*, but the ONNX graph was not exported: .* off by"
        ):
            attach(concepts, uri, "twice", subject=subject, export=True)
    assert "twice" in load_version(Settings(model=uri)).explainers
    concepts.name = heads.name = ""
