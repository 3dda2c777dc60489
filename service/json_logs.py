"""Logs as lines of JSON: for programs that collect them, and without what callers sent."""

from __future__ import annotations

import json
import logging
import sys
import time


class JsonLines(logging.Formatter):
    """One log record, one line of JSON; a traceback is a field of it."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line."""
        line = {
            "time": stamp(record.created),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "logger": record.name,
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_event(level: str, event: str, **fields: object) -> None:
    """Write one line of JSON to standard output; fields that are None are left out."""
    line = {"time": stamp(time.time()), "level": level, "event": event, **fields}
    sys.stdout.write(json.dumps({k: v for k, v in line.items() if v is not None}) + "\n")


def stamp(seconds: float) -> str:
    """Return a moment as text.

    >>> stamp(0.0)
    '1970-01-01T00:00:00Z'
    """
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
