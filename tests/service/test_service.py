"""The BentoML service: how a worker process starts, answers before it is ready, and stops."""

import json
import logging
import warnings

import pytest
import torch

pytest.importorskip("bentoml")

from auditor.service import service
from auditor.service.problems import Problem


@pytest.fixture
def process():
    """A worker settles in as if the process were its own; here it is put back as it was."""
    logger, multipart = logging.getLogger("auditor"), logging.getLogger("python_multipart")
    before = logger.handlers[:], logger.level, logger.propagate, multipart.level
    threads, filters = torch.get_num_threads(), warnings.filters[:]
    yield logger
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])
    multipart.setLevel(before[3])
    torch.set_num_threads(threads)
    warnings.filters[:] = filters


def test_before_a_worker_is_made_callers_are_asked_to_come_back(monkeypatch):
    monkeypatch.setattr(service, "_serving", [])
    with pytest.raises(Problem, match="the server is starting") as problem:
        service._handlers()
    assert (problem.value.status, problem.value.code, problem.value.retry_after_s) == (503, "not_ready", 2)


def test_the_worker_made_last_answers(monkeypatch):
    made = type("Made", (), {"routes": object()})()
    monkeypatch.setattr(service, "_serving", [made])
    assert service._handlers() is made.routes


def test_a_worker_writes_json_lines_and_takes_its_share_of_the_cores(process, capsys):
    service._settle_in(2)
    assert torch.get_num_threads() == 2
    logging.getLogger("auditor.service.worker").info("model is warm")
    logging.getLogger("auditor.service.worker").debug("not for operators")
    logging.getLogger("python_multipart").warning("a broken form")
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["level"] == "info"
    assert "model is warm" in json.loads(line).values()
    service._settle_in(1)
    assert len(process.handlers) == 1  # settling in again does not write every line twice


def test_bentoml_does_not_time_out_before_we_do_and_keeps_no_metrics_by_path():
    config = service.AuditorService.config
    assert config["traffic"]["timeout"] == 3600
    assert config["metrics"]["enabled"] is False
    assert config["logging"]["access"]["enabled"] is False


def test_while_the_application_runs_it_is_ready_and_answers(http):
    assert http.get("/readyz").status_code == 200
    assert http.get("/model").json()["name"] == "served"
    assert len(service._serving) == 1
    assert service._handlers() is service._serving[0].routes
