"""Verification: every byte that is stored beside a version, and every tag that points to it."""

import json
from pathlib import Path

import mlflow
import pytest

from auditor import plugins
from auditor.errors import AuditError, TamperError
from auditor.plugins.registry.location import resolve, set_tag
from auditor.plugins.registry.tags import EXPLAINER, ONNX, OnnxTag
from tests.plugins.registry.stored_files import files_of

MODEL = "models:/digits/1"


def test_tampering_in_the_artifact_store_is_found(registry, concepts):
    plugins.attach(concepts, MODEL, "tampered")
    files = files_of(MODEL, "tampered")
    assert {p.name for p in files} == {"manifest.json", "tensors.safetensors"}
    for path in files:
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[len(flipped) // 2] ^= 1
        path.write_bytes(flipped)
        (problem,) = [x.problem for x in plugins.verify(MODEL) if x.name == "tampered"]
        assert path.name in problem
        with pytest.raises(TamperError, match=path.name):
            plugins.load(MODEL, "tampered")
        path.unlink()
        assert [x.verified for x in plugins.verify(MODEL) if x.name == "tampered"] == [False]
        path.write_bytes(content)
    assert [x.verified for x in plugins.verify(MODEL) if x.name == "tampered"] == [True]
    client = mlflow.MlflowClient()
    value = json.loads(client.get_model_version("digits", "1").tags[EXPLAINER + "tampered"])
    for bad in ({**value, "digest": "0" * 64}, {**value, "kind": "tree"}, {**value, "location": "explainers/none"}, {}):
        client.set_model_version_tag("digits", "1", EXPLAINER + "tampered", json.dumps(bad))
        assert [x.verified for x in plugins.verify(MODEL) if x.name == "tampered"] == [False]
        with pytest.raises(AuditError):
            plugins.load(MODEL, "tampered")
    client.delete_model_version_tag("digits", "1", EXPLAINER + "tampered")


def test_a_version_with_nothing_beside_it_has_no_problem(registry, tiny):
    assert plugins.verify(plugins.log_subject(tiny, "bare", experiment="tests")) == []


def test_a_graph_and_a_description_that_are_missing_are_named(registry, tiny):
    uri = plugins.log_subject(tiny, "spoilt", experiment="tests")
    version = resolve(uri)
    set_tag(version, ONNX, OnnxTag("a" * 64, "auditor/exports/" + "a" * 12, "now").encode())
    (Path(version.root.removeprefix("file://")) / "auditor" / "subject.json").unlink()
    graph, notes = plugins.verify(uri)
    assert (graph.name, graph.kind, graph.verified) == ("explain.onnx", "onnx", False)
    assert f"auditor/exports/{'a' * 12} is missing from the artifact store of {uri}" in graph.problem
    assert (notes.name, notes.kind, notes.verified) == ("subject.json", "subject", False)
    assert "is missing from the artifact store" in notes.problem
