"""Concept vectors by a classifier in all neurons, scores of a linear head in closed form, the tests of significance."""

import math

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

from auditor import Subject
from auditor.errors import DataError
from auditor.metrics.concept_vectors import (
    ConceptVectors,
    RisingShare,
    class_slopes,
    concept_vector,
    judge_scores,
    random_sets,
    random_vectors,
    vectors_of,
    welch_p,
)


def normal(n, d, seed, shift=0.0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)) + shift


@pytest.mark.parametrize("neurons", [7, 61])
def test_the_vector_is_that_of_a_classifier_in_all_neurons(neurons):
    a, b = normal(13, neurons, 0, 0.7), normal(17, neurons, 1)
    direction, _ = concept_vector(a, b)
    rows = torch.cat([a, b]).double()
    rows = rows - rows.mean(0)
    rows = rows / (rows.norm() / math.sqrt(len(rows)))
    plain = LogisticRegression(C=1.0, max_iter=10_000, tol=1e-10).fit(rows.numpy(), [1] * 13 + [0] * 17).coef_[0]
    plain = torch.from_numpy(plain / (plain**2).sum() ** 0.5)
    torch.testing.assert_close(direction, plain, rtol=0, atol=2e-3)  # both stop at the tolerance of the solver
    assert float(direction @ (a.double().mean(0) - b.double().mean(0))) > 0  # towards the concept


def test_accuracy_is_on_images_that_the_classifier_did_not_learn():
    apart = concept_vector(normal(30, 50, 0, 3.0), normal(30, 50, 1))[1]
    alike = [concept_vector(normal(30, 50, 2 * s), normal(30, 50, 2 * s + 1))[1] for s in range(8)]
    assert apart == 1.0
    assert abs(sum(alike) / 8 - 0.5) < 4 * 0.5 / math.sqrt(8 * 60)  # 60 images each; trained ones would all be right


def test_constant_activations_have_no_direction():
    direction, accuracy = concept_vector(torch.ones(10, 5), torch.ones(10, 5))
    assert direction.tolist() == [0] * 5
    assert accuracy == 0.5


def test_random_sets_share_images_only_where_the_pool_is_small():
    sets = random_sets(31, 10, 3, seed=1)
    assert [len(s) for s in sets] == [10, 10, 10]
    assert torch.cat(sets).unique().numel() == 30
    assert all(s.unique().numel() == 10 for s in random_sets(23, 10, 7, seed=1))
    assert not torch.equal(sets[0], random_sets(31, 10, 3, seed=2)[0])
    with pytest.raises(DataError, match="a pool of at least 20 to differ, got 19; give more with --random"):
        random_sets(19, 10, 3, seed=0)


def test_random_vectors_never_hold_an_image_on_both_sides():
    pool = torch.eye(23)  # the direction's support shows which images took part
    sets = random_sets(23, 10, 5, seed=0)
    null = random_vectors(pool, sets)
    for rows, direction in zip(sets, null.directions, strict=True):
        assert (direction[rows] > 0).all()
    assert null.directions.shape == (5, 23)


def test_too_few_images_of_a_concept():
    with pytest.raises(DataError, match="concept 'stripes' has 9 images, a concept vector needs at least 10"):
        vectors_of("stripes", torch.rand(9, 4), torch.rand(40, 4), [torch.arange(9)])


@pytest.fixture
def head():
    torch.manual_seed(0)
    return nn.Sequential(nn.Identity(), nn.Flatten(), nn.Linear(12, 2))


def test_slopes_and_scores_of_a_linear_head_are_its_weights(head):
    subject = Subject(head, input_shape=(1, 3, 4))
    z, classes = torch.rand(6, 1, 3, 4), torch.tensor([0, 1, 0, 1, -1, 0])
    slopes = class_slopes(subject, "0", z[:4], classes[:4])
    torch.testing.assert_close(slopes, head[2].weight.detach()[classes[:4]])
    directions = normal(5, 12, 3)
    share = RisingShare(directions, 2)
    share.add(subject, "0", z, classes)
    assert share.n.tolist() == [3, 2]
    torch.testing.assert_close(share.scores(), (directions @ head[2].weight.detach().T > 0).double())
    share.add(subject, "0", z[:0], classes[:0])  # nothing to look at


def test_a_score_counts_where_it_differs_from_random_ones_and_the_layer_holds_the_concept(head):
    subject = Subject(head, input_shape=(1, 3, 4), class_names=["a", "b"])
    up = head[2].weight.detach()[0]
    concept = ConceptVectors("up", torch.stack([up] * 6), (0.9,) * 6, 20)
    unseen = ConceptVectors("unseen", torch.stack([up] * 6), (0.52,) * 6, 20)
    null = ConceptVectors("random", torch.stack([up, -up] * 3), (0.5,) * 6, 20)
    share = RisingShare(torch.cat([concept.directions, unseen.directions, null.directions]), 2)
    share.add(subject, "0", torch.rand(10, 1, 3, 4), torch.zeros(10, dtype=torch.int64))
    rows = judge_scores([concept, unseen], null, share, ["a", "b"], [0])
    assert [(r.concept, r.label, r.score, r.random_score, r.n_images) for r in rows] == [
        ("up", "a", 1.0, 0.5, 10),
        ("unseen", "a", 1.0, 0.5, 10),
    ]
    assert rows[0].p_corrected == pytest.approx(2 * rows[0].p)  # two tests
    assert rows[0].p == pytest.approx(welch_p(torch.ones(6), torch.tensor([1.0, 0.0] * 3)))
    assert [r.separates for r in rows] == [True, False]
    assert not rows[1].is_significant


def test_welch_by_its_formula_and_without_variance():
    a, b = torch.tensor([0.9, 0.8, 1.0, 0.7]), torch.tensor([0.4, 0.6, 0.5])
    va, vb = float(a.var() / 4), float(b.var() / 3)
    t = float(a.mean() - b.mean()) / math.sqrt(va + vb)
    freedom = (va + vb) ** 2 / (va**2 / 3 + vb**2 / 2)
    x = torch.linspace(-400, 400, 4_000_001, dtype=torch.float64)
    density = (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
    plain = float(density[x.abs() >= abs(t)].sum() / density.sum())
    assert welch_p(a, b) == pytest.approx(plain, rel=1e-3)  # the sum's step is 2e-4, its tails end at 400
    assert welch_p(torch.ones(3), torch.zeros(3)) == pytest.approx(2 / 20)  # one of 20 splits, and its mirror
