"""Calibration by hand and against a slow loop over bins."""

import numpy as np
import pytest

from auditor.metrics.calibration import BINS, expected_calibration_error


def test_calibration_error_by_hand():
    # two bins: 0.95 sure and right 3 of 4 times; 0.55 sure and right once of twice
    confidence = np.array([0.95] * 4 + [0.55] * 2)
    right = np.array([1, 1, 1, 0, 1, 0.0])
    assert expected_calibration_error(confidence, right) == pytest.approx((4 * 0.2 + 2 * 0.05) / 6)


def test_the_last_bin_holds_full_confidence():
    assert expected_calibration_error(np.array([1.0, 1.0]), np.array([1.0, 0.0])) == pytest.approx(0.5)


@pytest.mark.parametrize("n", [1, 13, 400])
def test_bins_by_a_slow_loop(n):
    rng = np.random.default_rng(n)
    confidence, right = rng.random(n), (rng.random(n) < 0.6).astype(float)
    gap = 0.0
    for b in range(BINS):
        rows = [i for i in range(n) if b / BINS <= confidence[i] < (b + 1) / BINS]
        if rows:
            gap += len(rows) / n * abs(np.mean([confidence[i] for i in rows]) - np.mean([right[i] for i in rows]))
    assert expected_calibration_error(confidence, right) == pytest.approx(gap)
