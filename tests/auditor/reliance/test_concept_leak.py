"""Leak: a concept that is the class has 1, shuffled labels stay within the band, halves of one thing are one group."""

import pytest
import torch
from sklearn.metrics import roc_auc_score

from auditor.reliance.concept_leak import areas, aucs, leak_of

N, POSITIONS = 60, 12


def maps(seed=0):
    return torch.rand(N, 4, POSITIONS, generator=torch.Generator().manual_seed(seed))


IS_CLASS = torch.arange(N) % 3 == 0


def test_the_area_is_that_of_scikit_learn_ties_included():
    activations = (maps().mean(-1) * 20).round() / 20
    expected = [roc_auc_score(IS_CLASS.numpy(), activations[:, k].numpy()) for k in range(4)]
    assert aucs(activations, IS_CLASS).tolist() == pytest.approx(expected)


def test_a_concept_that_is_the_class_leaks_it_and_says_how_much_it_covers():
    S = maps()
    S[:, 2] = 0.0
    S[IS_CLASS, 2, 4] = 1.0
    leak = leak_of(S, IS_CLASS, [[k] for k in range(4)])
    assert leak.concepts == (2,)
    assert (leak.auc, leak.area) == (1.0, 1 / POSITIONS)
    assert 0.5 < leak.null < 0.8


def test_shuffled_labels_stay_within_the_band():
    beyond = [
        (leak := leak_of(maps(seed), IS_CLASS[torch.randperm(N)], [])).auc > leak.null + 0.05 for seed in range(10)
    ]
    assert sum(beyond) <= 2


def test_halves_of_one_thing_leak_as_a_group():
    S = 0.01 * maps()
    half = torch.arange(N) % 2 == 0
    S[IS_CLASS & half, 0] += 1.0
    S[IS_CLASS & ~half, 1] += 1.0
    leak = leak_of(S, IS_CLASS, [[0, 1], [2], [3]])
    assert leak.concepts == (0, 1)
    assert leak.auc == 1.0
    assert leak.area > 0.9


def test_an_image_without_a_concept_has_no_area():
    S = torch.zeros(3, 1, 4)
    S[0, 0, :2] = 2.0
    assert areas(S).tolist() == [0.5]
    assert areas(torch.zeros(3, 1, 4)).tolist() == [0.0]
