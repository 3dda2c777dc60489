"""One ONNX graph gives torch's logits, layers and x-features, for any batch; a graph that does not is refused."""

import pytest
import torch

from auditor import Subject
from auditor.errors import ArtifactError, ModelError
from auditor.explainers.onnx_export import export_graph, further_outputs, open_session
from tests.conftest import Tiny

pytest.importorskip("onnxscript")


@pytest.fixture(scope="module")
def graph(trained, concepts, heads):
    return export_graph(trained[0], {"concepts": concepts, "heads": heads})


def test_outputs_are_torchs(graph, digits, images, concepts, heads):
    assert graph.worst < 1e-4
    assert set(graph.layers) == {*concepts.layers(), *heads.layers()}
    session = open_session(graph.content, use_gpu=False)
    for n in (1, 3, 7):
        outputs = dict(zip(graph.outputs, session.run(None, {"pixels": images[:n].numpy()}), strict=True))
        with torch.no_grad():
            logits, layer_outputs = digits.run(images[:n], graph.layers)
        torch.testing.assert_close(torch.from_numpy(outputs["logits"]), logits, rtol=1e-4, atol=1e-4)
        for i, layer in enumerate(graph.layers):
            torch.testing.assert_close(
                torch.from_numpy(outputs[f"layer_{i}"]), layer_outputs[layer], rtol=1e-4, atol=1e-4
            )
    assert float(logits.std()) > 0.1


def test_garbage_is_not_a_graph():
    with pytest.raises(ArtifactError, match="ONNX Runtime cannot open the graph"):
        open_session(b"not a graph", use_gpu=False)


def test_a_frozen_batch_cannot_be_exported():
    class One(Tiny):
        def forward(self, x):
            assert x.shape[0] == 1
            return super().forward(x)

    with pytest.raises(ModelError, match="1 images at a time"):
        export_graph(Subject(One(), input_shape=(1, 13, 17)), {})


def test_a_fine_tuned_network_is_part_of_the_graph(digits, images):
    from auditor import fit, open_data

    data = open_data("sklearn:digits", limit=60)
    factors = fit("deepfacto", digits, data, layer="features.6", rank=3, epochs=1, refits=0)
    graph = export_graph(digits, {"factors": factors})
    assert graph.features == {"factors": factors.reads().outputs[0].key}
    outputs = dict(
        zip(
            graph.outputs, open_session(graph.content, use_gpu=False).run(None, {"pixels": images.numpy()}), strict=True
        )
    )
    logits, z = (torch.from_numpy(outputs[name]) for name in ("logits", "features_0"))
    shared = factors.explain_from(digits, images, logits, {graph.features["factors"]: z}, [None] * len(images))
    for a, b in zip(factors.explain(digits, images), shared, strict=True):
        assert [c.contribution for c in a.concepts] == pytest.approx([c.contribution for c in b.concepts], abs=1e-3)
        assert b.gap() < 1e-4


def test_further_outputs_keep_their_explainers_whatever_the_order():
    """A manifest stores names sorted, so the graph must be built in that order too."""
    from types import SimpleNamespace

    from auditor.explainers.base import FurtherOutput, Reads

    def reading(key):
        return SimpleNamespace(reads=lambda: Reads((), (FurtherOutput(key, None, lambda subject: subject.module),)))

    outputs = further_outputs({"b": reading("of b"), "a": reading("of a")})
    assert list(outputs) == ["a", "b"]
    assert [o.key for o in outputs.values()] == ["of a", "of b"]
