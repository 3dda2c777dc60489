"""Every ending of a model by every way: describe, fit, explain, service by both engines, and audit.

What a softmax and a multi-label sigmoid do is followed further in `test_output_by_every_way.py`.
"""

import base64
import copy
import io

import pytest

pytest.importorskip("bentoml")

import numpy as np
import torch
from PIL import Image
from starlette.testclient import TestClient
from torch import nn

from auditor import AuditConfig, Subject, audit, fit, open_data
from auditor.plugins import attach, describe, load_subject, log_subject
from auditor.plugins.registry.onnx_exports import export
from auditor.service.settings import Settings
from tests.service.conftest import png_of
from tests.service.test_one_answer import Served


class Even(nn.Module):
    """One logit of a network of ten: how much more the even digits have than the odd ones."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x):
        z = self.net(x)
        return (z[:, 0::2].logsumexp(1) - z[:, 1::2].logsumexp(1))[:, None]


CASES = {
    "one logit": ("logits", Even, 2),
    "one probability": ("sigmoid", lambda net: nn.Sequential(Even(net), nn.Sigmoid()), 2),
    "log-softmax": ("log-softmax", lambda net: nn.Sequential(net, nn.LogSoftmax(1)), 10),
    "sigmoid": ("sigmoid", lambda net: nn.Sequential(net, nn.Sigmoid()), 10),
}


def probabilities(name: str, out: torch.Tensor) -> torch.Tensor:
    """What the outputs of a case mean, written down by hand."""
    out = out.double()
    if name == "log-softmax":
        return out.exp()
    if name == "sigmoid":
        return out
    p = out[:, 0].sigmoid() if name == "one logit" else out[:, 0]
    return torch.stack([1 - p, p], 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_probabilities_are_right_by_every_way(registry, trained, cli, tmp_path, name):
    output, ending, n_classes = CASES[name]
    module = ending(copy.deepcopy(trained[0].module)).eval()
    names = ["odd", "even"] if n_classes == 2 else list(trained[0].class_names)
    subject = Subject(module, input_shape=(1, 8, 8), class_names=names)
    assert subject.output.name == output
    uri = log_subject(subject, name.replace(" ", "-"), experiment="tests")
    assert describe(uri, output=output)["output"] == output
    subject = load_subject(uri)
    explainer = fit("nmf", subject, open_data("sklearn:digits", limit=80), rank=4, refits=1, bases="shared")
    attach(explainer, uri, "concepts", subject=subject, attach_anyway=True)
    export(uri, subject=subject)
    content = png_of(next(open_data("sklearn:digits").batches(subject, 8)).images[5])
    (tmp_path / "image.png").write_bytes(content)
    encoded = base64.b64encode(content).decode()
    ways = {"terminal": cli.json("explain", uri, tmp_path / "image.png", "--heatmaps", "none")}
    for engine in ("torch", "onnx"):
        with TestClient(Served(Settings(model=uri, engine=engine, poll_s=3600)), base_url="http://localhost") as http:
            assert http.get("/model").json()["output"] == output
            ways[f"predict, {engine}"] = http.post("/predict", json={"image": encoded}).json()
            asked = {"image": encoded, "heatmaps": "none", "stability": "off"}
            ways[f"explain, {engine}"] = http.post("/explain", json=asked).json()
    with Image.open(io.BytesIO(content)) as image:
        x = subject.pixels([image])
    with torch.no_grad():
        expected = probabilities(name, module(subject.normalise(x)))[0]
    for way, answer in ways.items():
        told = {item["index"]: item["probability"] for item in answer["prediction"]["probabilities"]}
        assert told, way
        for index, p in told.items():
            assert p == pytest.approx(float(expected[index]), abs=2e-6), way
        assert answer["prediction"]["index"] == int(expected.argmax()), way
        for explanation in answer.get("explanations", []):
            parts = sum(c["contribution"] for c in explanation["concepts"])
            whole = explanation["bias"] + parts + explanation["residual"]
            assert whole == pytest.approx(explanation["target_value"], abs=1e-4), way
    _audited(subject, module, name, tmp_path)


def _audited(subject: Subject, module: nn.Module, name: str, tmp_path) -> None:
    """Accuracy and cross-entropy of an audit against the same by hand."""
    batch = next(open_data("sklearn:digits").batches(subject, 24))
    labels = 1 - batch.labels % 2 if subject.n_classes == 2 else batch.labels
    pixels = batch.images.permute(0, 2, 3, 1).numpy()
    np.savez(tmp_path / "some.npz", images=pixels, labels=labels.numpy())
    metrics = audit(subject, open_data(tmp_path / "some.npz"), {}, AuditConfig(images=24)).metrics
    if name == "one probability":  # float32 holds no probability between 1 - 6e-8 and 1; its logit it does
        name, module = "one logit", module[0]
    with torch.no_grad():
        p = probabilities(name, module(subject.normalise(batch.images)))
    assert metrics["model/accuracy"].value == pytest.approx(float((p.argmax(1) == labels).double().mean()))
    loss = -p.gather(1, labels[:, None]).clamp_min(1e-30).log()
    if name != "sigmoid":  # where every class has a probability of its own, cross-entropy counts all of them
        assert metrics["model/cross_entropy"].value == pytest.approx(float(loss.mean()), rel=1e-3)
