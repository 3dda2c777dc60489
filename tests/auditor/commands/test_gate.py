"""``auditor gate``: 0 passes, 1 fails, 2 is no verdict."""

from xml.etree import ElementTree

import mlflow
import pytest


@pytest.fixture
def hard(tmp_path):
    """A policy that nothing passes."""
    (tmp_path / "hard.toml").write_text('[limits."model/accuracy"]\nmin = 1.01\n')
    return tmp_path / "hard.toml"


def test_pass_is_exit_0_and_moves_the_alias(cli, gated, policy, tmp_path):
    uri = gated[0]
    answer = cli.json("gate", uri, "--policy", policy, "--promote", "command", "--junit", tmp_path / "out" / "j.xml")
    assert answer["verdict"] == "pass"
    assert {"metric", "value", "limit", "verdict", "reason"} <= set(answer["checks"][0])
    assert ElementTree.parse(tmp_path / "out" / "j.xml").getroot().get("failures") == "0"
    assert str(mlflow.MlflowClient().get_registered_model("gated").aliases["command"]) == uri.rpartition("/")[2]
    shown = cli("gate", uri, "--policy", policy)
    n = len(answer["checks"])
    unsigned = "the verdict is unsigned (no --sign-key)"
    assert (shown.exit_code, shown.stdout) == (0, f"PASS: {uri}, {n} of {n} checks hold\n{unsigned}\n")


def test_fail_is_exit_1_and_moves_nothing(cli, gated, hard, tmp_path):
    result = cli("gate", gated[0], "--policy", hard, "--promote", "never", "--markdown", tmp_path / "m.md")
    assert result.exit_code == 1
    assert "FAIL" in result.stdout
    assert "model/accuracy" in result.stdout
    assert "**FAIL**" in (tmp_path / "m.md").read_text()
    assert "never" not in mlflow.MlflowClient().get_registered_model("gated").aliases
    failed = cli("gate", gated[0], "--policy", hard, "--json")
    assert failed.exit_code == 1
    assert '"verdict": "fail"' in failed.stdout


def test_no_verdict_is_one_line_and_exit_2(cli, gated, hard, tmp_path):
    (tmp_path / "empty.toml").write_text("")
    assert "sets no limits" in cli.fails("gate", gated[0], "--policy", tmp_path / "empty.toml")
    assert "none.toml" in cli.fails("gate", gated[0], "--policy", tmp_path / "none.toml")
    assert "has no stored audit" in cli.fails("gate", "models:/digits/1", "--policy", hard)
    assert "cannot be read" in cli.fails("gate", gated[0], "--policy", hard, "--audit", tmp_path / "none.json")
    assert "no registered model" in cli.fails("gate", "models:/nosuch/1", "--policy", hard)


def test_labels_belong_to_data(cli, policy):
    assert "give --data too" in cli.fails("gate", "models:/digits/1", "--policy", policy, "--labels", "none")
