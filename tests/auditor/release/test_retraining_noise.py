"""The band of retraining: by hand, its rate of false alarms, and unknown below two pairs."""

import numpy as np
import pytest
from scipy.stats import t

from auditor.release.retraining_noise import Band, band_of


def test_fewer_than_two_pairs_is_unknown():
    for pairs, words in (((), "there are 0"), ((0.8,), "there is 1")):
        band = Band(pairs)
        assert not band.is_known
        assert band.low == -np.inf
        assert words in band.words()
        assert band.to_json()["low"] is None


def test_two_pairs_by_hand():
    band = Band((0.7, 0.9))
    spread = np.sqrt(2) * 0.1  # deviation of two values 0.2 apart, one degree of freedom
    assert band.low == pytest.approx(0.8 - t.ppf(0.99, 1) * spread * np.sqrt(1.5))
    assert "2 pairs of honest versions" in band.words()


def test_pairs_are_those_above_the_diagonal():
    M = np.array([[1, 0.5, 0.6], [0.5, 1, 0.7], [0.6, 0.7, 1]])
    band = band_of(M, ["a", "b"])
    assert band.similarities == (0.5, 0.6, 0.7)
    assert band.to_json()["versions"] == ["a", "b"]
    assert band_of(np.eye(1)).similarities == ()


@pytest.mark.parametrize("n", [2, 3, 6])
def test_another_honest_pair_falls_below_once_in_a_hundred(n):
    rng, trials = np.random.default_rng(n), 4000
    below = sum(rng.normal() < Band(tuple(rng.normal(size=n))).low for _ in range(trials))
    assert abs(below / trials - 0.01) < 4 * np.sqrt(0.01 * 0.99 / trials)
