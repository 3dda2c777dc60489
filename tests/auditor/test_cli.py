"""The commands as a user types them, in one process; every bad input gets one line and exit code 2."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from auditor.cli import auditor

MODEL = "models:/digits/1"


@pytest.fixture
def seven(tmp_path, digits_data, digits):
    batch = next(digits_data.batches(digits, 64))
    row = int((batch.labels == 7).nonzero()[0, 0])
    Image.fromarray((batch.images[row, 0].numpy() * 255).astype("uint8")).save(tmp_path / "seven.png")
    return tmp_path / "seven.png"


def test_fit_list_explain_verify_detach(cli, seven, tmp_path):
    fitted = cli.json(
        "fit", "nmf", MODEL, "--data", "sklearn:digits", "--name", "cli", "--set", "rank=5", "--set", "refits=1"
    )
    assert fitted["name"] == "cli"
    assert fitted["metrics"]["f_cls"] > 0.8
    (row,) = [r for r in cli.json("list", MODEL) if r["name"] == "cli"]
    assert (row["kind"], row["digest"], row["layer"], row["verified"]) == ("nmf", fitted["digest"], "features", True)
    assert "cli" in cli("list", MODEL).output
    answer = cli.json("explain", MODEL, seven, "--explainer", "cli", "--out", tmp_path / "out")
    assert answer["prediction"]["label"] == "7"
    (e,) = answer["explanations"]
    total = e["bias"] + e["residual"] + sum(c["contribution"] for c in e["concepts"])
    assert total == pytest.approx(answer["target"]["logit"], rel=1e-4)
    assert len(e["concepts"][0]["heatmap"]) == 4
    assert 0 <= answer["stability"]["score"] <= 1
    assert answer["model"]["digest"]
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"cli.png", *(f"cli-{k:02d}.png" for k in range(5))}
    assert "= target value" in cli("explain", MODEL, seven, "--explainer", "cli", "--target", "1").output
    assert cli("verify", MODEL).exit_code == 0
    assert cli.json("detach", MODEL, "cli") == {"detached": "cli"}
    assert "no explainer called 'cli'" in cli.fails("detach", MODEL, "cli")


def test_layers_marks_the_suggested_one(cli):
    rows = cli.json("layers", MODEL)
    assert [r["name"] for r in rows if r["suggested"]] == ["features"]
    assert re.search(r"features +Sequential +64 +4 x 4 +non-negative +\* suggested", cli("layers", MODEL).output)


def test_dry_run_attaches_nothing(cli):
    before = cli.json("list", MODEL)
    out = cli.json("fit", "nmf", MODEL, "--data", "sklearn:digits", "--limit", "50", "--set", "rank=2", "--dry-run")
    assert out["digest"] is None
    assert cli.json("list", MODEL) == before


def test_bad_input_is_one_line_and_exit_2(cli, tmp_path, seven):
    (tmp_path / "not.png").write_text("hello")
    fit = ("fit", "nmf", MODEL, "--data", "sklearn:digits")
    for arguments, sentence in [
        (("list", "models:/nosuch/1"), "no registered model"),
        (("fit", "nmf", MODEL, "--data", "/no/such"), "no such file or folder"),
        ((*fit, "--layer", "nosuch"), "no layer 'nosuch'"),
        ((*fit, "--set", "rank=999999"), "rank must be at most 64"),
        ((*fit, "--set", "nosuch=1"), "unknown option 'nosuch'"),
        ((*fit, "--set", "rank"), "--set wants KEY=VALUE"),
        ((*fit, "--name", "a/b"), "explainer name 'a/b'"),
        ((*fit, "--export", "--dry-run"), "leave --dry-run out"),
        ((*fit, "--target", "12"), "class index must be 0 to 9"),
        (("fit", "nosuch", MODEL, "--data", "sklearn:digits"), "unknown explainer kind 'nosuch'"),
        (("explain", MODEL, "/no/such.png", "--explainer", "x"), "no such file"),
        (("explain", MODEL, seven), "nothing is attached to models:/digits/1; fit something first"),
        (("describe", MODEL, "--mean", "x"), "--mean wants numbers"),
        (("describe", MODEL, "--classes", "/no/such"), "cannot be read"),
    ]:
        assert sentence in cli.fails(*arguments)


def test_a_file_that_is_no_image(cli, tmp_path):
    cli.json("fit", "nmf", MODEL, "--data", "sklearn:digits", "--limit", "60", "--set", "rank=2", "--set", "refits=1")
    (tmp_path / "not.png").write_text("hello")
    assert "not a readable image" in cli.fails("explain", MODEL, tmp_path / "not.png")
    cli("detach", MODEL, "nmf")


def test_wrong_channels_and_sizes_are_said(cli, tiny_npz):
    assert "got (40, 13, 17)" in cli.fails("fit", "nmf", MODEL, "--data", str(tiny_npz))


@pytest.mark.parametrize("name", sorted(auditor.commands))
def test_every_command_teaches_by_an_example(cli, name):
    text = cli(name, "--help").output
    assert "Example:" in text
    assert f"auditor {name}" in text


def test_usage_errors_are_clicks_own_exit_2(cli):
    assert cli("fit", "nmf").exit_code == 2
    assert cli("nosuch").exit_code == 2


@pytest.mark.parametrize(
    "kinds", [["nmf"], pytest.param(["nmf", "coupled", "xnn", "tree", "deepfacto", "rde"], marks=pytest.mark.slow)]
)
def test_demo_is_whole(tmp_path, registry, kinds):
    from tests.conftest import Cli

    chosen = ["--kind", "nmf"] if kinds == ["nmf"] else []
    out = Cli().json("demo", "--dir", tmp_path / "demo", *chosen)
    assert [entry["kind"] for entry in out["explainers"].values()] == kinds
    assert out["accuracy"] >= 0.97
    assert out["gate"]["verdict"] == "pass"
    assert out["gate"]["promoted"] == "champion"
    assert "<html" in Path(out["report"]).read_text(encoding="utf-8")
    picture = Image.open(out["sheet"])
    assert picture.size[0] > 500
    assert json.loads((tmp_path / "demo" / "demo.json").read_text())["model"] == "models:/digits/1"


def test_a_folder_that_may_not_be_written_is_one_line(cli, seven, tmp_path):
    (tmp_path / "file").write_text("in the way")
    cli.json("fit", "nmf", MODEL, "--data", "sklearn:digits", "--limit", "60", "--set", "rank=2", "--set", "refits=1")
    line = cli.fails("explain", MODEL, seven, "--explainer", "nmf", "--out", tmp_path / "file" / "x")
    assert "Not a directory" in line
    cli("detach", MODEL, "nmf")
