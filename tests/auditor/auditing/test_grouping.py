"""Grouping by an agent: classes that the contributions give away are found, noise is at its null."""

import dataclasses

import pytest
import torch

from auditor.auditing.case import Case, Effort
from auditor.auditing.grouping import grouping
from auditor.auditing.images import AuditImages
from auditor.explainers.explanation import ClassScore, Concept, Explanation


class Explained(Case):
    """A case whose explanations are given."""

    explanations = None


def case(contributions, classes, of_class=False, heat=None):
    """A case of images with one row of contributions each; None: a kind without contributions."""
    score = [ClassScore(k, str(k), 1.0, 1.0) for k in classes]
    rows = contributions if contributions is not None else [[None]] * len(classes)
    explanations = [
        Explanation(
            "x",
            score[i],
            score[i],
            1.0,
            tuple(Concept(j, f"c{j}", 1.0, v, None if heat is None else heat[i]) for j, v in enumerate(row)),
        )
        for i, row in enumerate(rows)
    ]
    n = len(classes)
    images = torch.rand(n, 3, 13, 17, generator=torch.Generator().manual_seed(0))
    sample = AuditImages(images, torch.zeros(n, 5), torch.tensor(classes), [str(i) for i in range(n)], list(range(n)))
    explainer = type("E", (), {"concepts_are_of_class": of_class, "kind": "x"})()
    made = Explained(None, explainer, sample, None, Effort())
    object.__setattr__(made, "explanations", explanations)
    made.__dict__["sample"] = sample
    return made


CLASSES = [i % 4 for i in range(40)]


def test_classes_that_contributions_give_away_are_found():
    rows = [[float(k == j) + 0.01 * i for j in range(4)] for i, k in enumerate(CLASSES)]
    rows = [[v / 10 if i % 2 else v for v in row] for i, row in enumerate(rows)]  # only shares count
    measure = grouping(case(rows, CLASSES))["grouping_purity"]
    assert measure.value > 0.9
    assert 0.45 < measure.null < 0.6
    assert measure.n == 40


def test_noise_is_at_its_null():
    g = torch.Generator().manual_seed(1)
    measure = grouping(case(torch.randn(40, 5, generator=g).tolist(), CLASSES))["grouping_purity"]
    assert measure.value == pytest.approx(measure.null, abs=0.08)


def test_which_concepts_a_class_has_does_not_give_it_away():
    g = torch.Generator().manual_seed(2)
    rows = torch.zeros(40, 8)
    for i, k in enumerate(CLASSES):  # two concepts of its own per class
        rows[i, 2 * k : 2 * k + 2] = torch.rand(2, generator=g)
    assert grouping(case(rows.tolist(), CLASSES))["grouping_purity"].value > 0.97
    ranked = [[v for v in row if v] for row in rows.tolist()]
    by_rank = grouping(case(ranked, CLASSES, of_class=True))["grouping_purity"]
    assert by_rank.value == pytest.approx(by_rank.null, abs=0.1)


def test_a_kind_without_contributions_is_judged_by_the_image_through_its_heatmap():
    heat = torch.zeros(40, 13, 17)
    for i, k in enumerate(CLASSES):
        heat[i, 3 * k : 3 * k + 3] = 1.0
    assert grouping(case(None, CLASSES, heat=heat))["grouping_purity"].value > 0.9
    assert grouping(case(None, CLASSES))["grouping_purity"].status == "skipped"


def test_numbers_that_are_not_finite_fail_the_measure():
    rows = [[float(k), 1.0] for k in CLASSES]
    rows[3] = [float("nan"), 1.0]
    measure = grouping(case(rows, CLASSES))["grouping_purity"]
    assert measure.status == "failed"
    assert "not finite" in measure.reason
    assert grouping(case([[float("nan")]] * 40, CLASSES))["grouping_purity"].status == "failed"


def test_too_few_classes_are_skipped_and_fewer_than_four_are_noted():
    assert "fewer than two classes" in grouping(case([[1.0]] * 8, [0] * 8))["grouping_purity"].reason
    two = grouping(case([[float(k), 1.0] for k in [0, 1] * 6], [0, 1] * 6))["grouping_purity"]
    assert two.value == 1.0
    assert "batches hold 2 classes" in two.reason
    assert dataclasses.is_dataclass(two)
