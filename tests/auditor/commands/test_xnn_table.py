"""``auditor xnn-table``."""

TABLE = ["xnn-table", "models:/digits/1", "--data", "sklearn:digits", "--target", "3", "--set", "max_epochs=3"]
QUICK = ["--methods", "nn,1-heatmap", "--limit", "300"]


def test_a_row_per_method(cli):
    rows = {row["method"]: row for row in cli.json(*TABLE, *QUICK, "--test", "sklearn:digits")}
    assert list(rows) == ["nn", "1-heatmap"]
    assert rows["nn"]["f_reg"] > 0
    assert rows["1-heatmap"]["f_reg"] is None
    assert 0 < rows["1-heatmap"]["locality"] < 2.78  # ln 16


def test_at_the_terminal(cli):
    lines = cli(*TABLE, *QUICK).stdout.splitlines()
    assert lines[0].startswith("method")
    assert lines[2].split()[0] == "1-heatmap"
    assert "-" in lines[2].split()  # what one heatmap does not have
    assert lines[-1].startswith("locality: entropy over a 4 x 4 grid")


def test_bad_input_is_one_line(cli):
    assert "unknown method 'shap'" in cli.fails(*TABLE, "--methods", "nn,shap")
    assert "--boxes needs --parts" in cli.fails(*TABLE, "--boxes", "boxes.csv")
    assert "unknown option 'nosuch'" in cli.fails(*TABLE, "--set", "nosuch=1")
