"""ONNX exports: what is stored, verified and renewed. The graph itself is tested in tests/auditor/explainers."""

from pathlib import Path

import pytest

from auditor import fit, open_data, plugins
from auditor.errors import ModelError, TamperError
from auditor.explainers import onnx_export
from auditor.explainers.onnx_export import OnnxGraph
from auditor.plugins.registry.attachments import names
from auditor.plugins.registry.location import resolve
from auditor.plugins.registry.onnx_exports import attach, export, load_export, renew
from auditor.plugins.registry.tags import onnx_tag


@pytest.fixture
def graphs(monkeypatch):
    """Exports that take no time: the layers that explainers read, and bytes; gives the names of what went in."""
    exported = []

    def quick(subject, explainers):
        exported.append(sorted(explainers))
        layers = tuple(sorted({layer for e in explainers.values() for layer in e.reads().layers}))
        return OnnxGraph(b"graph " + " ".join(layers).encode(), layers, {}, 3e-6)

    monkeypatch.setattr(onnx_export, "export_graph", quick)
    return exported


@pytest.fixture
def version(registry, tiny, tiny_npz):
    """A new version, its subject, and two explainers that read different layers."""
    uri = plugins.log_subject(tiny, "with-graph", experiment="tests")
    subject = plugins.load_subject(uri)
    data = open_data(tiny_npz)
    two = [fit("nmf", subject, data, layer=layer, rank=2, refits=1, max_eval=10) for layer in ("relu", "pool")]
    return uri, subject, *two


def test_a_graph_is_kept_in_step_with_what_is_attached(version, graphs):
    uri, subject, relu, pool = version
    attach(relu, uri, "a", subject=subject, attach_anyway=True)
    assert graphs == []  # nobody asked for a graph
    assert load_export(resolve(uri), subject) is None
    attach(relu, uri, "a", subject=subject, export=True, attach_anyway=True)
    first = load_export(resolve(uri), subject)
    assert (graphs, first.layers, first.worst) == ([["a"]], ("relu",), 3e-6)
    assert first.content == b"graph relu"
    assert first.location == f"auditor/exports/{first.digest[:12]}"
    assert first.to_json() == {
        "digest": first.digest,
        "location": first.location,
        "layers": ["relu"],
        "features": {},
        "worst_difference": 3e-6,
        "bytes": 10,
    }
    attach(relu, uri, "again", subject=subject, attach_anyway=True)
    attach(pool, uri, "left", subject=subject, export=False, attach_anyway=True)
    assert graphs == [["a"]]  # the first reads nothing new, the second is left out on request
    attach(pool, uri, "b", subject=subject, attach_anyway=True)
    assert graphs == [["a"], ["a", "again", "b", "left"]]
    assert load_export(resolve(uri), subject).layers == onnx_tag(resolve(uri).tags).layers == ("pool", "relu")


def test_an_export_that_fails_leaves_the_graph_and_attaches_all_the_same(version, graphs, monkeypatch, caplog):
    uri, subject, relu, pool = version
    attach(relu, uri, "a", subject=subject, export=True, attach_anyway=True)
    before = onnx_tag(resolve(uri).tags)

    def fails(subject, explainers):
        raise ModelError("no operator for this.")

    monkeypatch.setattr(onnx_export, "export_graph", fails)
    attach(pool, uri, "b", subject=subject, attach_anyway=True)
    assert "was not renewed, it will not be used: no operator for this." in caplog.text
    with pytest.raises(ModelError, match=r"c is attached to .*, but the ONNX graph was not exported: no operator"):
        attach(pool, uri, "c", subject=subject, export=True, attach_anyway=True)
    assert names(uri) == ["a", "b", "c"]
    assert onnx_tag(resolve(uri).tags) == before
    assert renew(resolve(uri), subject, "d", pool, requested=True) == "no operator for this."
    assert renew(resolve(uri), subject, "d", relu, requested=False) == ""


def test_a_graph_that_is_not_what_was_stored_is_refused(version, graphs):
    uri, subject, relu, _ = version
    attach(relu, uri, "a", subject=subject, attach_anyway=True)
    stored = export(uri, subject=subject)
    folder = Path(resolve(uri).root.removeprefix("file://")) / stored.location
    content = (folder / "explain.onnx").read_bytes()
    (folder / "explain.onnx").write_bytes(content[:-1] + b"?")
    with pytest.raises(TamperError, match=r"explain\.onnx"):
        load_export(resolve(uri), subject)
    (folder / "explain.onnx").write_bytes(content)
    assert load_export(resolve(uri), subject) == stored
    (folder / "explain.onnx").unlink()
    with pytest.raises(TamperError, match=r"explain\.onnx"):
        load_export(resolve(uri), subject)
