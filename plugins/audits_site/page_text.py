"""Page text: templates in which everything is escaped, and how numbers and times are written in them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlencode


def environment(folder: Path) -> Any:
    """Return the templates of a folder; every value is escaped and a name that was not given is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    made.filters.update(
        query=query, number=number, signed=signed, moment=moment, day=day, sentence=sentence, shell=shlex.quote
    )
    return made


def query(values: Mapping[str, str]) -> str:
    """Return values as the query of an address; none of them can leave it.

    >>> query({"name": "a&b<c>", "version": "1"})
    'name=a%26b%3Cc%3E&version=1'
    """
    return urlencode(values)


def number(value: float | None) -> str:
    """Return a number at a length that can be read; nothing for none.

    >>> [number(v) for v in (0.123456, 12345.6, 1e-7, 3.0, None, float("nan"))]
    ['0.1235', '12346', '1.00e-07', '3', '', 'NaN']
    """
    if value is None:
        return ""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else str(value)
    size = abs(value)
    if value == int(value) and size < 1e9:
        return str(int(value))
    if size < 1e-3 or size >= 1e9:
        return f"{value:.2e}"
    return f"{value:.4f}" if size < 1 else f"{value:.3f}" if size < 100 else f"{value:.0f}"


def signed(value: float | None) -> str:
    """Return a difference with its sign.

    >>> signed(0.25), signed(-2.0), signed(0.0)
    ('+0.2500', '−2', '0')
    """  # noqa: RUF002
    if value is None or value == 0:
        return "" if value is None else "0"
    return ("+" if value > 0 else "−") + number(abs(value))  # noqa: RUF001


def moment(text: str) -> str:
    """Return an ISO time in UTC to the minute; anything else as it came, shortened.

    >>> moment("2026-11-16T17:29:01+00:00")
    '2026-11-16 17:29 UTC'
    """
    try:
        when = datetime.fromisoformat(text.replace("Z", "+00:00"))
        return when.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError):
        return text[:40]


def day(milliseconds: int) -> str:
    """Return a time of MLflow's as a day; nothing when it is not known.

    >>> day(0), day(1_790_000_000_000)
    ('', '2026-09-21')
    """
    if milliseconds <= 0:
        return ""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, timezone.utc).strftime("%Y-%m-%d")
    except (ValueError, OverflowError, OSError):
        return ""


def sentence(text: str) -> str:
    """Return a message with a capital at its start and a full stop at its end.

    >>> sentence("the tag is missing"), sentence("report.html is missing.")
    ('The tag is missing.', 'report.html is missing.')
    """
    text = text.strip()
    if not text:
        return ""
    start = text[0].upper() if text.partition(" ")[0].isalpha() else text[0]  # a path or a name stays as it is
    return start + text[1:] + ("" if text[-1] in ".!?…" else ".")
