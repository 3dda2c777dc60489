"""``auditor xnn-sheet``."""

from PIL import Image


def test_a_row_per_image(cli, shown, tmp_path):
    out = tmp_path / "sheet.png"
    result = cli("xnn-sheet", shown, "heads", "--data", "sklearn:digits", "--images", "2", "--out", out)
    assert (result.exit_code, result.stdout) == (0, f"wrote {out}\n")
    with Image.open(out) as picture:
        assert picture.size == (12 + 144 * 7, 170 * 2 + 12)


def test_as_json(cli, shown, tmp_path):
    out = tmp_path / "one.png"
    answer = cli.json("xnn-sheet", shown, "heads", "--data", "sklearn:digits", "--images", "1", "--out", out)
    assert answer == {"name": "heads", "images": 1, "sheet": str(out)}
    assert out.exists()


def test_bad_input_is_one_line(cli, shown, tmp_path):
    sheet = ("--data", "sklearn:digits", "--out", tmp_path / "sheet.png")
    assert "'concepts' is of kind nmf; name an explainer of kind xnn" in cli.fails(
        "xnn-sheet", shown, "concepts", *sheet
    )
    assert "no explainer called 'absent'" in cli.fails("xnn-sheet", shown, "absent", *sheet)
    assert not list(tmp_path.iterdir())
