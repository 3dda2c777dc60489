"""``auditor demo``."""

import json
from pathlib import Path

import pytest
from PIL import Image

from auditor.plugins import demo as plugins_demo
from auditor.service import launch

KINDS = ["nmf", "coupled", "xnn", "tree", "deepfacto", "rde"]


@pytest.fixture(scope="module")
def made(tmp_path_factory, store):
    """A demo with one kind, run at the terminal: its folder, its result and what was printed."""
    from tests.conftest import Cli

    folder = tmp_path_factory.mktemp("demo")
    result = Cli()("demo", "--dir", folder, "--kind", "nmf")
    assert result.exit_code == 0, result.output
    return folder, json.loads((folder / "demo.json").read_text()), result.stdout


def check_whole(result, kinds):
    assert [entry["kind"] for entry in result["explainers"].values()] == kinds
    assert result["accuracy"] >= 0.97
    assert result["gate"]["verdict"] == "pass"
    assert result["gate"]["promoted"] == "champion"
    assert result["model"] == "models:/digits/1"
    assert "<html" in Path(result["report"]).read_text(encoding="utf-8")
    with Image.open(result["sheet"]) as picture:
        assert picture.size[0] > 500


@pytest.mark.slow
def test_one_kind_goes_the_whole_way(made):
    check_whole(made[1], ["nmf"])


@pytest.mark.slow
def test_every_kind_goes_the_whole_way(tmp_path, cli):
    check_whole(cli.json("demo", "--dir", tmp_path / "demo"), KINDS)


@pytest.mark.slow
def test_the_terminal_says_what_was_made_and_what_to_type_next(made):
    _, result, printed = made
    assert f"Registered it as {result['model']} in {result['tracking_uri']}" in printed
    assert "What to type next:" in printed
    assert f"auditor explain  {result['model']} {result['image']}" in printed


def test_json_is_the_result_and_serve_starts_on_it(cli, monkeypatch, tmp_path):
    result = {"model": "models:/digits/1", "tracking_uri": f"sqlite:///{tmp_path}/m.db", "explainers": {}}
    served = []
    monkeypatch.setattr(plugins_demo, "run_demo", lambda *args, **options: result)
    monkeypatch.setattr(launch, "run_server", lambda model, **options: served.append((model, options)))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    answer = cli("demo", "--dir", tmp_path, "--serve", "--port", "3100", "--json")
    assert json.loads(answer.stdout) == result
    ((model, options),) = served
    assert model == result["model"]
    assert (options["host"], options["port"]) == ("127.0.0.1", 3100)


def test_bad_input_is_one_line(cli, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert "there is a file of this name" in cli.fails("demo", "--dir", tmp_path / "file")
    assert "there is no kind 'nosuch'" in cli.fails("demo", "--dir", tmp_path / "demo", "--kind", "nosuch")
    assert not (tmp_path / "demo").exists()
