"""Confident learning: planted wrong labels are found, an honest set gives none, and the definition holds."""

import pytest
import torch

from auditor.metrics.suspicious_labels import FEW, suspicious_labels


def slowly(p, labels):
    """The definition, image by image."""
    n, k = p.shape
    t = []
    for j in range(k):
        of_j = [float(p[i, j]) for i in range(n) if int(labels[i]) == j]
        t.append(sum(of_j) / len(of_j) if len(of_j) >= FEW else float("inf"))
    out = set()
    for i in range(n):
        confident = [j for j in range(k) if float(p[i, j]) >= t[j]]
        if int(labels[i]) >= 0 and confident:
            best = max(confident, key=lambda j: float(p[i, j]))
            if best != int(labels[i]):
                out.add((i, best))
    return out


@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_definition(seed):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(-1, 4, (90,), generator=g)
    labels[labels == 3] = torch.where(torch.rand(int((labels == 3).sum()), generator=g) < 0.9, 0, 3)  # class 3: few
    p = (3 * torch.randn(90, 4, generator=g)).double().softmax(1)
    suspicions = suspicious_labels(p, labels)
    assert {(s.row, s.suggested) for s in suspicions} == slowly(p, labels)
    assert suspicions
    margins = [s.margin for s in suspicions]
    assert margins == sorted(margins, reverse=True)
    for s in suspicions:
        assert s.label == int(labels[s.row])
        assert s.margin == pytest.approx(float(p[s.row, s.suggested] - p[s.row, s.label]), abs=1e-6)


def test_planted_wrong_labels_are_the_suspicious_ones():
    g = torch.Generator().manual_seed(0)
    truth = torch.arange(300) % 3
    p = (6 * torch.nn.functional.one_hot(truth, 3) + torch.randn(300, 3, generator=g)).double().softmax(1)
    assert len(suspicious_labels(p, truth)) <= 3
    labels = truth.clone()
    labels[::30] = (truth[::30] + 1) % 3
    rows = {s.row for s in suspicious_labels(p, labels)}
    planted = set(range(0, 300, 30))
    assert len(rows & planted) >= 5  # those of whom the model is surer than on average
    assert len(rows - planted) <= 3


def test_without_labels_there_is_nothing_to_doubt():
    p = torch.full((4, 2), 0.5)
    assert suspicious_labels(p, torch.full((4,), -1)) == []
    assert suspicious_labels(p, torch.tensor([0, 1, 0, 1])) == []  # too few of each class for a threshold


def test_a_probability_that_is_just_the_mean_of_its_class_is_confident():
    p = torch.tensor([[0.75, 0.25]] * 8 + [[0.25, 0.75]] * 8 + [[0.75, 0.25]])
    labels = torch.tensor([0] * 8 + [1] * 8 + [1])
    assert [s.row for s in suspicious_labels(p, labels)] == [16]
