"""``auditor fidelity``."""

import pytest


@pytest.fixture
def attributes(tmp_path):
    """Of every digit: whether it is even, and whether it has a loop."""
    rows = [f"{k},{100 * (k % 2 == 0)},{100 * (k in (0, 6, 8, 9))}" for k in range(10)]
    file = tmp_path / "attributes.csv"
    file.write_text("\n".join(["class,even,loop", *rows]) + "\n")
    return file


def test_units_of_a_layer_are_compared_with_attributes_of_classes(cli, shown, attributes):
    arguments = ["fidelity", shown, "--data", "sklearn:digits", "--limit", "100", "--attributes", str(attributes)]
    result = cli.json(*arguments)
    assert {row["attribute"] for row in result["attributes"]} == {"even", "loop"}
    assert result["f1"]["floor"] <= result["f1"]["score"] <= 1
    assert 0 < result["f1"]["honest"] <= result["f1"]["score"]
    text = cli(*arguments).output
    assert "d_D by F1" in text
    assert "d_D by accuracy" in text
    assert "d_D by distance" in text
    assert "on 100 images" in text


def test_a_page_with_pictures(cli, shown, attributes, tmp_path):
    page = tmp_path / "units.html"
    arguments = ["fidelity", shown, "--data", "sklearn:digits", "--limit", "60", "--attributes", str(attributes)]
    assert f"page in {page}" in cli(*arguments, "--out", str(page)).output.replace("\n", "")
    assert page.read_text().count("<figure") > 1
    assert "ends in .html" in cli.fails(*arguments, "--out", str(tmp_path / "units.pdf"))


def test_bad_input_is_one_line(cli, shown, attributes, tmp_path):
    data = ["--data", "sklearn:digits", "--limit", "20"]
    assert "want a CSV file" in cli.fails("fidelity", shown, *data, "--attributes", str(tmp_path / "nosuch.csv"))
    assert "nosuch" in cli.fails("fidelity", shown, *data, "--attributes", str(attributes), "--layer", "nosuch")
