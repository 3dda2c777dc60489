"""A softmax or sigmoid at a model's end changes nothing: probabilities, explanations and audits by every way."""

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
from auditor.explainers.answer import answer_images
from auditor.plugins import attach, describe, load, load_subject, log_subject
from auditor.plugins.registry.onnx_exports import export
from auditor.service.settings import Settings
from auditor.subject.preprocessing import from_pil
from tests.service.conftest import png_of
from tests.service.test_one_answer import Served, differences

OPTIONS = {"explainers": ["*"], "target": "3", "heatmaps": "array", "stability": "off"}


def ending_in(subject: Subject, end: nn.Module) -> Subject:
    """The same network, weights and names with one more operation at its end."""
    net = copy.deepcopy(subject.module)
    net.head.append(end)
    pre = subject.preprocessing
    return Subject(net, input_shape=pre.input_shape, class_names=subject.class_names, mean=pre.mean, std=pre.std)


def registered(subject: Subject, name: str, explainers) -> str:
    uri = log_subject(subject, name, experiment="tests")
    loaded = load_subject(uri)
    for kind, explainer in explainers.items():
        attach(explainer, uri, kind, subject=loaded, attach_anyway=True)
        explainer.name = ""
    export(uri, subject=loaded)
    return uri


@pytest.fixture(scope="module")
def picture(trained):
    content = png_of(next(open_data("sklearn:digits").batches(trained[0], 4)).images[3])
    with Image.open(io.BytesIO(content)) as image:
        return content, torch.from_numpy(from_pil(image, trained[0].preprocessing))[None]


@pytest.fixture(scope="module")
def expected(trained, concepts, heads, picture):
    """What the plain model says, in memory."""
    return _said(answer_images(trained[0], {"nmf": concepts, "xnn": heads}, picture[1], **OPTIONS)[0].to_json())


def _said(answer):
    """Prediction, target and explanations without digests and names of versions."""
    explanations = [{k: v for k, v in e.items() if k != "digest"} for e in answer["explanations"]]
    return {"prediction": answer["prediction"], "target": answer["target"], "explanations": explanations}


def test_a_model_with_a_softmax_answers_like_the_one_without(
    registry, trained, digits_data, picture, expected, cli, tmp_path
):
    soft = ending_in(trained[0], nn.Softmax(1))
    assert soft.output.name == "softmax"
    assert soft.identity.weights == trained[0].identity.weights
    attached = {
        "nmf": fit("nmf", soft, digits_data, rank=6, seed=0, refits=1, max_eval=60),
        "xnn": fit("xnn", soft, digits_data, seed=0, max_epochs=2, max_images=200),
    }
    uri = registered(soft, "softened", attached)
    content, x = picture
    path = tmp_path / "image.png"
    path.write_bytes(content)
    subject = load_subject(uri)
    loaded = {name: load(uri, name, subject=subject) for name in attached}
    flags = ["--explainers", "*", "--target", "3", "--heatmaps", "array", "--stability", "off"]
    ways = {
        "memory": answer_images(soft, attached, x, **OPTIONS)[0].to_json(),
        "pt2": answer_images(subject, loaded, x, **OPTIONS)[0].to_json(),
        "terminal": cli.json("explain", uri, path, *flags),
    }
    encoded = base64.b64encode(content).decode()
    predictions = {}
    for engine in ("torch", "onnx"):
        with TestClient(Served(Settings(model=uri, engine=engine, poll_s=3600)), base_url="http://localhost") as http:
            info = http.get("/model").json()
            assert (info["engine"], info["output"]) == (engine, "softmax")
            ways[f"REST {engine}"] = http.post("/explain", json={"image": encoded, **OPTIONS}).json()
            predictions[f"predict {engine}"] = http.post("/predict", json={"image": encoded}).json()["prediction"]
            instances = {"instances": [{"b64": encoded}]}
            served = http.post("/v1/models/softened:predict", json=instances).json()
            predictions[f"KServe {engine}"] = served["predictions"][0]
    for name, answer in ways.items():
        wrong = differences(expected, _said(answer))
        if "onnx" in name:  # float32 in another order: heatmaps of near-zero mass show it
            wrong = [w for w in wrong if "/heatmap/" not in w and not _near(w)]
        assert not wrong, name
    for name, prediction in predictions.items():
        assert not differences(expected["prediction"], prediction), name
    p = soft.module(soft.normalise(x)).double().max().item()
    assert expected["prediction"]["probability"] == pytest.approx(p, abs=1e-6)


def _near(difference: str) -> bool:
    """Whether two numbers differ by what ONNX Runtime's float32 sums may."""
    a, b = (float(v) for v in difference.rsplit(": ", 1)[1].split(" and "))
    return abs(a - b) <= 2e-5 * max(1.0, abs(a))


@pytest.mark.slow
def test_an_audit_does_not_see_the_softmax(trained, digits_data, concepts, audited):
    plain, softened = audited, ending_in(trained[0], nn.Softmax(1))
    explainers = {"concepts": fit("nmf", softened, digits_data, rank=6, seed=0, refits=1, max_eval=60)}
    soft = audit(softened, digits_data, explainers, AuditConfig(images=30))
    assert plain.metrics.keys() == soft.metrics.keys()
    a, b = ({k: m.value for k, m in x.metrics.items() if m.value == m.value} for x in (plain, soft))
    assert not differences(a, b)
    assert (plain.model["output"], soft.model["output"]) == ("logits", "softmax")


def test_labels_of_a_multilabel_model_by_every_way(registry, trained, picture, cli, tmp_path):
    labels = ending_in(trained[0], nn.Sigmoid())
    uri = log_subject(labels, "labels", experiment="tests")
    assert describe(uri, output="multilabel")["output"] == "multilabel"
    subject = load_subject(uri)
    attach(
        fit("nmf", subject, open_data("sklearn:digits", limit=80), rank=4, refits=1),
        uri,
        "nmf",
        subject=subject,
        attach_anyway=True,
    )
    export(uri, subject=subject)
    content, x = picture
    expected = labels.module(x)[0].double()
    path = tmp_path / "image.png"
    path.write_bytes(content)
    answers = [cli.json("explain", uri, path, "--heatmaps", "none")["prediction"]]
    for engine in ("torch", "onnx"):
        with TestClient(Served(Settings(model=uri, engine=engine, poll_s=3600)), base_url="http://localhost") as http:
            assert http.get("/model").json()["engine"] == engine
            answers.append(http.post("/predict", files={"image": content}).json()["prediction"])
    for prediction in answers:
        for item in prediction["probabilities"]:
            assert item["probability"] == pytest.approx(float(expected[item["index"]]), abs=1e-6)
        assert {item["index"] for item in prediction["labels"]} == set((expected >= 0.5).nonzero()[:, 0].tolist())
    assert f"{int(expected.argmax())} " in cli("explain", uri, path, "--heatmaps", "none").stdout
    images = np.stack([x[0].numpy()] * 24)
    sets = np.tile((expected >= 0.5).numpy(), (24, 1)).astype(np.int64)
    sets[12:, 0] = 1 - sets[12:, 0]
    np.savez(tmp_path / "sets.npz", images=images, labels=sets)
    only = AuditConfig(images=20, checks=("performance",))
    metrics = audit(subject, open_data(tmp_path / "sets.npz"), {}, only).metrics
    assert metrics["model/accuracy"].value == pytest.approx(1 - 0.5 / 10)
    assert metrics["model/accuracy/0"].value == 0.5
    assert metrics["model/worst_class_accuracy"].value == 0.5


def test_a_graph_of_other_logits_is_not_served(registry, trained, concepts, picture):
    soft = ending_in(trained[0], nn.Softmax(1))
    uri = log_subject(soft, "hardened", experiment="tests")
    describe(uri, output="logits")
    export(uri)
    describe(uri, output="softmax")
    with TestClient(Served(Settings(model=uri, engine="auto", poll_s=3600)), base_url="http://localhost") as http:
        assert http.get("/model").status_code == 503  # the graph was checked against other logits: export it again
