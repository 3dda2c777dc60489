"""``auditor detach``."""

from pathlib import Path

from auditor.plugins.registry.location import resolve


def test_a_detached_explainer_is_gone_and_its_files_stay(cli, scratch):
    root = Path(resolve(scratch).root.removeprefix("file://"))
    assert cli.json("detach", scratch, "concepts") == {"detached": "concepts"}
    assert cli.json("list", scratch) == []
    assert list(root.glob("explainers/concepts/*/manifest.json"))


def test_at_the_terminal(cli, scratch):
    assert cli("detach", scratch, "concepts").stdout == f"Detached concepts from {scratch}.\n"


def test_bad_input_is_one_line(cli, shown):
    assert "no explainer called 'absent'" in cli.fails("detach", shown, "absent")
    assert "no registered model" in cli.fails("detach", "models:/nosuch/1", "concepts")
