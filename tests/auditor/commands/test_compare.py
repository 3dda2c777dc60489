"""``auditor compare``."""

import pytest
from torch import nn

from auditor import Subject
from auditor.plugins import log_subject

MODEL = "models:/digits/1"
FLAGS = ("--data", "sklearn:digits", "--limit", "120", "--rank", "4", "--refits", "5")


def test_a_version_does_not_drift_from_itself(cli, tmp_path):
    answer = cli.json("compare", MODEL, MODEL, *FLAGS, "--out", tmp_path / "drift.png")
    assert answer["drift"] is False
    assert answer["similarity"] >= answer["null_low"]
    assert len(answer["matched"]) == 4
    assert answer["cka"]["features"] == pytest.approx(1)
    assert (tmp_path / "drift.png").stat().st_size > 10_000


def test_at_the_terminal(cli):
    shown = cli("compare", MODEL, MODEL, *FLAGS).stdout
    assert shown.startswith("no drift: similarity ")
    assert "concept A" in shown
    assert "CKA" in shown


def test_bad_input_is_one_line(cli, registry):
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    other = log_subject(Subject(net, input_shape=(1, 8, 8)), "other-classes", experiment="tests")
    assert "different class lists (10 and 3 classes" in cli.fails("compare", MODEL, other, *FLAGS)
    assert "no such file or folder" in cli.fails("compare", MODEL, MODEL, "--data", "nowhere")
    assert "no layer 'nosuch'" in cli.fails("compare", MODEL, MODEL, *FLAGS, "--layer", "nosuch")
