"""Counts of codes and attributes against a loop over rows."""

import numpy as np
import pytest

from auditor.kernels.trees.code_counts import code_counts, code_counts_reference


@pytest.mark.parametrize(
    ("n", "n_features", "k", "n_codes"),
    [(13, 17, 3, 4), (1, 1, 1, 2), (20, 2, 15, 16), (9, 3, 16, 5), (7, 2, 40, 256), (4, 2, 0, 4)],
)
def test_counts_equal_the_loop_over_rows(n, n_features, k, n_codes):
    rng = np.random.default_rng(n)
    codes = rng.integers(0, n_codes, (n, n_features)).astype(np.uint8)
    marks = rng.random((n, k)) < 0.4
    want = np.zeros((n_features, n_codes, k + 1), np.int32)
    for row in range(n):
        for f in range(n_features):
            want[f, codes[row, f], k] += 1
            for a in range(k):
                want[f, codes[row, f], a] += marks[row, a]
    for form in (code_counts, code_counts_reference):
        np.testing.assert_array_equal(form(codes, marks, n_codes), want)


def test_no_rows_count_nothing():
    counts = code_counts(np.zeros((0, 3), np.uint8), np.zeros((0, 2), bool), 4)
    assert counts.shape == (3, 4, 3)
    assert not counts.any()
