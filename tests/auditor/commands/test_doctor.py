"""``auditor doctor``."""

import pytest

from auditor.commands import machine_checks
from auditor.commands.machine_checks import CHECKS, Check, exit_code, run_checks

pytestmark = pytest.mark.usefixtures("registry")


def test_every_part_has_a_status_and_a_sentence(cli):
    rows = cli.json("doctor")
    assert [row["name"] for row in rows] == list(CHECKS)
    by_name = {row["name"]: row for row in rows}
    assert by_name["cpu"]["status"] == by_name["python"]["status"] == by_name["mlflow"]["status"] == "ok"
    for row in rows:
        assert row["status"] in ("ok", "absent")
        assert row["sentence"].endswith(".")
        assert row["seconds"] >= 0


def test_the_table_and_what_is_broken(cli, monkeypatch):
    monkeypatch.setattr(machine_checks, "CHECKS", {"cpu": CHECKS["allocator"], "ray": lambda: 1 / 0})
    result = cli("doctor")
    assert result.exit_code == 2
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[1][:2] in (["cpu", "ok"], ["cpu", "absent"])
    assert lines[2][:3] == ["ray", "broken", "ZeroDivisionError:"]


def test_bad_input_is_refused(cli):
    result = cli("doctor", "everything")
    assert result.exit_code == 2
    assert "unexpected extra argument" in result.stderr


def test_absent_is_no_fault_and_broken_is():
    assert exit_code([Check("a", "ok", ""), Check("b", "absent", "")]) == 0
    assert exit_code([Check("a", "ok", ""), Check("b", "broken", "")]) == 2


def test_a_registry_that_does_not_answer_is_broken_and_its_password_is_not_shown(monkeypatch):
    import mlflow

    before = mlflow.get_tracking_uri()
    try:
        mlflow.set_tracking_uri("http://me:secret@127.0.0.1:9")
        monkeypatch.setattr(machine_checks, "CHECKS", {"mlflow": CHECKS["mlflow"]})
        monkeypatch.setattr(mlflow, "get_registry_uri", lambda: "http://me:secret@127.0.0.1:9")
        mlflow.set_registry_uri("http://me:secret@127.0.0.1:9")
        (check,) = run_checks()
    finally:
        mlflow.set_tracking_uri(before)
        mlflow.set_registry_uri(before)
    assert check.status == "broken"
    assert "does not answer" in check.sentence
    assert "secret" not in check.sentence
