"""``auditor log`` and ``auditor log verify``: shown, whole, and every way to damage it."""

import json

import mlflow
import pytest

from auditor import plugins
from auditor.plugins.registry import history
from auditor.plugins.registry.location import resolve


@pytest.fixture
def name(registry, tiny):
    """A registered model with three entries."""
    version = resolve(plugins.log_subject(tiny, "with-history", experiment="tests"))
    for action in ("attach", "audit", "gate"):
        history.append(version, action, {f"{action}.json": "1" * 64})
    yield "with-history"
    mlflow.MlflowClient().delete_registered_model("with-history")


def tag_keys(name: str) -> list[str]:
    return sorted(k for k in mlflow.MlflowClient().get_registered_model(name).tags if k.startswith("auditor.log."))


def test_a_history_is_shown_by_name_or_version(cli, name):
    entries = cli.json("log", name)
    assert [e["action"] for e in entries] == ["attach", "audit", "gate"]
    shown = cli("log", "models:/with-history/1").stdout
    assert "attach.json" in shown
    assert cli("log", "digits").exit_code == 0


def test_a_whole_history_verifies_and_names_its_newest_entry(cli, name):
    answer = cli.json("log", "verify", name)
    assert answer["whole"]
    assert answer["head"] == cli.json("log", name)[-1]["digest"]
    result = cli("log", "verify", name, "--head", answer["head"])
    assert result.exit_code == 0
    assert "is whole; 3 entries, 3 of them unsigned" in result.stdout


@pytest.mark.parametrize("damage", ["rewritten", "removed", "rolled back", "truncated"])
def test_damage_is_named_and_exits_with_one(cli, name, damage):
    client, keys = mlflow.MlflowClient(), tag_keys(name)
    if damage == "rewritten":
        value = json.loads(client.get_registered_model(name).tags[keys[1]])
        client.set_registered_model_tag(name, keys[1], json.dumps({**value, "action": "promote"}))
    elif damage == "removed":
        client.delete_registered_model_tag(name, keys[1])
    elif damage == "rolled back":
        client.delete_registered_model_tag(name, keys[2])
    else:
        for key in keys:
            client.delete_registered_model_tag(name, key)
    result = cli("log", "verify", name)
    assert result.exit_code == 1
    words = {"rewritten": "entry 2 was rewritten", "removed": "entry 2 before it was removed"}
    assert words.get(damage, "the log was cut back") in result.stderr
    assert "NOT whole" in result.stdout


def test_bad_input_is_one_line(cli, registry, tmp_path):
    assert "none-such" in cli.fails("log", "none-such")
    assert "no such folder" in cli.fails("log", "verify", "digits", "--trusted", tmp_path / "none")
