"""One explainer before the audit's images: effort, strengths, maps and correlations by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from auditor.auditing.case import Effort, correlations, noted, relevance, resized, similarity, strengths
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


def test_each_image_is_explained_for_its_own_target_whatever_company_it_has(linear, chosen):
    asked = []

    class Counting(PixelWise):
        def explain(self, subject, images, target=None, **options):
            asked.append((target, len(images), options))
            return super().explain(subject, images, target)

    case = case_of(linear, chosen, Counting(), options={"k": 3})
    targets = [0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 0]
    got = case.explain(linear, "as it is", chosen, chosen.images, targets)
    assert [e.target.index for e in got] == targets
    assert asked == [(0, 6, {"k": 3}), (1, 6, {"k": 3})]
    alone = [
        case.explain(linear, "as it is", chosen.rows([i]), chosen.images[i : i + 1], [t])[0]
        for i, t in enumerate(targets)
    ]
    assert [e.target_value for e in got] == pytest.approx([e.target_value for e in alone])
    many, stages = chosen.rows([i % 12 for i in range(65)]), []
    asked.clear()
    case = case_of(linear, many, Counting())
    got = replace(case, progress=lambda *a: stages.append(a)).explain(linear, "as it is", many, many.images, None)
    assert len(got) == 65
    assert [n for _, n, _ in asked] == [32, 32, 1]
    assert stages == [("explaining", 32, 65), ("explaining", 64, 65), ("explaining", 65, 65)]


def test_a_case_judges_images_of_classes_that_the_explainer_knows(linear, chosen):
    case = case_of(linear, chosen, PixelWise(), images=5)
    assert case.sample.ids == [chosen.ids[i] for i in spread(12, 5)]
    sample, explanations = case.rows([3, 1])
    assert sample.ids == [case.sample.ids[i] for i in (3, 1)]
    assert sample.index == tuple(spread(12, 5)[i] for i in (3, 1))  # rows of the audit's images
    assert [e.prediction.index for e in explanations] == sample.logits.argmax(1).tolist()


def test_rounds_add_images_that_are_spread_over_all_and_an_exhaustive_case_has_one(linear, chosen):
    many = chosen.rows([i % 12 for i in range(60)])
    case = case_of(linear, many, PixelWise(), images=60)
    rounds = case.rounds(40)
    assert [len(r) for r in rounds] == [12, 10, 18]
    assert len({i for r in rounds for i in r}) == 40
    assert max(np.diff(sorted(rounds[0]))) <= 8  # 12 of 60
    assert [len(r) for r in case_of(linear, many, PixelWise(), images=60, is_sequential=False).rounds(40)] == [40]
    assert case_of(linear, chosen, PixelWise(), images=5).rounds(40) == [[0, 2, 4, 1, 3]]


def test_the_long_form_takes_every_image_and_draw_and_a_search_takes_few():
    usual, long = (Effort.of(PixelWise(), 100, 0, 4, is_exhaustive=e) for e in (False, True))
    assert (usual.is_sequential, usual.flip_draws, usual.flip_steps, usual.noise_samples) == (True, 1, 8, 2)
    assert (long.is_sequential, long.flip_draws, long.flip_steps, long.noise_samples) == (False, 2, 16, 3)
    assert usual.share(40) == long.share(40) == 0.4

    class Searching(PixelWise):
        searches = True

    assert Effort.of(Searching(), 100, 0, 4).flip_images == 4


def test_a_remark_never_hides_a_reason():
    assert noted(Measure(1.0), "some left out").reason == "some left out"
    assert noted(Measure(1.0, reason="odd"), "some left out").reason == "odd"
    assert noted(Measure(1.0), "").reason == ""
