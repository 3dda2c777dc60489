"""Measure: one number of an audit, with its interval, its null model and whether it means anything.

Names: ``model/<metric>``, ``model/<layer>/<metric>``, ``explainer/<name>/<metric>``,
``drift/<metric>``. A measure that could not be taken is *skipped* with a reason, one that came out NaN has *failed*; in
neither case is there a value that could pass a gate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Direction = Literal["up", "down", "none"]  # which way is better
Status = Literal["passed", "failed", "skipped"]

N_BOOTSTRAP = 1000


@dataclass(frozen=True, slots=True)
class Measure:
    """One metric: ``value`` with its 95% interval over ``n`` items; ``null`` is what a random model would give.

    ``status`` says whether it could be taken: ``passed``, or ``failed`` and ``skipped`` with a ``reason``.
    """

    value: float
    low: float | None = None
    high: float | None = None
    n: int = 1
    null: float | None = None
    direction: Direction = "none"
    status: Status = "passed"
    reason: str = ""
    per_image: tuple[float, ...] = field(default=(), repr=False)

    @property
    def is_taken(self) -> bool:
        """Whether there is a value: only then it can pass a gate."""
        return self.status == "passed" and math.isfinite(self.value)

    def to_json(self) -> dict[str, Any]:
        """Return what ``auditor audit --json`` prints of it."""
        return {
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "n": self.n,
            "null": self.null,
            "direction": self.direction,
            "status": self.status,
            "reason": self.reason,
            **({"per_image": list(self.per_image)} if self.per_image else {}),
        }

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Measure:
        """Restore what ``to_json`` gave, also after a trip through JSON, where NaN is null."""
        fields = {k: entry[k] for k in ("low", "high", "n", "null", "direction", "status", "reason")}
        value = math.nan if entry["value"] is None else float(entry["value"])
        per_image = tuple(math.nan if v is None else float(v) for v in entry.get("per_image", ()))
        return cls(value=value, per_image=per_image, **fields)


def of_items(items: Any, direction: Direction, *, null: float | None = None, seed: int = 0) -> Measure:
    """Return the mean over items (images) with a bootstrap 95% interval; any NaN among them fails the measure.

    >>> of_items([1.0, 2.0, 3.0], "up").value
    2.0
    >>> of_items([1.0, float("nan")], "up").status
    'failed'
    """
    values = np.asarray(items, dtype=np.float64).reshape(-1)
    if values.size == 0:
        return skipped("no items to measure", direction)
    per_image = tuple(float(v) for v in values)
    bad = int((~np.isfinite(values)).sum())
    if bad:
        reason = f"{bad} of {values.size} values are not finite"
        return Measure(math.nan, None, None, values.size, null, direction, "failed", reason, per_image)
    low, high = bootstrap(values, seed)
    return Measure(float(values.mean()), low, high, values.size, null, direction, per_image=per_image)


def of_value(value: float, direction: Direction, *, n: int = 1, null: float | None = None) -> Measure:
    """Return a single number as a measure; NaN or infinite fails it.

    >>> of_value(float("inf"), "down").reason
    'the value is inf'
    """
    if not math.isfinite(value):
        return Measure(math.nan, None, None, n, null, direction, "failed", f"the value is {value}")
    return Measure(float(value), None, None, n, null, direction)


def skipped(reason: str, direction: Direction = "none") -> Measure:
    """Return a measure that was not taken, with the reason."""
    return Measure(math.nan, n=0, direction=direction, status="skipped", reason=reason)


def bootstrap(values: Sequence[float] | np.ndarray[Any, Any], seed: int = 0) -> tuple[float | None, float | None]:
    """Return the bootstrap 95% interval of the mean; None for fewer than two items."""
    array = np.asarray(values, dtype=np.float64)
    if array.size < 2:
        return None, None
    rows = np.random.default_rng(seed).integers(0, array.size, (N_BOOTSTRAP, array.size))
    low, high = np.quantile(array[rows].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)
