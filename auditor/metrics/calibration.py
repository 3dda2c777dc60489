"""Calibration: how far a model's confidence is from how often it is right [Guo2017].

With images in bins B of equal width by confidence p, of n images in all:

    ECE = sum_B |B| / n * |mean p over B - share that is right in B|
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BINS = 15
Floats = NDArray[np.float64]


def expected_calibration_error(confidence: Floats, right: Floats) -> float:
    """Return the mean gap between confidence and accuracy over bins of equal width, weighted by their counts.

    >>> expected_calibration_error(np.array([0.9, 0.9]), np.array([1.0, 0.0]))
    0.4
    """
    bin_of = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    gap = np.bincount(bin_of, weights=confidence - right, minlength=BINS)
    return float(np.abs(gap).sum() / len(confidence))
