"""The terminal: progress bars on a terminal, lines in a pipe, tables, one-line notes, and parsing of small values."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from auditor.errors import OptionError

LINE_EVERY_S = 10.0  # between two lines of progress in a pipe


def say(*lines: str) -> None:
    """Print lines to standard output."""
    for line in lines:
        click.echo(line)


def as_text(value: Any) -> str:
    """Return JSON for programs; a number that is not finite becomes null, since JSON has none.

    >>> as_text({"a": float("nan"), "b": [1.5]})
    '{"a": null, "b": [1.5]}'
    """
    import json

    from auditor.explainers.manifest import finite

    return json.dumps(finite(value), allow_nan=False)


def note(line: str) -> None:
    """Print one line to standard error."""
    click.echo(line, err=True)


def set_up_logging(verbose: bool) -> None:
    """Show our own messages on standard error, one line each, and keep the libraries' chatter away."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("auditor: %(message)s"))
    logger = logging.getLogger("auditor")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    logger.propagate = False
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    if not verbose:
        logging.getLogger("alembic").setLevel(logging.ERROR)
        logging.getLogger("mlflow").setLevel(logging.ERROR)
        logging.getLogger("torch").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")


class Bar:
    """A progress bar per stage on a terminal; elsewhere a line now and then. Call it with (stage, done, total).

    Elsewhere a stage that takes seconds says at intervals how far it is, so that a log shows that work goes on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._progress: Any = None
        self._tasks: dict[str, Any] = {}
        self._clock, self._began, self._said = clock, clock(), clock()

    def __enter__(self) -> Bar:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description:<26}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Move the bar of a stage."""
        if self._progress is None:
            now = self._clock()
            if now - self._said >= LINE_EVERY_S:
                self._said = now
                of = "" if total is None else f" of {total}"
                note(f"auditor: {stage}: {done}{of}, {now - self._began:.0f} s")
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total)
        self._progress.update(self._tasks[stage], completed=done, total=total)

    def say(self, line: str) -> None:
        """Print one line above the bars, or to standard error where there are none."""
        if self._progress is None:
            note(f"auditor: {line}")
        else:
            self._progress.console.print(line, markup=False, highlight=False)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show a spinner on a terminal while something runs."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: with rules on a terminal, plain columns in a pipe."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    pipe = not sys.stdout.isatty()
    grid = Table(*head, box=None if pipe else box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        grid.add_row(*(cell.replace("[", "\\[") for cell in row))
    Console(width=400 if pipe else None).print(grid)


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Turn KEY=VALUE strings into options; numbers, true, false and null become what they look like.

    >>> parse_settings(["rank=10", "init=random", "tol=1e-4"])
    {'rank': 10, 'init': 'random', 'tol': 0.0001}
    """
    import json

    options: dict[str, Any] = {}
    for item in settings:
        key, sign, value = item.partition("=")
        if not sign or not key:
            raise OptionError(f"--set wants KEY=VALUE, got {item!r}; for example --set rank=10.")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def numbers(option: str, text: str | None) -> list[float] | None:
    """Turn ``0.5,0.4`` into numbers."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.replace(" ", ",").split(",") if part]
    except ValueError:
        raise OptionError(f"{option} wants numbers with commas between, got {text!r}.") from None


def read_names(path: Path) -> list[str]:
    """Read class names from a file, one per line."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"--classes {path}: cannot be read ({error}); give a text file, one class per line."
        ) from None
    return [line for line in lines if line]


def command_line() -> str:
    """Return the command as a person would type it again."""
    return shlex.join(["auditor", *sys.argv[1:]])
