"""Metrics of the model against closed forms, the plain loop, and themselves on awkward networks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from auditor import Subject
from auditor.auditing.model_quality import model_metrics
from auditor.metrics.measure import Measure
from tests.auditor.metrics.small_networks import examples, subject_of


@pytest.fixture(scope="module")
def of_digits(trained, digits_data):
    batch = next(digits_data.batches(trained[0], 60))
    stages = []
    metrics = model_metrics(trained[0], batch.images, batch.labels, progress=lambda *step: stages.append(step))
    return metrics, stages


def test_metrics_of_the_digits_network(of_digits):
    explanations, stages = of_digits
    assert all(isinstance(m, Measure) for m in explanations.values())
    layers = {"features.0", "features.2", "features.5", "head.1", "head.3"}
    assert {k.split("/")[1] for k in explanations if k.count("/") == 2} == layers
    for layer in layers:
        assert -1 <= explanations[f"model/{layer}/faithfulness"].value <= 1
        assert explanations[f"model/{layer}/cosine_max"].null is not None
    assert explanations["model/accuracy"].value > 0.9
    assert explanations["model/accuracy"].null == 0.1
    sampled, local, proof = (explanations[f"model/c1_{k}"] for k in ("sampled", "local", "certified"))
    assert 0 < sampled.value <= local.value <= proof.value
    assert 0 < sampled.null <= local.null <= proof.null < proof.value  # never trained: hardly moves
    assert 0 < explanations["model/c2_sampled"].value <= explanations["model/c2_local"].value
    assert explanations["model/c2_certified"].status == "skipped"
    assert "relu in features.1" in explanations["model/c2_certified"].reason
    assert {s for s, _, _ in stages} == {"weights of every layer", "neurons ablated", "stability"}
    assert all(done <= total for _, done, total in stages)


def test_metrics_repeat(of_digits, trained, digits_data):
    batch = next(digits_data.batches(trained[0], 60))
    assert model_metrics(trained[0], batch.images, batch.labels) == of_digits[0]


def test_a_tight_budget_draws_neurons_and_says_so(monkeypatch, trained, digits_data):
    monkeypatch.setattr("auditor.auditing.model_quality.BUDGET", 1e9)
    batch = next(digits_data.batches(trained[0], 20))
    metrics = model_metrics(trained[0], batch.images, batch.labels)
    assert metrics["model/features.0/faithfulness"].n == 21
    assert metrics["model/features.0/faithfulness"].reason == "21 of 24 neurons, drawn at random, on 8 of 20 images"
    assert metrics["model/head.1/faithfulness"].reason == ""  # a perceptron above: all at once


def test_without_labels_only_what_needs_them_is_skipped():
    subject = subject_of("tanh")
    metrics = model_metrics(subject, examples(subject)[0], None)
    skipped = {k for k, m in metrics.items() if m.status == "skipped"}
    assert skipped == {"model/accuracy", "model/cross_entropy", "model/1/faithfulness", "model/4/faithfulness"}
    assert metrics["model/c2_certified"].value >= metrics["model/c2_local"].value  # tanh is smooth


def test_attention_is_measured_but_not_certified():
    subject = subject_of("attention")
    metrics = model_metrics(subject, *examples(subject))
    assert metrics["model/attention/mean_abs_weight"].n == 18 * 6
    assert metrics["model/attention:2/mean_abs_weight"].n == 36
    assert metrics["model/c1_certified"].status == "skipped"
    assert "attention" in metrics["model/c1_certified"].reason
    assert metrics["model/c1_local"].value >= metrics["model/c1_sampled"].value > 0


def test_what_cannot_be_traced_or_read_is_skipped_with_a_reason():
    class Undecided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(30, 3)

        def forward(self, x):
            z = self.a(x.flatten(1))
            return z if float(z.sum()) > 0 else -z  # export cannot follow a branch on data

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.linspace(-1, 1, 90).view(3, 30))

        def forward(self, x):
            return F.linear(x.flatten(1), self.w)

    for module, why in ((Undecided(), "torch.export could not follow"), (Functional(), "no module of its own")):
        subject = Subject(module, input_shape=(1, 5, 6))
        metrics = model_metrics(subject, *examples(subject, 5))
        assert metrics["model/accuracy"].status == "passed"
        assert metrics["model/c1_local"].status == "skipped"
        assert why in metrics["model/c1_local"].reason


def test_a_model_from_a_pt2_file_gives_the_same(tmp_path):
    subject = subject_of("residual")
    x, y = examples(subject, 8)
    path = tmp_path / "model.pt2"
    program = torch.export.export(subject.module, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    torch.export.save(program, path)
    back = Subject(torch.export.unflatten(torch.export.load(path)), input_shape=(1, 5, 6), mean=0.2, std=0.4)
    ours, theirs = model_metrics(subject, x, y), model_metrics(back, x, y)
    assert ours.keys() == theirs.keys()
    for name, m in ours.items():
        if m.status == "passed":
            assert theirs[name].value == pytest.approx(m.value, rel=1e-4, abs=1e-6), name
            assert theirs[name].null == pytest.approx(m.null, rel=1e-4), name
