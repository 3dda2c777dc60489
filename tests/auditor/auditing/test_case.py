"""One explainer before the audit's images: effort, strengths, maps and correlations by hand."""

import math

import numpy as np
import pytest
import torch

from auditor.auditing.case import Effort, correlations, explain, noted, relevance, resized, similarity, strengths
from auditor.auditing.images import spread
from auditor.explainers.explanation import Concept, Explanation, class_scores
from auditor.metrics.measure import Measure
from tests.auditor.auditing.linear_case import PixelWise, case_of


def test_correlations_by_hand():
    a = torch.tensor([[1.0, 2.0, 4.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    b = torch.tensor([[3.0, 2.0, 0.0], [1.0, 2.0, 3.0]], dtype=torch.float64)
    result = correlations(a, b)
    assert float(result[0]) == pytest.approx(np.corrcoef(a[0], b[0])[0, 1])
    assert math.isnan(float(result[1]))


def test_relevance_is_the_weighted_sum_of_unit_maps():
    score, _ = class_scores(torch.tensor([[1.0, 0.0]]), ("a", "b"), [0])
    maps = (torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]]), None)
    concepts = tuple(Concept(k, "", 1.0, c, m) for k, (c, m) in enumerate(zip((3.0, -2.0, 9.0), maps, strict=True)))
    e = Explanation("nmf", score[0], score[0], 1.0, concepts, 0.0, 0.0)
    torch.testing.assert_close(relevance(e, (2, 2)), torch.tensor([[3.0, -1.0], [-1.0, 0.0]]))


def explanation(**parts):
    score, _ = class_scores(torch.tensor([[1.0, 0.0]]), ("a", "b"), [0])
    return Explanation("x", score[0], score[0], 1.0, **{"concepts": (), "bias": 0.0, "residual": 0.0} | parts)


def test_strengths_are_contributions_and_activations_only_where_there_are_none():
    a = explanation(concepts=(Concept(2, "", 5.0, 0.0), Concept(0, "", 1.0, -3.0)))
    b = explanation(concepts=(Concept(1, "", 7.0, None),))
    assert strengths([a, b]).tolist() == [[-3.0, 0.0, 0.0], [0.0, 7.0, 0.0]]  # 0 is a contribution, not a missing one
    assert strengths([b], width=4).tolist() == [[0.0, 7.0, 0.0, 0.0]]
    assert strengths([explanation()]).shape == (1, 1)


def test_a_map_of_its_own_is_taken_and_empty_maps_give_none():
    grid = [[1.0, 2.0], [3.0, 4.0]]
    e = explanation(extra={"relevance": grid}, concepts=(Concept(0, "", 1.0, 1.0, torch.ones(2, 2)),))
    assert relevance(e, (2, 2)).tolist() == grid
    assert relevance(explanation(concepts=(Concept(0, "", 1.0, 1.0, torch.zeros(2, 2)),)), (2, 2)) is None
    half = explanation(concepts=(Concept(0, "", 2.0, None, torch.tensor([[4.0, 0.0], [0.0, 0.0]])),))
    assert relevance(half, (2, 2)).tolist() == [[2.0, 0.0], [0.0, 0.0]]  # unit mass, times the activation


def test_maps_are_averaged_where_they_shrink_and_interpolated_where_they_grow():
    m = torch.arange(16.0).view(4, 4)
    assert resized(m, (2, 2)).tolist() == [[2.5, 4.5], [10.5, 12.5]]
    grown = resized(torch.tensor([[0.0, 1.0]]), (1, 4))
    assert grown.shape == (1, 4)
    assert bool((grown.diff(dim=1) >= 0).all())
    assert float(grown.min()) >= 0
    assert float(grown.max()) <= 1


def test_similarity_compares_maps_where_all_have_one_else_contributions():
    maps = [
        explanation(extra={"relevance": [[0.0, 1.0], [2.0, 3.0]]}),
        explanation(extra={"relevance": [[3.0, 2.0], [1.0, 0.0]]}),
    ]
    assert similarity(maps, maps).tolist() == pytest.approx([1, 1])
    assert similarity(maps[:1], maps[1:]).tolist() == pytest.approx([-1])
    a = [explanation(concepts=(Concept(0, "", 1.0, 1.0), Concept(1, "", 1.0, 2.0)))]
    b = [explanation(concepts=(Concept(0, "", 1.0, 2.0), Concept(1, "", 1.0, 4.0)), extra={"relevance": [[1.0]]})]
    assert similarity(a, b).tolist() == pytest.approx([1])


def test_one_column_has_a_cosine_instead_of_a_correlation():
    assert correlations(torch.tensor([[2.0]]), torch.tensor([[-3.0]])).tolist() == [-1.0]


def test_explaining_keeps_the_order_and_asks_once_per_class(linear, chosen):
    requests = []

    class Counting(PixelWise):
        def explain(self, subject, images, target=None, **options):
            requests.append((target, len(images), options))
            return super().explain(subject, images, target)

    explainer = Counting()
    targets = [0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 0]
    calls = []
    got = explain(explainer, linear, chosen.images, targets, Effort(options={"k": 3}), lambda *a: calls.append(a))
    assert [e.target.index for e in got] == targets
    assert requests == [(0, 6, {"k": 3}), (1, 6, {"k": 3})]
    assert calls == [("explaining", 12, 12)]
    alone = [explain(explainer, linear, chosen.images[i : i + 1], [t], Effort())[0] for i, t in enumerate(targets)]
    assert [e.target_value for e in got] == pytest.approx([e.target_value for e in alone])
    many = torch.cat([chosen.images] * 6)[:65]
    requests.clear()
    assert len(explain(explainer, linear, many, None, Effort())) == 65
    assert [n for _, n, _ in requests] == [32, 32, 1]


def test_a_case_judges_images_of_classes_that_the_explainer_knows(linear, chosen):
    case = case_of(linear, chosen, PixelWise(), images=5)
    assert case.sample.ids == [chosen.ids[i] for i in spread(12, 5)]
    sample, explanations = case.subset(2)
    assert sample.ids == [case.sample.ids[i] for i in spread(5, 2)]
    assert [e.prediction.index for e in explanations] == sample.logits.argmax(1).tolist()


def test_a_remark_never_hides_a_reason():
    assert noted(Measure(1.0), "some left out").reason == "some left out"
    assert noted(Measure(1.0, reason="odd"), "some left out").reason == "odd"
    assert noted(Measure(1.0), "").reason == ""
