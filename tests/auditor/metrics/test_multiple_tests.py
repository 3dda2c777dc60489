"""Holm's rule, by steps."""

import pytest

from auditor.metrics.multiple_tests import holm


def test_holm_by_steps():
    p = [0.001, 0.04, 0.03, 0.9, 0.0005]
    corrected = holm(p)
    assert corrected == pytest.approx([0.004, 0.09, 0.09, 0.9, 0.0025])
    assert holm([]) == []
    assert max(holm([0.6, 0.7])) == 1.0
