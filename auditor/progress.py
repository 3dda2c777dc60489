"""Progress of long work: a callback that the command line draws as a bar, a test collects, most callers leave out."""

from __future__ import annotations

from collections.abc import Callable

# (stage, done, total); total is None where it is not known
Progress = Callable[[str, int, int | None], None]


def silent(stage: str, done: int, total: int | None) -> None:
    """Ignore progress."""
