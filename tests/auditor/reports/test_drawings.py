"""Numbers as people read them, and small drawings."""

from auditor.metrics.measure import Measure
from auditor.reports.drawings import histogram, interval, number


def test_small_drawings():
    assert "circle" in interval(Measure(0.5, 0.4, 0.6, 10, 0.1))
    assert interval(Measure(0.5)) == ""
    assert interval(Measure(1.0, 1.0, 1.0, 5)) == ""
    assert histogram([1.0, 1.0, 1.0]) == ""
    assert histogram([1.0, 1.0 + 1e-12, 1.0]) == ""
    assert histogram([0.0, 1.0, float("nan")]).count("<rect") == 2
    assert (number(0.5), number(float("nan")), number(-2e-5)) == ("0.5", "none", "-2.0e-05")
