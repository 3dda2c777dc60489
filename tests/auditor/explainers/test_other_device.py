"""Fit, explain and answer on a second device: every tensor is where it has to be, and the numbers stay."""

import pytest
import torch
from torch import nn

from auditor import Subject, fit
from auditor.data.source import open_data
from auditor.explainers.answer import answer_images
from auditor.explainers.base import Explainer
from tests.other_device import ELSEWHERE, other_device

OPTIONS = {
    "nmf": {"rank": 3, "refits": 1, "max_eval": 10},
    "xnn": {"max_epochs": 2, "targets": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], "n": 2},
    "tree": {"epochs": 2},
    "coupled": {},
    "deepfacto": {"epochs": 1, "refits": 0},
}
QUICK = ("nmf", "xnn")


@pytest.fixture(scope="module")
def digits():
    return open_data("sklearn:digits", limit=60)


@pytest.fixture(scope="module")
def images(digits):
    return next(iter(digits.batches(Subject(network(), input_shape=(1, 8, 8)), 8))).images


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 6, 3, padding=1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 10),
    ).eval()  # fmt: skip


def subject_of(images):
    """A network that says different classes, by the spread of its logits over some images."""
    net = network()
    with torch.no_grad():
        z = Subject(net, input_shape=(1, 8, 8)).logits(images)
        net[-1].weight.data /= z.std(0)[:, None]
        net[-1].bias.data = -z.mean(0) / z.std(0)
    return Subject(net, input_shape=(1, 8, 8))


def answer_of(explainer, subject, images):
    return answer_images(subject, {"e": explainer}, images[:2], stability="fast", heatmaps="array")[1].to_json()


def numbers(answer):
    """Return every number of an answer, in its order."""
    if isinstance(answer, dict):
        return [n for value in answer.values() for n in numbers(value)]
    if isinstance(answer, list):
        return [n for value in answer for n in numbers(value)]
    return [float(answer)] if isinstance(answer, (int, float)) else []


@pytest.mark.parametrize("kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in OPTIONS])
def test_what_was_fitted_here_explains_there(kind, digits, images, tmp_path):
    subject = subject_of(images)
    fit(kind, subject, digits, **OPTIONS[kind]).save(tmp_path / kind)
    here = answer_of(Explainer.load(tmp_path / kind, subject), subject, images)
    with other_device():
        moved = subject_of(images).to(ELSEWHERE)
        there = answer_of(Explainer.load(tmp_path / kind, moved), moved, images)
    assert any(c["heatmap"] for e in here["explanations"] for c in e["concepts"])
    torch.testing.assert_close(numbers(there), numbers(here), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in OPTIONS])
def test_a_fit_there_gives_explanations_that_add_up(kind, digits, images):
    with other_device():
        subject = subject_of(images).to(ELSEWHERE)
        there = answer_of(fit(kind, subject, digits, **OPTIONS[kind]), subject, images)
    (explanation,) = there["explanations"]
    parts = [c["contribution"] for c in explanation["concepts"]]
    total = explanation["bias"] + sum(parts) + explanation["others"] + explanation["residual"]
    assert total == pytest.approx(explanation["target_value"], abs=1e-3)
    assert any(c["heatmap"] for c in explanation["concepts"])
    assert 0 < there["stability"]["score"] <= 1


def test_a_graph_follows_its_subject(images):
    from auditor.network.aten_graph import graph_of

    subject = subject_of(images)
    before = graph_of(subject)
    assert graph_of(subject) is before
    with other_device():
        moved = graph_of(subject.to(ELSEWHERE))
    assert {c.device.type for c in moved.constants.values()} == {"meta"}
    with other_device():
        assert {c.device.type for c in moved.on_cpu().constants.values()} == {"cpu"}


@pytest.mark.slow
def test_a_graph_is_exported_from_there(digits, images):
    from auditor.explainers.onnx_export import export_graph

    explainers = {kind: fit(kind, subject_of(images), digits, **OPTIONS[kind]) for kind in ("nmf", "deepfacto")}
    here = export_graph(subject_of(images), explainers)
    with other_device():
        there = export_graph(subject_of(images).to(ELSEWHERE), explainers)
    assert there.outputs == here.outputs
    assert there.worst < 1e-4


def test_the_self_test_of_doctor_fits_and_answers_on_a_device():
    from auditor.commands.machine_checks import _fitted

    with other_device():
        assert _fitted(ELSEWHERE, {"nmf": OPTIONS["nmf"]}) < 1e-3
