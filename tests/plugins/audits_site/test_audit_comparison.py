"""Two audits side by side: what may be called better or worse, and what may not."""

import pytest

from auditor.plugins.audits_site.audit_comparison import compare, measures


def entry(value, low=None, high=None, direction="up", status="passed", **changed):
    fields = {"value": value, "low": low, "high": high, "direction": direction, "status": status}
    return {"n": 9, "null": None, "reason": "", **fields, **changed}


@pytest.mark.parametrize(
    ("left", "right", "verdict"),
    [
        (entry(0.5, 0.4, 0.6), entry(0.8, 0.7, 0.9), "better"),
        (entry(0.8, 0.7, 0.9), entry(0.5, 0.4, 0.6), "worse"),
        (entry(0.5, 0.4, 0.6, "down"), entry(0.8, 0.7, 0.9, "down"), "worse"),
        (entry(0.5, 0.4, 0.6), entry(0.6, 0.5, 0.7), "unsure"),
        (entry(0.5, 0.4, 0.6), entry(0.7, 0.6, 0.8), "unsure"),  # touching is overlapping
        (entry(0.5), entry(0.8), "changed"),  # no interval: nothing can be decided
        (entry(0.5, 0.4, 0.6), entry(0.8), "changed"),
        (entry(0.5, 0.4, 0.6, "none"), entry(0.8, 0.7, 0.9, "none"), "changed"),
        (entry(0.5, 0.4, 0.6, "up"), entry(0.8, 0.7, 0.9, "down"), "changed"),
        (entry(0.5, 0.4, 0.6), entry(0.5, 0.4, 0.6), "same"),
        (entry(0.5, 0.4, 0.6), entry(None, status="skipped"), "missing"),
        (entry(0.5, 0.4, 0.6), entry(0.9, 0.8, 1.0, status="failed"), "missing"),
        (entry(0.5, 0.4, 0.6), entry(float("nan"), 0.8, 1.0), "missing"),
        (entry(0.5, 0.4, 0.6), "odd", "missing"),
        (entry(None, status="skipped"), entry(None, status="failed"), "nowhere"),
        (entry(True), entry("0.5"), "nowhere"),
    ],
)
def test_verdicts(left, right, verdict):
    (row,) = compare(measures({"metrics": {"m": left}}), measures({"metrics": {"m": right}}))
    assert row.verdict == verdict
    assert (row.difference is None) == (verdict in ("missing", "nowhere"))


def test_what_got_worse_comes_first_and_nothing_is_lost():
    left = measures({"metrics": {"a": entry(1), "b": entry(0.8, 0.7, 0.9), "only": entry(1)}})
    right = measures({"metrics": {"a": entry(1), "b": entry(0.5, 0.4, 0.6), "new": entry(1)}})
    assert [row.metric for row in compare(left, right)] == ["b", "new", "only", "a"]
    assert measures({}) == measures({"metrics": [1]}) == {}
