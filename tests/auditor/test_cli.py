"""The program ``auditor`` itself."""

import os
import subprocess
import sys

import pytest

from auditor import cli


def test_threads_wait_passively_before_torch_loads(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(sys, "argv", ["auditor", "--version"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")  # a user's own choice stays
    with pytest.raises(SystemExit):
        cli.main()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_mlflow_prints_no_addresses_into_the_output(monkeypatch):
    from mlflow.environment_variables import MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT

    monkeypatch.setenv("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "false")
    assert not MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT.get()
    monkeypatch.delenv("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT")
    monkeypatch.setattr(sys, "argv", ["auditor", "--version"])
    with pytest.raises(SystemExit):
        cli.main()
    assert MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT.get()


def test_help_lists_every_command():
    code = "from auditor.cli import main; main()"
    shown = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True).stdout
    listed = shown.partition("Commands:")[2].split("\n")
    assert {line.split()[0] for line in listed if line.strip()} >= set(cli.auditor.commands)
    assert "Start with: auditor demo" in shown
