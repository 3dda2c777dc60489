"""``auditor export``."""

import json

import pytest

from auditor.plugins.registry.location import resolve


def test_the_graph_is_stored_and_close_to_torch(cli, scratch):
    pytest.importorskip("onnxscript")
    answer = cli.json("export", scratch)
    tag = json.loads(resolve(scratch).tags["auditor.onnx"])
    assert tag["digest"] == answer["digest"]
    assert 0 < answer["worst_difference"] < 1e-3
    shown = cli("export", scratch).stdout
    assert "MB, within" in shown
    assert "of torch; auditor serve now uses it." in shown


def test_bad_input_is_one_line(cli):
    assert "no registered model" in cli.fails("export", "models:/nosuch/1")
