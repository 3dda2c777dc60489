"""Parts: the checks of an audit one after the other, each announced with its budget, cached when it is finished.

A part is one check of the model, or one check of all explainers, which then share the passes. What was finished before
an interruption comes from the cache; what the time does not suffice for is skipped with that reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from auditor.auditing.cache import AuditCache
from auditor.auditing.cost import Cost, Meter
from auditor.auditing.deadline import Deadline, OutOfTimeError
from auditor.metrics.measure import Direction, Measure, skipped
from auditor.progress import Progress, silent

log = logging.getLogger(__name__)
Say = Callable[[str], object]
MODEL = ""  # the owner of what is measured of the model itself


def unsaid(line: str) -> None:
    """Say nothing."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The measures of one owner, with full names, and what belongs to them (the findings of reliance)."""

    metrics: dict[str, Measure]
    record: dict[str, Any] | None = None


@dataclass(frozen=True)
class Part:
    """One check: ``take(owner)`` measures for one explainer (or the model); ``names`` is what it gives at least."""

    cost: Cost
    take: Callable[[str], Taken]
    names: Mapping[str, Direction]
    left_out: str = ""  # why it was not asked for
    missing: Callable[[str], Taken] | None = None  # from a reason; default: every name skipped

    @property
    def owners(self) -> tuple[str, ...]:
        """Explainers it is for; the model alone where there are none."""
        return self.cost.owners or (MODEL,)

    def without(self, owner: str, reason: str) -> Taken:
        """Return its measures as skipped."""
        if self.missing is not None:
            return self.missing(reason)
        prefix = f"explainer/{owner}" if owner else "model"
        return Taken({f"{prefix}/{name}": skipped(reason, way) for name, way in self.names.items()})


@dataclass
class Runner:
    """Takes parts in turn; of a metric that two parts give, the later counts."""

    cache: AuditCache
    meter: Meter
    deadline: Deadline
    progress: Progress = silent
    say: Say = unsaid
    seconds_per_pass: float | None = None
    metrics: dict[str, Measure] = field(default_factory=dict)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)  # by check
    costs: list[Cost] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)  # "check" or "check of explainer" -> why

    def run(self, parts: Sequence[Part]) -> None:
        """Take all parts; what was not taken is in ``missing`` with the reason."""
        self.progress("audit", 0, len(parts))
        for k, part in enumerate(parts):
            self._run(part)
            self.progress("audit", k + 1, len(parts))

    def _run(self, part: Part) -> None:
        before = {owner: self._cached(part, owner) for owner in part.owners}
        if not part.left_out and self.deadline.left > 0 and None in before.values():
            self.say(part.cost.words(self.seconds_per_pass))
        images, began, out_of_time = self.meter.images, self.meter.clock(), False
        for owner in part.owners:
            taken = before[owner]
            if taken is None and not part.left_out and not out_of_time:
                try:
                    taken = self._take(part, owner)
                except OutOfTimeError:
                    out_of_time = True
            self._note(part, owner, taken)
        cost = self.meter.since(part.cost, images, began)
        if None not in before.values():
            cost = replace(cost, note="finished before an interruption")
        if not part.left_out:
            self.costs.append(cost)
            log.info("%s: %.1f passes per image, %.1f s", part.cost.check, cost.passes, cost.seconds)

    def _take(self, part: Part, owner: str) -> Taken:
        if self.deadline.left <= 0:
            raise OutOfTimeError
        taken = part.take(owner)
        self.cache.put(_key(part, owner), taken.metrics, taken.record)
        return taken

    def _cached(self, part: Part, owner: str) -> Taken | None:
        metrics = self.cache.get(_key(part, owner))
        return None if metrics is None or part.left_out else Taken(metrics, self.cache.record(_key(part, owner)))

    def _note(self, part: Part, owner: str, taken: Taken | None) -> None:
        if taken is None:
            reason = part.left_out or self.deadline.reason
            taken = part.without(owner, reason)
            self.missing[f"{part.cost.check} of {owner}" if owner else part.cost.check] = reason
        self.metrics |= taken.metrics
        if taken.record is not None:
            self.records[part.cost.check] = taken.record


def _key(part: Part, owner: str) -> str:
    return f"{owner or 'model'}: {part.cost.check}"
