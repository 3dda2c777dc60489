"""``auditor revise``."""

import json

import pytest

from auditor.plugins import latest_audit, load_subject
from auditor.plugins.registry.location import resolve

DATA = ("--data", "sklearn:digits", "--limit", "100")


@pytest.mark.slow
def test_a_revised_network_is_registered_with_lineage_and_audit(cli, scratch):
    answer = cli.json("revise", scratch, "--remove", "concepts:5", *DATA, "--register")
    new = resolve(answer["registered"], registered=True)
    lineage = json.loads(new.tags["auditor.lineage"])
    assert lineage["source"] == scratch
    assert lineage["change"] == "concepts 5 taken out"
    assert load_subject(new).n_classes == 10
    assert latest_audit(new) is not None
    assert [row["class"] for row in answer["classes"]] == [str(i) for i in range(10)]


def test_nothing_is_registered_unless_asked_for(cli, scratch):
    result = cli("revise", scratch, "--remove", "group:0", "--refit-head", *DATA)
    assert result.exit_code == 0
    assert "concepts, layer features: " in result.stdout
    assert "refitted" in result.stdout
    assert "accuracy before" in result.stdout
    assert "nothing was registered" in result.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--remove", "everything"), "--remove wants concepts:0,1,2 or group:1, got 'everything'"),
        (("--remove", "concepts:x"), "--remove wants concepts:0,1,2 or group:1"),
        (("--remove", "group:99"), "concepts has groups 0 to"),
        (("--remove", "concepts:99"), "concepts must be 0 to 5"),
        (("--remove", "concepts:0", "--explainer", "none"), "has no explainer called 'none'"),
        (("--remove", "none:0"), "has no explainer called 'none'"),
    ],
)
def test_bad_input_is_one_line(cli, shown, options, sentence):
    assert sentence in cli.fails("revise", shown, *DATA, *options)
