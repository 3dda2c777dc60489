"""``auditor compare-maps``: the page, the table, the JSON, and one sentence for every mistake."""

import json

FAST = ["--method", "Grad-CAM", "--method", "LRP-alpha-beta", "--method", "occlusion"]


def test_maps_of_an_image_beside_what_is_attached(cli, shown, seven, tmp_path):
    result = cli("compare-maps", shown, seven, *FAST, "--out", tmp_path / "maps.html")
    assert result.exit_code == 0, result.output
    for name in ("Grad-CAM", "LRP-alpha-beta", "occlusion", "concepts (nmf)", "heads (xnn)", "gain over random"):
        assert name in result.stdout
    assert (tmp_path / "maps.html").read_text().count("<img") == 6
    printed = json.loads(cli("compare-maps", shown, seven, *FAST, "--explainers", "none", "--json").stdout)
    assert [m["name"] for m in printed["maps"]] == ["Grad-CAM", "LRP-alpha-beta", "occlusion"]
    assert printed["prediction"] == printed["target"] == "7"


def test_mistakes_are_one_sentence(cli, shown, seven, tmp_path):
    def says(*args):
        result = cli("compare-maps", shown, *args)
        assert result.exit_code == 2
        lines = [line for line in result.stderr.splitlines() if line.startswith("auditor: error")]
        assert len(lines) == 1
        return lines[0]

    assert "no such file" in says(tmp_path / "none.png")
    assert "did you mean Grad-CAM" in says(seven, "--method", "Grad-CAN")
    assert "has concepts, heads attached" in says(seven, "--explainers", "nothing")
    assert "ends in .html" in says(seven, "--out", tmp_path / "x.png")
    assert "class" in says(seven, *FAST, "--target", "eleven")
