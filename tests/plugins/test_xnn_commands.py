from PIL import Image

TABLE = ["xnn-table", "models:/digits/1", "--data", "sklearn:digits", "--target", "3", "--set", "max_epochs=3"]


def test_table_of_the_paper_from_the_command_line(cli):
    rows = cli.json(*TABLE, "--methods", "nn,1-heatmap", "--judge", "sklearn:digits", "--limit", "300")
    by = {row["method"]: row for row in rows}
    assert list(by) == ["nn", "1-heatmap"]
    assert by["nn"]["f_reg"] > 0
    assert by["1-heatmap"]["f_reg"] is None
    assert 0 < by["1-heatmap"]["locality"] < 2.78
    assert "unknown method 'shap'" in cli.fails(*TABLE, "--methods", "nn,shap")


def test_sheet_from_the_command_line(cli, heads, tmp_path):
    from auditor.plugins import attach, detach

    attach(heads, "models:/digits/1", name="sheet-heads")
    out = tmp_path / "sheet.png"
    sheet = ["xnn-sheet", "models:/digits/1", "sheet-heads", "--data", "sklearn:digits", "--images", "2"]
    assert cli(*sheet, "--out", str(out)).exit_code == 0
    with Image.open(out) as picture:
        assert picture.size == (12 + 144 * 7, 170 * 2 + 12)
    detach("models:/digits/1", "sheet-heads")
