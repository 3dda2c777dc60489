"""A worker goes when its supervisor has gone."""

import os
import subprocess
import sys
import threading

import pytest

from auditor.service import supervisor
from auditor.service.supervisor import VARIABLE, follow_supervisor, is_alive


@pytest.fixture
def other():
    """A process that waits until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("has_descriptors", [True, False])
def test_the_end_of_the_supervisor_is_noticed(other, monkeypatch, has_descriptors):
    monkeypatch.setenv(VARIABLE, str(other.pid))
    monkeypatch.setattr(supervisor, "LOOK_EVERY_S", 0.01)
    if not has_descriptors:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    stopped = threading.Event()
    thread = follow_supervisor(stopped.set)
    assert thread is not None
    assert not stopped.wait(0.2)
    other.kill()
    other.wait()
    assert stopped.wait(60)


def test_one_that_is_gone_already_is_noticed_at_once(other, monkeypatch):
    other.kill()
    other.wait()
    monkeypatch.setenv(VARIABLE, str(other.pid))
    stopped = threading.Event()
    follow_supervisor(stopped.set)
    assert stopped.wait(60)
    assert not is_alive(other.pid)
    assert is_alive(os.getpid())


@pytest.mark.parametrize("value", ["", "x", None])
def test_without_a_supervisor_there_is_nothing_to_follow(monkeypatch, value):
    if value is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, value)
    assert follow_supervisor() is None


def test_the_process_ends_and_leaves_no_metrics(other, tmp_path):
    folder = tmp_path / "auditor-metrics-x"
    folder.mkdir()
    lock = tmp_path / "auditor-metrics-x.lock"
    lock.touch()
    code = (
        "import time; from auditor.service.supervisor import follow_supervisor as follow; follow(); "
        "print(1, flush=True); time.sleep(600)"
    )
    environment = {**os.environ, VARIABLE: str(other.pid), "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    worker = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    assert worker.stdout.readline() == b"1\n"
    other.kill()
    other.wait()
    assert worker.wait(60) != 0
    worker.stdout.close()
    assert not folder.exists()
    assert not lock.exists()
