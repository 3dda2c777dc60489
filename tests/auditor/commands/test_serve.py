"""``auditor serve``: what reaches the server; the server itself is tested in tests/service."""

import pytest

from auditor.service import launch


@pytest.fixture
def started(monkeypatch):
    """What ``run_server`` was called with."""
    calls = []
    monkeypatch.setattr(launch, "run_server", lambda model, **options: calls.append((model, options)))
    return calls


def test_options_reach_the_server_and_defaults_are_left_to_it(cli, started):
    assert cli("serve", "models:/digits/1").exit_code == 0
    assert cli("serve", "models:/digits/1", "--port", "3100", "--max-batch", "4", "--quiet").exit_code == 0
    (model, plain), (_, options) = started
    assert model == "models:/digits/1"
    assert plain == {"host": "127.0.0.1", "port": 3000}
    assert options == {"host": "127.0.0.1", "port": 3100, "max_batch": 4, "log_requests": False}


def test_values_out_of_range_never_start(cli, started):
    assert cli("serve", "models:/digits/1", "--port", "0").exit_code == 2
    assert cli("serve", "models:/digits/1", "--engine", "tensorrt").exit_code == 2
    assert not started


def test_bad_input_is_one_line(cli, tmp_path):
    pytest.importorskip("bentoml")
    assert "no registered model" in cli.fails("serve", "models:/nosuch/1", "--port", "20999")
    assert "keys.txt" in cli.fails("serve", "models:/digits/1", "--api-keys", tmp_path / "keys.txt")
    assert "MAX_BATCH: input should be greater" in cli.fails("serve", "models:/digits/1", "--max-batch", "0")
