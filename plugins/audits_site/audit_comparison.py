"""Comparison: the metrics of two audits side by side, and which differences mean anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from auditor.metrics.measure import Direction, Measure, Status

Verdict = Literal["worse", "better", "changed", "unsure", "missing", "same", "nowhere"]
ORDER: tuple[Verdict, ...] = ("worse", "better", "changed", "unsure", "missing", "same", "nowhere")


@dataclass(frozen=True, slots=True)
class Row:
    """One metric of two audits. ``difference`` is right minus left."""

    metric: str
    left: Measure | None
    right: Measure | None
    difference: float | None
    verdict: Verdict


def measures(audit: Mapping[str, Any]) -> dict[str, Measure]:
    """Return the metrics of an audit's JSON; an entry of another shape counts as not taken."""
    metrics = audit.get("metrics")
    if not isinstance(metrics, Mapping):
        return {}
    return {str(name): _measure(entry) for name, entry in sorted(metrics.items())}


def compare(left: Mapping[str, Measure], right: Mapping[str, Measure]) -> list[Row]:
    """Return every metric of either side, those that got worse first.

    A difference counts as better or worse only where a direction is known and both sides have a 95% interval, and these
    do not overlap; it is ``unsure`` where they do and ``changed`` where it is undecided. What is missing on a side
    is never called better.

    >>> a, b = Measure(0.5, 0.4, 0.6, direction="up"), Measure(0.8, 0.7, 0.9, direction="up")
    >>> compare({"m": a}, {"m": b})[0].verdict, compare({"m": a}, {})[0].verdict
    ('better', 'missing')
    """
    rows = [_row(name, left.get(name), right.get(name)) for name in sorted(set(left) | set(right))]
    return sorted(rows, key=lambda row: ORDER.index(row.verdict))


def _row(name: str, left: Measure | None, right: Measure | None) -> Row:
    measured = [side for side in (left, right) if side is not None and side.is_taken]
    if not measured:
        return Row(name, left, right, None, "nowhere")
    if left is None or right is None or len(measured) < 2:
        return Row(name, left, right, None, "missing")
    difference = right.value - left.value
    if difference == 0:
        return Row(name, left, right, 0.0, "same")
    if left.direction != right.direction or left.direction not in ("up", "down"):
        return Row(name, left, right, difference, "changed")
    if left.low is None or left.high is None or right.low is None or right.high is None:
        return Row(name, left, right, difference, "changed")
    if left.low <= right.high and right.low <= left.high:
        return Row(name, left, right, difference, "unsure")
    better = (difference > 0) == (left.direction == "up")
    return Row(name, left, right, difference, "better" if better else "worse")


def _measure(entry: Any) -> Measure:
    if not isinstance(entry, Mapping):
        return Measure(math.nan, n=0, status="skipped", reason="not a metric")
    value, n = _number(entry.get("value")), entry.get("n")
    directions: dict[Any, Direction] = {name: name for name in get_args(Direction)}
    statuses: dict[Any, Status] = {name: name for name in get_args(Status)}
    return Measure(
        value=math.nan if value is None else value,
        low=_number(entry.get("low")),
        high=_number(entry.get("high")),
        n=n if isinstance(n, int) else 0,
        null=_number(entry.get("null")),
        direction=directions.get(str(entry.get("direction")), "none"),
        status=statuses.get(str(entry.get("status")), "skipped"),
        reason=str(entry.get("reason", "")),
    )


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
