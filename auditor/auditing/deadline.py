"""Deadline: the time a caller gives an audit, kept by the reports of progress that all long work makes."""

from __future__ import annotations

import time

from auditor.auditing.checks import duration
from auditor.auditing.cost import Clock
from auditor.progress import Progress


class OutOfTimeError(Exception):
    """The time is over; not an `AuditError`, because nothing is wrong with what was being measured."""


class Deadline:
    """``seconds`` from now on; None is no limit."""

    def __init__(self, seconds: float | None, clock: Clock = time.monotonic) -> None:
        self.seconds, self.clock, self.began = seconds, clock, clock()

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return float("inf") if self.seconds is None else self.seconds - (self.clock() - self.began)

    @property
    def reason(self) -> str:
        """Why a check was not taken, or not to its end."""
        return f"the time budget of {duration(self.seconds or 0)} was used up (--budget)"

    def watching(self, progress: Progress) -> Progress:
        """Return the progress that ends the work it reports on when the time is over."""
        if self.seconds is None:
            return progress

        def report(stage: str, done: int, total: int | None) -> None:
            progress(stage, done, total)
            if self.left <= 0:
                raise OutOfTimeError

        return report
