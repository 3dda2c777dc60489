"""``--device``: where the model of a command runs."""

import pytest
import torch

COMMANDS = ("fit", "explain", "explain-all", "audit", "compare", "gate")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_runs_models_much_has_it(cli, command):
    assert "AUDITOR_DEVICE" in cli(command, "--help").stdout


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("gpu", "error: device gpu: want cpu, cuda, cuda:1 or auto."), ("cuda", "torch finds no GPU here; take --device")],
)
def test_a_device_that_is_not_there_stops_the_command_before_any_work(cli, seven, name, sentence, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sentence in cli.fails("explain", "models:/none/1", seven, "--device", name)
