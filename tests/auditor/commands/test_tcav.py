"""``auditor tcav``."""

from PIL import Image


def test_a_concept_of_a_person_and_one_of_an_explainer(cli, shown, strokes, tmp_path):
    out = tmp_path / "tcav.png"
    arguments = ["tcav", shown, "--data", "sklearn:digits", "--limit", "200", "--runs", "3", "--images", "12"]
    result = cli.json(*arguments, "--concept", f"round={strokes / 'round'}", "--out", str(out))
    assert {row["concept"] for row in result["scores"]} == {"round"}
    assert len(result["scores"]) == 10
    assert all(0 <= row["score"] <= 1 and row["n_images"] == 12 for row in result["scores"])
    assert Image.open(out).size[0] > 400
    shown_text = cli(*arguments, "--concept", "concepts:1", "--target", "3", "--top", "10").output
    assert "concepts:1" in shown_text
    assert "3 random sets of 10 images; * differs from random concepts" in shown_text


def test_bad_input_is_one_line(cli, shown, strokes):
    data = ["--data", "sklearn:digits"]
    assert "--concept wants NAME=DATA or EXPLAINER:K, got 'round'" in cli.fails(
        "tcav", shown, *data, "--concept", "round"
    )
    assert "no such file or folder" in cli.fails("tcav", shown, *data, "--concept", "round=nosuch/")
    assert "has no explainer called 'none'" in cli.fails("tcav", shown, *data, "--concept", "none:1")
    assert "layer" in cli.fails("tcav", shown, *data, "--concept", f"round={strokes / 'round'}", "--layer", "nosuch")
