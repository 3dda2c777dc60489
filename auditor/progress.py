"""Progress of long work: a callback that the command line draws as a bar, a test collects, most callers leave out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# (stage, done, total); total is None where it is not known
Progress = Callable[[str, int, int | None], None]


def silent(stage: str, done: int, total: int | None) -> None:
    """Ignore progress."""


class Bars:
    """A bar per stage, drawn by tqdm: in a notebook as its own, at a terminal as text."""

    def __init__(self) -> None:
        self._stage = ""
        self._bar: Any = None

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Show how far a stage is; its bar ends with it, or with the next stage."""
        if stage != self._stage or self._bar is None:
            from tqdm.auto import tqdm

            self.close()
            self._stage, self._bar = stage, tqdm(desc=stage, total=total, leave=True)
        self._bar.total = total
        self._bar.n = done
        self._bar.refresh()
        if total is not None and done >= total:
            self.close()

    def close(self) -> None:
        """End the bar that is shown."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def as_callback(progress: Progress | bool) -> Progress:
    """Return the callback itself; for ``True`` bars, for ``False`` nothing."""
    if isinstance(progress, bool):
        return Bars() if progress else silent
    return progress
