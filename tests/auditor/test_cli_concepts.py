"""The commands around concepts as a user types them: coupled fits, names, pages, and drift between versions."""

import pytest
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

from auditor import Subject
from auditor.plugins import list_attached, load, log_subject

MODEL = "models:/digits/1"


@pytest.fixture
def coupled(cli):
    options = ("rank=4", "max_iter=40", "lambda_table=false", "layers=features,head.2")
    flags = [part for option in options for part in ("--set", option)]
    return cli.json("fit", "coupled", MODEL, "--data", "sklearn:digits", "--limit", "200", "--name", "shared", *flags)


def test_coupled_fit_label_and_page(cli, coupled, tmp_path):
    assert coupled["kind"] == "coupled"
    assert coupled["layer"] == "head.2"
    answer = cli.json("label", MODEL, "shared", "2", "stripes")
    assert answer["label"] == "stripes"
    assert answer["digest"] != coupled["digest"]
    (row,) = [r for r in cli.json("list", MODEL) if r["name"] == "shared"]
    assert (row["digest"], row["verified"]) == (answer["digest"], True)
    assert load(MODEL, "shared").label(2) == "stripes"
    page = cli.json("concepts", MODEL, "shared", "--out", tmp_path / "page.html")["page"]
    assert "stripes" in (tmp_path / "page.html").read_text()
    assert page.endswith("page.html")
    assert "has concepts 0 to 3, got 4" in cli.fails("label", MODEL, "shared", "4", "dots")
    assert "no explainer called 'absent'" in cli.fails("label", MODEL, "absent", "0", "dots")
    assert "ends in .html or .png" in cli.fails("concepts", MODEL, "shared", "--out", tmp_path / "page.txt")
    (after,) = [x for x in list_attached(MODEL) if x.name == "shared"]
    assert after.digest == answer["digest"]  # what failed attached nothing
    cli("detach", MODEL, "shared")


def test_compare_a_version_with_itself_and_with_what_it_cannot_be_compared_with(cli, tmp_path):
    flags = ("--data", "sklearn:digits", "--limit", "120", "--rank", "4", "--refits", "5")
    found = cli.json("compare", MODEL, MODEL, *flags, "--out", tmp_path / "drift.png")
    assert found["drift"] is False
    assert found["similarity"] >= found["null_low"]
    assert len(found["matched"]) == 4
    assert found["cka"]["features"] == pytest.approx(1)
    assert (tmp_path / "drift.png").stat().st_size > 10_000
    assert "no drift: similarity" in cli("compare", MODEL, MODEL, *flags).output
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    other = log_subject(Subject(net, input_shape=(1, 8, 8)), "other-classes", experiment="tests")
    assert "different class lists (10 and 3 classes" in cli.fails("compare", MODEL, other, *flags)
    assert "no such file or folder" in cli.fails("compare", MODEL, MODEL, "--data", "nowhere")


def test_a_tree_is_explained_by_its_rules_and_drawn_with_the_path(cli, tmp_path):
    flags = [part for option in ("n_features=16", "epochs=2", "depth=4") for part in ("--set", option)]
    cli.json("fit", "tree", MODEL, "--data", "sklearn:digits", "--limit", "200", "--name", "branches", *flags)
    image = tmp_path / "seven.png"
    Image.fromarray((load_digits().images[7] * 15.9).astype("uint8")).save(image)
    try:
        out = tmp_path / "explained"
        answer = cli.json("explain", MODEL, image, "--explainer", "branches", "--samples", "1", "--out", out)
        extra = answer["explanations"][0]["extra"]
        page = (out / "branches.html").read_text()
        assert page.count('class="node on"') == len(extra["path"]) >= 1
        assert page.count('class="leaf on"') == 1
        told = cli("explain", MODEL, image, "--explainer", "branches", "--samples", "1").output
        assert f"path to leaf {extra['leaf']}, which says {extra['tree_class']}" in told
        assert all(step["rule"] in told for step in extra["path"])
        assert cli.json("concepts", MODEL, "branches", "--out", tmp_path / "tree.svg")["page"].endswith("tree.svg")
    finally:
        cli("detach", MODEL, "branches")
