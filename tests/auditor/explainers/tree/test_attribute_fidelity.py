import time

import numpy as np
import pytest

from auditor.errors import DataError, NumericsError, ShapeError
from auditor.explainers.tree.attribute_fidelity import accuracy, distance, f1, fidelity
from auditor.kernels.trees.code_counts import code_counts, code_counts_reference


def brute_force(codes, marks, bits):
    """Every feature, code, sense and attribute, one by one."""
    best = []
    for a in range(marks.shape[1]):
        top = 0.0
        for i in range(codes.shape[1]):
            for j in range(2**bits):
                for predicted in (codes[:, i] == j, codes[:, i] != j):
                    both, total = (predicted & marks[:, a]).sum(), predicted.sum() + marks[:, a].sum()
                    top = max(top, 2 * both / total if total else 0.0)
        best.append(top)
    return np.array(best)


@pytest.mark.parametrize(("n", "n_features", "k", "bits"), [(20, 5, 7, 2), (13, 17, 16, 4), (31, 1, 40, 3)])
def test_equals_brute_force(n, n_features, k, bits):
    rng = np.random.default_rng(n)
    codes = rng.integers(0, 2**bits, (n, n_features)).astype(np.uint8)
    marks = rng.random((n, k)) < 0.3
    result = fidelity(codes, marks, bits)
    np.testing.assert_allclose(result.per_attribute, brute_force(codes, marks[:, result.attributes], bits), atol=1e-12)
    assert result.score == pytest.approx(result.per_attribute.mean())
    for a, f, j, equal in zip(result.attributes, result.best_feature, result.best_code, result.is_equal, strict=True):
        predicted = (codes[:, f] == j) == equal
        assert f1(marks[:, [a]], predicted[:, None])[0] == pytest.approx(
            result.per_attribute[list(result.attributes).index(a)]
        )
    np.testing.assert_array_equal(code_counts(codes, marks, 2**bits), code_counts_reference(codes, marks, 2**bits))


@pytest.mark.parametrize(("n", "n_features", "k", "bits"), [(20, 5, 7, 2), (13, 17, 16, 4)])
def test_by_accuracy_it_is_the_best_agreement(n, n_features, k, bits):
    rng = np.random.default_rng(n)
    codes = rng.integers(0, 2**bits, (n, n_features)).astype(np.uint8)
    marks = rng.random((n, k)) < 0.3
    marks[0], marks[1] = True, False  # every attribute varies
    result = fidelity(codes, marks, bits, by="accuracy")
    for a in range(k):
        same = max(
            max((said == marks[:, a]).mean(), (said != marks[:, a]).mean())
            for i in range(n_features)
            for said in [codes[:, i] == j for j in range(2**bits)]
        )
        assert result.per_attribute[a] == pytest.approx(same)
        winner = (codes[:, result.best_feature[a]] == result.best_code[a]) == result.is_equal[a]
        assert accuracy(marks[:, [a]], winner[:, None])[0] == pytest.approx(same)
    share = marks.mean(0)
    assert result.floor == pytest.approx(np.maximum(share, 1 - share).mean())
    assert result.score >= result.floor  # a code that never occurs is a constant feature


def test_known_f1():
    truth = np.array([1, 1, 0, 0], bool)[:, None]
    assert f1(truth, np.array([1, 0, 1, 0], bool)[:, None])[0] == 0.5
    assert f1(truth, np.array([0, 1, 0, 1], bool)[:, None])[0] == 0.5
    assert f1(truth, np.ones((4, 1), bool))[0] == pytest.approx(2 / 3)
    assert f1(np.zeros((4, 1), bool), np.zeros((4, 1), bool))[0] == 0


def test_a_code_used_by_the_attribute_alone_scores_one_in_either_sense():
    rng = np.random.default_rng(0)
    marks = rng.random((60, 1)) < 0.4
    codes = rng.integers(0, 16, (60, 4)).astype(np.uint8)
    codes[:, 2] = np.where(marks[:, 0], 7, rng.integers(8, 16, 60))
    both = fidelity(codes, np.concatenate([marks, ~marks], axis=1), 4)
    assert both.score == 1
    assert both.honest == 1
    assert both.best_feature.tolist() == [2, 2]
    assert both.best_code.tolist() == [7, 7]
    assert both.is_equal.tolist() == [True, False]  # the sense of an attribute is a matter of naming


def test_the_floor_is_what_an_always_yes_feature_scores():
    marks = np.zeros((100, 1), bool)
    marks[:30] = True
    result = fidelity(np.full((100, 3), 2, np.uint8), marks, 4)  # constant features can only say always
    assert result.floor == pytest.approx(0.6 / 1.3)
    assert result.score == pytest.approx(result.floor)


def test_noise_scores_above_the_floor_unless_chosen_on_other_images():
    rng = np.random.default_rng(1)
    codes, marks = rng.integers(0, 16, (80, 200)).astype(np.uint8), rng.random((80, 20)) < 0.15
    result = fidelity(codes, marks, 4)
    assert result.score > result.floor + 0.08
    assert result.honest < result.score - 0.08


def test_constant_attributes_are_left_out_and_counted():
    codes = np.array([[0], [1], [2], [3]], np.uint8)
    marks = np.array([[1, 0, 1], [1, 0, 0], [1, 0, 1], [1, 0, 0]])
    result = fidelity(codes, marks, 2)
    assert result.n_constant == 2
    assert result.attributes.tolist() == [2]


def test_fast_for_1024_features_and_312_attributes():
    rng = np.random.default_rng(0)
    codes, marks = rng.integers(0, 16, (2000, 1024)).astype(np.uint8), rng.random((2000, 312)) < 0.1
    fidelity(codes[:10], marks[:10], 4)  # compile
    start = time.process_time()
    fidelity(codes, marks, 4)
    assert time.process_time() - start < 15  # about 1 s on a quiet core; brute force needs minutes


@pytest.mark.parametrize(
    ("codes", "marks", "error", "sentence"),
    [
        (np.zeros((3, 2)), np.zeros((2, 1)), ShapeError, r"got \(3, 2\) and \(2, 1\)"),
        (np.full((3, 2), 16), np.eye(3), NumericsError, r"integers in 0\.\.15"),
        (np.full((3, 2), np.nan), np.eye(3), NumericsError, "codes of 4 bits"),
        (np.zeros((3, 2)), np.full((3, 1), 40), NumericsError, "attributes must be 0 or 1"),
        (np.zeros((3, 2)), np.ones((3, 1)), DataError, "none of the 1 attributes varies"),
    ],
)
def test_bad_input(codes, marks, error, sentence):
    with pytest.raises(error, match=sentence):
        fidelity(codes, marks, 4)


def test_fidelity_of_a_fit_has_both_agreements_and_their_floors():
    from auditor.explainers.tree.attribute_fidelity import fidelity_metrics

    rng = np.random.default_rng(0)
    marks = rng.random((40, 2)) < 0.4
    codes = np.concatenate([3 * marks[:, :1], rng.integers(0, 4, (40, 2))], 1).astype(np.uint8)
    values = fidelity_metrics(codes, marks, 2)
    result = fidelity(codes, marks, 2)
    assert values["fidelity"] == result.score
    assert values["fidelity_honest"] == result.honest
    assert values["fidelity_floor"] == result.floor < values["fidelity"]
    assert values["fidelity_accuracy"] == fidelity(codes, marks, 2, by="accuracy").score
    assert len(values) == 6


def test_distance_of_real_valued_units_is_the_least_mean_difference():
    rng = np.random.default_rng(3)
    units, marks = rng.random((23, 7)), rng.random((23, 5)) < 0.4
    marks[:, 2] = True  # varies on no image
    result = distance(units, marks)
    varying = marks[:, [0, 1, 3, 4]].astype(float)
    for a, column in enumerate(varying.T):
        each = [(np.abs(v - column).mean(), k) for k in range(7) for v in (units[:, k], 1 - units[:, k])]
        least, k = min(each)
        assert result.per_attribute[a] == pytest.approx(least)
        assert result.best_feature[a] == k
        value = units[:, k] if result.is_direct[a] else 1 - units[:, k]
        assert np.abs(value - column).mean() == pytest.approx(least)
    pi = varying.mean(0)
    assert result.floor == pytest.approx(np.minimum(pi, 1 - pi).mean())
    assert result.honest >= result.score  # chosen on other images
    perfect = distance(np.column_stack([1 - varying[:, 0], units[:, 0]]), varying[:, :1])
    assert (perfect.score, perfect.honest) == (0, 0)
    with pytest.raises(DataError, match="none of the attributes varies"):
        distance(units, np.ones((23, 2)))
