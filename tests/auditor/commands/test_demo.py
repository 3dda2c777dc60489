"""``auditor demo``: the story of the stamp, and the digits."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from auditor.plugins import demo as on_digits
from auditor.plugins import demo_story
from auditor.service import launch

KINDS = ["nmf", "coupled", "xnn", "tree", "deepfacto", "rde"]


@pytest.fixture(scope="module")
def made(tmp_path_factory, store):
    """The story with one kind, run at the terminal: its folder, its result and what was printed."""
    from tests.conftest import Cli

    folder = tmp_path_factory.mktemp("demo")
    result = Cli()("demo", "--dir", folder, "--kind", "nmf")
    assert result.exit_code == 0, result.output
    return folder, json.loads((folder / "demo.json").read_text()), result.stdout


def check_story(result, kinds):
    """Both versions are right as often; the shortcut is found in the second, named, and stops it."""
    assert [entry["kind"] for entry in result["explainers"].values()] == kinds
    first, second = result["versions"]
    assert min(first["accuracy"], second["accuracy"]) >= 0.95
    assert abs(first["accuracy"] - second["accuracy"]) <= 0.03
    assert first["accuracy_without_stamp"] >= 0.95  # the truth, which no audit was told
    assert second["accuracy_without_stamp"] <= 0.85
    assert (first["gate"]["verdict"], first["gate"]["promoted"]) == ("pass", "champion")
    assert not [f for f in first["found"] if f["verdict"] == "found"]
    assert [f["name"] for f in second["found"] if f["verdict"] == "found"] == ["hawk"]
    assert second["gate"]["verdict"] == "fail"
    assert {c["metric"] for c in second["gate"]["failed"]} == {"model/reliance/found", "model/reliance/worst/score"}
    assert "Class hawk hangs on" in second["gate"]["failed"][0]["reason"]
    page = Path(second["report"]).read_text(encoding="utf-8")
    assert "The gate fails" in page
    assert "Found: hawk" in page
    failures = list(ElementTree.parse(second["junit"]).getroot().iter("failure"))
    assert len(failures) == 2
    for picture in (result["sheet"], result["picture"], result["image"]):
        with Image.open(picture) as image:
            assert min(image.size) >= 64


@pytest.mark.slow
def test_one_kind_goes_the_whole_way(made):
    check_story(made[1], ["nmf"])


@pytest.mark.slow
def test_every_kind_goes_the_whole_way(tmp_path, cli):
    check_story(cli.json("demo", "--dir", tmp_path / "demo"), KINDS)


@pytest.mark.slow
def test_the_terminal_says_what_was_found_and_what_to_type_next(made):
    _, result, printed = made
    assert f"Two versions of a bird model, in {result['tracking_uri']}" in printed
    assert "found: Class hawk hangs on" in printed
    assert "the gate passes it" in printed
    assert "the gate stops it: model/reliance/found is 1 (at most 0)" in printed
    assert "What to type next:" in printed
    assert f"auditor explain  {result['model']} {result['image']}" in printed


@pytest.mark.slow
def test_the_audits_page_shows_why_the_second_version_was_stopped(made, monkeypatch):
    """The page inside MLflow's application: the limits that failed, and the picture."""
    import mlflow
    from mlflow.server import handlers
    from starlette.testclient import TestClient

    _, result, _ = made
    monkeypatch.setenv("_MLFLOW_SERVER_FILE_STORE", result["tracking_uri"])
    monkeypatch.setattr(handlers, "_tracking_store", None)
    monkeypatch.setattr(handlers, "_model_registry_store", None)
    mlflow.set_tracking_uri(result["tracking_uri"])
    from auditor.plugins.server import create_app

    page = TestClient(create_app(), base_url="http://localhost")
    version = page.get("/auditor/version?name=birds&version=2").text
    assert "model/reliance/found" in version
    assert "Class hawk hangs on" in version
    assert page.get("/auditor/picture?name=birds&version=2").content.startswith(b"\x89PNG")


@pytest.mark.slow
def test_digits_go_the_whole_way(tmp_path, cli):
    result = cli.json("demo", "--digits", "--dir", tmp_path / "demo")
    assert [entry["kind"] for entry in result["explainers"].values()] == KINDS
    assert result["accuracy"] >= 0.97
    assert (result["gate"]["verdict"], result["gate"]["promoted"]) == ("pass", "champion")
    assert result["model"] == "models:/digits/1"
    assert "<html" in Path(result["report"]).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("flags", "module", "name"), [((), demo_story, "run_story"), (("--digits",), on_digits, "run_demo")]
)
def test_json_is_the_result_and_serve_starts_on_it(cli, monkeypatch, tmp_path, flags, module, name):
    result = {
        "model": "models:/m/1",
        "tracking_uri": f"sqlite:///{tmp_path}/m.db",
        "explainers": {},
        "data": "birds/test",
    }
    served = []
    monkeypatch.setattr(module, name, lambda *args, **options: result)
    monkeypatch.setattr(launch, "run_server", lambda model, **options: served.append((model, options)))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    answer = cli("demo", *flags, "--dir", tmp_path, "--serve", "--port", "3100", "--json")
    assert json.loads(answer.stdout) == result
    ((model, options),) = served
    assert model == result["model"]
    assert (options["host"], options["port"]) == ("127.0.0.1", 3100)
    assert options["sample_images"] == ("sklearn:digits?split=test" if flags else "birds/test")


@pytest.mark.parametrize("flags", [(), ("--digits",)])
def test_bad_input_is_one_line(cli, tmp_path, flags):
    (tmp_path / "file").write_text("in the way")
    assert "there is a file of this name" in cli.fails("demo", *flags, "--dir", tmp_path / "file")
    assert "there is no kind 'nosuch'" in cli.fails("demo", *flags, "--dir", tmp_path / "demo", "--kind", "nosuch")
    assert not (tmp_path / "demo").exists()
