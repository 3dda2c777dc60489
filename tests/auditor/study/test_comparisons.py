"""Tests of two conditions against scipy, closed forms and every change of sign."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from auditor.metrics.multiple_tests import holm
from auditor.study.comparisons import cohens_dz, compare, rank_biserial, sign_flip_p, wilcoxon_p

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("n", [3, 6, 9])
@pytest.mark.parametrize("shift", [0.0, 0.1])
def test_the_permutation_test_counts_every_change_of_sign(n, shift):
    d = np.round(RNG.normal(shift, 0.2, n), 1)
    if not np.abs(d).any():
        d[0] = 0.1
    far = [abs(sum(s * x for s, x in zip(signs, d, strict=True))) for signs in itertools.product((1, -1), repeat=n)]
    assert sign_flip_p(d) == pytest.approx(np.mean([x >= abs(d.sum()) - 1e-9 for x in far]))


def test_many_people_are_judged_by_draws_that_agree_with_scipys():
    d = RNG.normal(0.05, 0.2, 40)
    exact = stats.permutation_test(
        (d,), np.mean, permutation_type="samples", n_resamples=9999, alternative="two-sided", vectorized=True
    ).pvalue
    p = sign_flip_p(d, seed=1)
    assert p == pytest.approx(exact, abs=4 * math.sqrt(2 * exact / 9999) + 1e-3)  # two independent sets of draws
    assert sign_flip_p(np.full(30, 0.1)) == pytest.approx(1 / 10000)  # never 0


def test_wilcoxon_is_scipys_without_zeros_and_exact_without_ties():
    d = np.array([0.1, 0.0, 0.25, -0.05, 0.3, 0.45, 0.0, 0.5])
    nonzero = d[d != 0]
    assert wilcoxon_p(d) == pytest.approx(stats.wilcoxon(nonzero, method="exact").pvalue)
    tied = np.array([0.1, 0.1, -0.1, 0.2, 0.3, 0.3, 0.1 + 1e-16])
    assert wilcoxon_p(tied) == wilcoxon_p(np.round(tied, 9))
    assert wilcoxon_p(np.zeros(5)) == sign_flip_p(np.zeros(5)) == 1.0


def test_effect_sizes_are_the_closed_forms():
    d = np.array([0.1, 0.3, -0.2, 0.4])
    effect, low, high = cohens_dz(d)
    assert effect == pytest.approx(d.mean() / d.std(ddof=1))
    t = effect * 2
    assert stats.nct.sf(t, 3, low * 2) == pytest.approx(0.025, abs=1e-5)  # quadrature over 200 points
    assert stats.nct.cdf(t, 3, high * 2) == pytest.approx(0.025, abs=1e-5)
    assert cohens_dz(np.full(5, 0.1)) == (None, None, None)
    assert rank_biserial(d) == pytest.approx((1 + 3 + 4 - 2) / 10)
    assert rank_biserial(np.array([0.0, 0.1, -0.1])) == 0.0
    assert rank_biserial(np.zeros(3)) is None
    w = stats.wilcoxon(d, method="exact").statistic  # the smaller of W+ and W-
    assert abs(rank_biserial(d)) == pytest.approx(1 - 4 * w / (4 * 5))


def test_holm_against_its_definition():
    p = [0.01, 0.04, 0.03, 0.005]
    assert holm(p) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_comparison_has_its_parts_and_turned_around_it_is_turned_around():
    a, b = [0.6, 0.7, 0.8, 0.9, 0.7], [0.5, 0.5, 0.7, 0.8, 0.7]
    one = compare(a, b, ("x", "y"), "purity", "", 0)
    assert (one.n, one.a, one.b) == (5, "x", "y")
    assert one.difference == pytest.approx(np.mean(a) - np.mean(b))
    assert one.low <= one.difference <= one.high
    assert one.d_z_low < one.d_z < one.d_z_high
    assert one.rank_biserial == 1.0
    other = compare(b, a, ("y", "x"), "purity", "", 0)
    assert other.difference == pytest.approx(-one.difference)
    assert (other.p_wilcoxon, other.p_permutation) == (one.p_wilcoxon, one.p_permutation)
    assert not one.is_significant  # NaN until corrected
    assert compare([], [], ("x", "y"), "purity", "", 0).n == 0
