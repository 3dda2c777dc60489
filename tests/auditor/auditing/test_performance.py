"""How well the model does: calibration, accuracy by class, one logit."""

import numpy as np
import pytest
import torch

from auditor.auditing.images import Answers
from auditor.auditing.performance import performance, two_sided
from auditor.metrics.calibration import expected_calibration_error


def answers_of(logits, labels):
    return Answers(torch.tensor(logits), torch.tensor(labels), [str(i) for i in range(len(labels))])


def test_performance_by_hand(tiny):
    logits = [[2.0, 0, 0], [0, 2.0, 0], [0, 0, 2.0], [2.0, 0, 0], [0, 2.0, 0]]
    metrics = performance(tiny, answers_of(logits, [0, 1, 1, 1, -1]))
    assert metrics["accuracy"].value == 0.5
    assert metrics["accuracy"].n == 4  # one image has no label
    assert metrics["accuracy"].null == 0.75  # always saying class 1
    assert {k: m.value for k, m in metrics.items() if k.startswith("accuracy/")} == {
        "accuracy/a": 1,
        "accuracy/b": pytest.approx(1 / 3),
    }
    assert metrics["worst_class_accuracy"].value == pytest.approx(1 / 3)
    p = np.exp(2) / (np.exp(2) + 2)
    wrong = (1 - p) / 2
    assert metrics["nll"].value == pytest.approx(-(2 * np.log(p) + 2 * np.log(wrong)) / 4)
    assert metrics["ece"].value == pytest.approx(abs(p - 0.5))
    assert metrics["ece"].low <= metrics["ece"].value <= metrics["ece"].high
    assert {k: m.direction for k, m in metrics.items() if k in ("nll", "ece", "accuracy")} == {
        "nll": "down",
        "ece": "down",
        "accuracy": "up",
    }


def test_one_logit_is_that_of_class_1(tiny):
    from auditor import Subject

    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 1))
    subject = Subject(net, input_shape=(1, 2, 2), class_names=["yes"])
    metrics = performance(subject, answers_of([[3.0], [-3.0], [3.0]], [1, 0, 0]))
    assert metrics["accuracy"].value == pytest.approx(2 / 3)
    assert (metrics["accuracy/0"].value, metrics["accuracy/1"].value) == (0.5, 1.0)
    assert two_sided(torch.tensor([[3.0]])).tolist() == [[3.0, 0.0]]
    assert two_sided(torch.tensor([[3.0, 1.0]])).tolist() == [[3.0, 1.0]]


def test_without_labels_everything_is_skipped_in_its_direction(tiny):
    metrics = performance(tiny, answers_of([[1.0, 0, 0]] * 3, [-1] * 3))
    assert {k: m.direction for k, m in metrics.items()} == {
        "accuracy": "up",
        "worst_class_accuracy": "up",
        "nll": "down",
        "ece": "down",
    }
    assert all(m.status == "skipped" and m.reason == "the data has no labels" for m in metrics.values())


def subject_with(output):
    from auditor import Subject

    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    return Subject(net, input_shape=(1, 2, 2), class_names=["a", "b", "c"], output=output)


def test_several_labels_of_an_image_are_judged_one_by_one():
    logits = torch.tensor([[2.0, -1.0, 0.5], [-2.0, 3.0, -0.5]])
    sets = torch.tensor([[True, False, False], [True, True, False]])
    model_answers = Answers(logits, torch.tensor([0, -1]), ["x", "y"], label_sets=sets)
    metrics = performance(subject_with("multilabel"), model_answers)
    assert metrics["accuracy"].value == pytest.approx(4 / 6)
    assert metrics["accuracy"].null == pytest.approx((1 + 0.5 + 1) / 3)
    p = torch.sigmoid(logits.double())
    truth = sets.double()
    plain = -(truth * p.log() + (1 - truth) * (1 - p).log())
    assert metrics["nll"].value == pytest.approx(float(plain.mean()))
    assert [metrics[f"accuracy/{k}"].value for k in "abc"] == [0.5, 1.0, 0.5]
    assert metrics["worst_class_accuracy"].value == 0.5
    sure, right = torch.maximum(p, 1 - p).flatten().numpy(), ((p >= 0.5) == sets).flatten().double().numpy()
    assert metrics["ece"].value == pytest.approx(expected_calibration_error(sure, right))


def test_of_a_multilabel_model_one_label_must_be_more_likely_than_not():
    model_answers = answers_of([[2.0, 1.0, -1.0], [3.0, -0.1, 2.0]], [1, 1])
    metrics = performance(subject_with("multilabel"), model_answers)
    assert metrics["accuracy"].value == 0.5  # the first is right though another label is more probable
    p = torch.sigmoid(torch.tensor([1.0, -0.1], dtype=torch.float64))
    assert metrics["nll"].value == pytest.approx(float(-p.log().mean()), rel=1e-6)
    assert metrics["ece"].status == "skipped"
    assert performance(subject_with("logits"), model_answers)["accuracy"].value == 0.0
