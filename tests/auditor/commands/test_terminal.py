"""The terminal: JSON, tables, bars, and the parsing of small values."""

import io
import json
import logging
import math
import os

import pytest

from auditor.commands import terminal
from auditor.errors import OptionError


def test_json_has_null_where_a_number_is_not_finite():
    value = {"a": math.nan, "b": [math.inf, -1.5], "c": {"d": -math.inf}}
    assert json.loads(terminal.as_text(value)) == {"a": None, "b": [None, -1.5], "c": {"d": None}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-4", 1e-4),
        ("true", True),
        ("null", None),
        ("[1, 2]", [1, 2]),
        ("random", "random"),
        ("a=b", "a=b"),
        ("", ""),
    ],
)
def test_a_setting_becomes_what_it_looks_like(text, value):
    assert terminal.parse_settings([f"key={text}"]) == {"key": value}


@pytest.mark.parametrize("setting", ["rank", "=3", ""])
def test_a_setting_needs_a_key_and_a_sign(setting):
    with pytest.raises(OptionError, match="--set wants KEY=VALUE"):
        terminal.parse_settings([setting])


def test_the_last_of_two_settings_counts():
    assert terminal.parse_settings(["rank=3", "rank=4"]) == {"rank": 4}


def test_numbers_are_split_at_commas_and_spaces():
    assert terminal.numbers("--mean", None) is None
    assert terminal.numbers("--mean", "0.5") == [0.5]
    assert terminal.numbers("--mean", "0.5, 1 ,-2e1,") == [0.5, 1.0, -20.0]
    with pytest.raises(OptionError, match="--mean wants numbers with commas between, got '1;2'"):
        terminal.numbers("--mean", "1;2")


def test_class_names_are_lines_without_blanks_at_the_edges(tmp_path):
    (tmp_path / "names.txt").write_text("  a b \n\n\tc\n", encoding="utf-8")
    assert terminal.read_names(tmp_path / "names.txt") == ["a b", "c"]
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(OptionError, match=r"bytes\.txt: cannot be read"):
        terminal.read_names(tmp_path / "bytes.txt")


def test_a_table_in_a_pipe_is_plain_columns_and_brackets_stay(capsys):
    terminal.table(["name", "value"], [["[red]x", "1"], ["long name", "22"]])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == ["name       value", "[red]x     1", "long name  22"]


def test_lines_go_to_standard_output_and_notes_to_standard_error(capsys):
    terminal.say("a", "b")
    terminal.note("c")
    assert capsys.readouterr() == ("a\nb\n", "c\n")


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_bars_and_spinners_are_drawn_on_a_terminal_only(monkeypatch):
    for stream, drawn in ((io.StringIO(), False), (Screen(), True)):
        monkeypatch.setattr("sys.stderr", stream)
        with terminal.Bar() as bar:
            bar("fitting", 1, 2)
            bar("fitting", 2, 2)
            bar("measuring", 0, None)
        with terminal.waiting("loading"):
            pass
        assert ("fitting" in stream.getvalue()) is drawn
        assert ("loading" in stream.getvalue()) is drawn


def test_in_a_pipe_long_work_says_now_and_then_how_far_it_is(capsys):
    now = [0.0]
    with terminal.Bar(lambda: now[0]) as bar:
        for k in range(1, 31):
            now[0] = float(k)
            bar("fitting", k, 30)
        now[0] = 41.0
        bar("measuring", 3, None)
        bar.say("noise: at most 3 passes")
    assert capsys.readouterr().err.splitlines() == [
        *("auditor: fitting: 10 of 30, 10 s", "auditor: fitting: 20 of 30, 20 s", "auditor: fitting: 30 of 30, 30 s"),
        *("auditor: measuring: 3, 41 s", "auditor: noise: at most 3 passes"),
    ]


@pytest.mark.parametrize(("verbose", "level"), [(False, logging.WARNING), (True, logging.INFO)])
def test_our_messages_are_one_line_each_on_standard_error(monkeypatch, verbose, level):
    import warnings

    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    names = ("MLFLOW_LOGGING_LEVEL", "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "GIT_PYTHON_REFRESH")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    with warnings.catch_warnings():
        terminal.set_up_logging(verbose)
    assert logging.getLogger("auditor").level == level
    logging.getLogger("auditor.audit").info("phase %d", 1)
    logging.getLogger("auditor.audit").warning("look")
    expected = ["auditor: phase 1", "auditor: look"] if verbose else ["auditor: look"]
    assert stream.getvalue().splitlines() == expected
    assert all(name in os.environ for name in names)


def test_the_command_can_be_typed_again(monkeypatch):
    import shlex

    arguments = ["audit", "models:/m/1", "--data", "my photos/"]
    monkeypatch.setattr("sys.argv", ["/usr/bin/auditor", *arguments])
    assert shlex.split(terminal.command_line()) == ["auditor", *arguments]
