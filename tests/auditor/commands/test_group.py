"""What all commands share: the examples in the help, and errors in one line."""

import errno

import click
import pytest

from auditor.cli import auditor
from auditor.commands import group
from auditor.errors import DataError

ERRORS_IN_ONE_LINE = group.reports_errors("nothing was done")


@pytest.mark.parametrize("name", sorted(auditor.commands))
def test_every_command_teaches_by_an_example(cli, name):
    text = cli(name, "--help").output
    assert "Example:" in text
    assert f"auditor {name}" in text


def test_usage_errors_are_clicks_own_exit_2(cli):
    assert cli("fit", "nmf").exit_code == 2
    assert cli("nosuch").exit_code == 2


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (DataError("no such\n  file"), 2, "auditor: error: no such file"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/x/y"),
            2,
            "No space left on device (/x/y); nothing was done.",
        ),
        (
            ZeroDivisionError("division by\nzero."),
            2,
            "error: ZeroDivisionError: division by zero; nothing was done. (au",
        ),
        (RuntimeError(), 2, "error: RuntimeError; nothing was done."),
        (KeyboardInterrupt(), 130, "auditor: interrupted; nothing was done."),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(capsys, raised, code, line):
    @ERRORS_IN_ONE_LINE
    def command():
        raise raised

    with pytest.raises(SystemExit) as stopped, click.Context(click.Command("command")):
        command()
    assert stopped.value.code == code
    printed = capsys.readouterr().err.strip().splitlines()
    assert len(printed) == 1
    assert line in printed[0]


def test_a_closed_pipe_and_clicks_own_errors_pass_through():
    for raised in (BrokenPipeError(), click.UsageError("no"), click.Abort(), click.exceptions.Exit(0)):

        @ERRORS_IN_ONE_LINE
        def command(raised=raised):
            raise raised

        with pytest.raises(type(raised)), click.Context(click.Command("command")):
            command()


def test_an_example_keeps_its_lines():
    @click.command(epilog=group.example("auditor a", "auditor b"))
    def command():
        """Do it."""

    from click.testing import CliRunner

    assert "Example:\n    auditor a\n    auditor b" in CliRunner().invoke(command, ["--help"]).output
