"""Slots of several images: one concept each where concepts are shared, ranks where they are of a class."""

import numpy as np
import pytest

from auditor.explainers.explanation import ClassScore, Concept, Explanation
from auditor.explainers.shown_concepts import shown_concepts


def explained(target, contributions):
    """An explanation of a class by concepts of these contributions; their activations are 2."""
    score = ClassScore(target, f"class {target}", 1.0, 0.0)
    concepts = tuple(Concept(k, f"concept {k}", 2.0, c) for k, c in contributions.items())
    return Explanation("nmf", score, score, 0.0, concepts)


def test_the_concepts_that_count_most_over_all_images_come_first():
    one = explained(0, {0: 1.0, 1: -3.0, 2: 0.0})
    two = explained(1, {0: 0.5, 1: 0.0, 2: 0.5})
    shown = shown_concepts([one, two], is_of_class=False)
    # shares of concept 0: 1/4 + 1/2, of 1: 3/4 + 0, of 2: 0 + 1/2; the first two tie and the lower index goes first
    assert shown.labels == ("concept 0", "concept 1", "concept 2")
    np.testing.assert_allclose(shown.values, [[0.25, -0.75, 0.0], [0.5, 0.0, 0.5]])
    assert shown.has_contributions
    assert not shown.is_by_rank
    assert [c.index for c in shown.concepts[1]] == [0, 1, 2]


def test_ranks_where_concepts_are_of_the_class():
    one = explained(0, {0: 1.0, 1: -3.0})
    two = explained(1, {7: 2.0, 8: 1.0, 9: 1.0})
    shown = shown_concepts([one, two], is_of_class=True)
    assert shown.is_by_rank
    assert shown.labels == ()
    np.testing.assert_allclose(shown.values, [[-0.75, 0.25, 0.0], [0.5, 0.25, 0.25]])
    assert shown.concepts[0][2] is None
    assert [c.index for c in shown.concepts[1]] == [7, 8, 9]


def test_concepts_of_one_class_are_slots_again():
    shown = shown_concepts([explained(3, {0: 1.0}), explained(3, {0: 1.0, 1: 1.0})], is_of_class=True)
    assert not shown.is_by_rank
    assert shown.labels == ("concept 0", "concept 1")
    assert shown.concepts[0][1] is None


@pytest.mark.parametrize("is_of_class", [False, True])
def test_no_more_slots_than_asked_for(is_of_class):
    many = [explained(k, {i: 1.0 + i for i in range(10)}) for k in range(2)]
    shown = shown_concepts(many, is_of_class=is_of_class, most=4)
    assert shown.values.shape == (2, 4)
    assert [c.index for c in shown.concepts[0]] == [9, 8, 7, 6]
    np.testing.assert_allclose(shown.values[0], np.array([10, 9, 8, 7]) / 55)


def test_activations_where_there_are_no_contributions():
    shown = shown_concepts([explained(0, {0: None, 1: None})], is_of_class=False)
    assert not shown.has_contributions
    np.testing.assert_allclose(shown.values, [[0.5, 0.5]])


def test_nothing_to_show():
    assert shown_concepts([], is_of_class=False).values.shape == (0, 0)
    silent = shown_concepts([explained(0, {0: 0.0})], is_of_class=False)
    np.testing.assert_array_equal(silent.values, [[0.0]])
