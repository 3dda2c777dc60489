"""The page of results: a function of the stored files, with every table and number in it."""

import json

from tests.benchmarks import envelope
from tests.benchmarks.results_page import PAGE, numbers_of, page, shown


def test_the_page_is_that_of_the_stored_files():
    assert PAGE.read_text() == page(), "docs/results.md is not that of tests/benchmarks/results: run make results"


def test_tables_of_the_envelope_are_shown_whole(tmp_path):
    rows = [{"row": "one | two", "published": 97.53, "reached": 96.1234567}, {"row": "three", "differs": "all\nof it"}]
    path = envelope.write(
        "trial", experiment="A trial", command="python trial.py", settings={"epochs": 3, "tuned": True}, seeds=[0, 1],
        tables=[envelope.table("First", rows, note="Said of it.")], folder=tmp_path,
    )  # fmt: skip
    text = page(tmp_path)
    assert "| row | published | reached | differs |" in text
    assert "| one \\| two | 97.53 | 96.12 |  |" in text  # a bar inside a cell, and no fourth cell
    assert "| three |  |  | all of it |" in text
    for said in ("A trial.", "    python trial.py", "epochs: 3; tuned: yes", "seeds 0, 1", "Said of it.", "### First"):
        assert said in text
    assert json.loads(path.read_text())["commit"] in text


def test_files_without_tables_are_shown_by_their_numbers(tmp_path):
    (tmp_path / "old.json").write_text(json.dumps({"a": {"b": 0.123456}, "many": [1, 2]}))
    (tmp_path / "long.json").write_text(json.dumps({str(i): i for i in range(70)}))
    (tmp_path / "rows.json").write_text(json.dumps([{"a": 1}]))
    text = page(tmp_path)
    assert "| `a / b` | 0.1235 |" in text
    assert "many" not in text
    assert "10 more are in the file" in text
    assert "## rows" in text


def test_numbers_and_cells():
    assert numbers_of({"a": {"b": 1, "c": "x"}, "d": None, "e": 2.5}) == [("a / b", 1.0), ("e", 2.5)]
    assert [shown(v) for v in (None, True, 0.00012346, [1, 2.0], "x")] == ["", "yes", "0.0001235", "1, 2", "x"]
