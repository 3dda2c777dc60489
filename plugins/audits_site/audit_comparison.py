"""Comparison: the metrics of two audits side by side, and which differences mean anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["worse", "better", "changed", "unsure", "missing", "same", "nowhere"]
ORDER: tuple[Verdict, ...] = ("worse", "better", "changed", "unsure", "missing", "same", "nowhere")


@dataclass(frozen=True, slots=True)
class Figure:
    """One metric of one audit, as read from its JSON; ``value`` is None when it was not taken."""

    value: float | None
    low: float | None = None
    high: float | None = None
    null: float | None = None
    n: int = 0
    direction: str = "none"
    status: str = "skipped"
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One metric of two audits. ``difference`` is right minus left."""

    metric: str
    left: Figure | None
    right: Figure | None
    difference: float | None
    verdict: Verdict


def figures(audit: Mapping[str, Any]) -> dict[str, Figure]:
    """Return the metrics of an audit's JSON; an entry of another shape counts as not taken."""
    metrics = audit.get("metrics")
    if not isinstance(metrics, Mapping):
        return {}
    return {str(name): _figure(entry) for name, entry in sorted(metrics.items())}


def compare(left: Mapping[str, Figure], right: Mapping[str, Figure]) -> list[Row]:
    """Return every metric of either side, those that got worse first.

    A difference counts as better or worse only where a direction is known and both sides have a 95% interval, and these
    do not overlap; it is ``unsure`` where they do and ``changed`` where nothing can be told. What is missing on a side
    is never called better.

    >>> a, b = Figure(0.5, 0.4, 0.6, direction="up", status="passed"), Figure(0.8, 0.7, 0.9, direction="up", status="passed")
    >>> compare({"m": a}, {"m": b})[0].verdict, compare({"m": a}, {})[0].verdict
    ('better', 'missing')
    """  # noqa: E501
    rows = [_row(name, left.get(name), right.get(name)) for name in sorted(set(left) | set(right))]
    return sorted(rows, key=lambda row: ORDER.index(row.verdict))


def _row(name: str, left: Figure | None, right: Figure | None) -> Row:
    a, b = left.value if left else None, right.value if right else None
    if a is None and b is None:
        return Row(name, left, right, None, "nowhere")
    if left is None or right is None or a is None or b is None:
        return Row(name, left, right, None, "missing")
    difference = b - a
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


def _figure(entry: Any) -> Figure:
    if not isinstance(entry, Mapping):
        return Figure(None, reason="not a metric")
    status = str(entry.get("status", ""))
    n = entry.get("n")
    return Figure(
        value=_number(entry.get("value")) if status == "passed" else None,
        low=_number(entry.get("low")),
        high=_number(entry.get("high")),
        null=_number(entry.get("null")),
        n=n if isinstance(n, int) else 0,
        direction=str(entry.get("direction", "none")),
        status=status,
        reason=str(entry.get("reason", "")),
    )


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
