"""``auditor log`` and ``auditor log verify``: shown, whole, and every way to damage it."""

import json

import mlflow
import pytest

from auditor import fit, open_data, plugins
from auditor.plugins.registry import history
from auditor.plugins.registry.location import resolve


@pytest.fixture
def name(registry, tiny):
    """A registered model with three entries."""
    version = resolve(plugins.log_subject(tiny, "with-history", experiment="tests"))
    for action in ("sign", "describe", "reload"):  # none of which leaves a tag that the log could be held against
        history.append(version, action, {f"{action}.json": "1" * 64})
    yield "with-history"
    mlflow.MlflowClient().delete_registered_model("with-history")


def tag_keys(name: str) -> list[str]:
    return sorted(k for k in mlflow.MlflowClient().get_registered_model(name).tags if k.startswith("auditor.log."))


def test_a_history_is_shown_by_name_or_version(cli, name):
    entries = cli.json("log", name)
    assert [e["action"] for e in entries] == ["sign", "describe", "reload"]
    shown = cli("log", "models:/with-history/1").stdout
    assert "sign.json" in shown
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


def test_a_deed_without_an_entry_and_one_undone_without_one_are_named(cli, registry, tiny, tiny_npz):
    """Whoever may edit the model sets a tag back, or moves the alias, and leaves the log as it is."""
    uri = plugins.log_subject(tiny, "acted-on", experiment="tests")
    subject, client = plugins.load_subject(uri), mlflow.MlflowClient()
    concepts = fit("nmf", subject, open_data(tiny_npz), layer="relu", rank=2, refits=1, max_eval=10)
    plugins.attach(concepts, uri, "concepts", subject=subject, attach_anyway=True)
    with history.noted(resolve(uri), "promote", {}, "champion"):
        client.set_registered_model_alias("acted-on", "champion", "1")
    assert cli("log", "verify", "acted-on").exit_code == 0
    assert [e["action"] for e in cli.json("log", "acted-on")] == ["begin attach", "attach", "begin promote", "promote"]
    assert "begin" not in cli("log", "acted-on").stdout
    client.delete_registered_model_alias("acted-on", "champion")
    key = "auditor.explainer.concepts"
    value = client.get_model_version("acted-on", "1").tags[key]
    client.delete_model_version_tag("acted-on", "1", key)
    client.set_model_version_tag("acted-on", "1", "auditor.explainer.other", value)
    result = cli("log", "verify", "acted-on")
    assert result.exit_code == 1
    for words in (
        "alias champion is gone",
        "explainer concepts of version 1 is gone",
        "explainer other of version 1 (",
    ):
        assert words in result.stderr
