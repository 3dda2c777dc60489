"""``auditor layers``."""

import re

from torch import nn

from auditor import Subject
from auditor.plugins import log_subject

MODEL = "models:/digits/1"


def test_the_suggested_layer_is_marked(cli):
    rows = cli.json("layers", MODEL)
    assert [row["name"] for row in rows if row["suggested"]] == ["features"]
    assert all(row["explainable"] for row in rows)
    said = cli("layers", MODEL).output
    assert re.search(r"features +Sequential +64 +4 x 4 +non-negative +\d+% +0\.\d\d +[\d.]+% +\* suggested", said)
    assert "measured on random images, which say nothing of faithfulness: give --data" in said


def test_candidates_are_measured_on_the_data(cli):
    rows = cli.json("layers", MODEL, "--data", "sklearn:digits")
    measured = {row["name"]: row["measured"] for row in rows if row.get("measured")}
    assert "features" in measured
    assert all(0 <= m["faithfulness"] <= 1 and 0 <= m["cost"] < 1 for m in measured.values())
    best = max(measured, key=lambda name: measured[name]["score"])
    assert [row["name"] for row in rows if row["suggested"]] == [best]
    assert "measured on images of sklearn:digits" in cli("layers", MODEL, "--data", "sklearn:digits").output


class SideBranch(nn.Module):
    """What goes past ``left`` in ``right`` makes neither of them a layer that can be explained."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Conv2d(1, 2, 3), nn.Conv2d(1, 2, 3)
        self.relu, self.fc = nn.ReLU(), nn.Linear(2 * 36, 3)

    def forward(self, x):
        return self.fc(self.relu(self.left(x) + self.right(x)).flatten(1))


def test_all_shows_also_those_that_cannot_be_explained_and_why(cli):
    model = log_subject(Subject(SideBranch(), input_shape=(1, 8, 8)), "branches", experiment="tests")
    some, every = cli.json("layers", model), cli.json("layers", model, "--all")
    assert [row for row in every if row["explainable"]] == some
    refused = {row["name"]: row["reason"] for row in every if not row["explainable"]}
    assert {"left", "right"} <= set(refused)
    assert all(refused.values())
    assert refused["left"] in cli("layers", model, "--all").stdout
    assert refused["left"] not in cli("layers", model).stdout


def test_bad_input_is_one_line(cli):
    assert "no registered model" in cli.fails("layers", "models:/nosuch/1")
    assert "no such file or folder" in cli.fails("layers", MODEL, "--data", "nosuch/")
