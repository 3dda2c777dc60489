"""One ONNX graph gives torch's logits, layers and x-features, for any batch; a graph that does not is refused."""

import pytest
import torch

from auditor import Subject
from auditor.errors import ArtifactError, ModelError
from auditor.explainers.onnx_export import export_graph, open_session
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
        given = dict(zip(graph.outputs, session.run(None, {"pixels": images[:n].numpy()}), strict=True))
        with torch.no_grad():
            logits, taken = digits.run(images[:n], graph.layers)
        torch.testing.assert_close(torch.from_numpy(given["logits"]), logits, rtol=1e-4, atol=1e-4)
        for i, layer in enumerate(graph.layers):
            torch.testing.assert_close(torch.from_numpy(given[f"layer_{i}"]), taken[layer], rtol=1e-4, atol=1e-4)
        E = torch.from_numpy(given["features_0"]).transpose(0, 1)
        torch.testing.assert_close(E, heads.features(taken[heads.layers()[0]]), rtol=1e-4, atol=1e-4)
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
