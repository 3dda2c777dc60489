"""Logs: every line is one JSON object, whatever is in the message."""

import json
import logging
import sys

import pytest

from auditor.service.json_logs import JsonLines, log_event, stamp


def record(message, *args, error=None):
    return logging.LogRecord("auditor.x", logging.WARNING, "f.py", 1, message, args, error)


def test_a_record_is_one_line_of_json():
    line = JsonLines().format(record('two\nlines, "quoted", %s', "é"))
    assert "\n" not in line
    fields = json.loads(line)
    assert fields["event"] == 'two\nlines, "quoted", é'
    assert (fields["level"], fields["logger"]) == ("warning", "auditor.x")
    assert set(fields) == {"time", "level", "event", "logger"}


def test_a_traceback_is_a_field():
    try:
        raise RuntimeError("inside")
    except RuntimeError:
        fields = json.loads(JsonLines().format(record("failed", error=sys.exc_info())))
    assert fields["traceback"].startswith("Traceback")
    assert "RuntimeError: inside" in fields["traceback"]


def test_an_event_goes_to_standard_output_without_empty_fields(capsys):
    log_event("info", "request", status=0, code=None, route="/explain")
    log_event("error", "x")
    first, second = capsys.readouterr().out.splitlines()
    fields = json.loads(first)
    assert fields.pop("time").endswith("Z")
    assert fields == {"level": "info", "event": "request", "status": 0, "route": "/explain"}  # 0 is not empty
    assert json.loads(second)["level"] == "error"


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "1970-01-01T00:00:00Z"), (1.79e9, "2026-09-21T14:13:20Z")])
def test_times_are_in_utc(seconds, text, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert stamp(seconds) == text
