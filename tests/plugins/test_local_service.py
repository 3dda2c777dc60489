"""Explanation services as background processes of this machine."""

import base64
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import mlflow
import pytest
from mlflow.deployments import get_deploy_client
from mlflow.exceptions import MlflowException

from auditor.errors import AuditError
from auditor.plugins import local_service
from auditor.plugins.local_service import LocalServices

STUB = (sys.executable, str(Path(__file__).parent / "small_service.py"))


@pytest.fixture
def here(tmp_path, monkeypatch, registry):
    """Deployments of this machine in a folder of the test's own, served by the stub; all are stopped at the end."""
    monkeypatch.setenv("AUDITOR_DEPLOYMENTS", str(tmp_path / "state"))
    monkeypatch.setattr(local_service, "SERVE", STUB)
    services = LocalServices()
    yield services
    for running in services.all():
        services.stop(running.name)


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def test_two_creates_at_once_start_one_service(here):
    results: list[object] = []

    def create():
        try:
            results.append(LocalServices().start("same", "models:/digits/1", {}))
        except AuditError as error:
            results.append(str(error))

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [x for x in results if isinstance(x, str)]
    assert len(refused) == 3
    assert all("there is one already" in x for x in refused)
    (running,) = here.all()
    with pytest.raises(AuditError, match="belongs to another deployment"):
        here.start("other", "models:/digits/1", {"port": running.port})


def test_a_service_that_died_is_stopped_and_its_process_id_is_nobodys(here):
    service = here.start("gone", "models:/digits/1", {})
    os.kill(service.pid, 9)
    os.waitpid(service.pid, 0)
    client = get_deploy_client("auditor")
    assert client.get_deployment("gone")["status"] == "stopped"
    with pytest.raises(MlflowException, match="its service has stopped"):
        client.explain("gone", [{"image": b64("a")}])
    # another process has got the remembered id: it is neither ours nor stopped
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        state = here.folder / "gone.json"
        state.write_text(json.dumps({**json.loads(state.read_text()), "pid": stranger.pid}))
        assert client.get_deployment("gone")["status"] == "stopped"
        again = here.start("gone", "models:/digits/1", {})
        assert again.runs
        client.delete_deployment("gone")
        assert stranger.poll() is None
    finally:
        stranger.communicate(b"\n")
    (here.folder / "odd.json").write_text("{")
    assert client.list_deployments() == []


def test_the_command_and_environment_of_a_service(here, monkeypatch):
    made = LocalServices(serve=["auditor", "serve"]).command(
        "models:/m/1", {"allow_pickle": "true", "max_batch": "4"}, "h", 5
    )
    assert made == [
        "auditor",
        "serve",
        "models:/m/1",
        "--host",
        "h",
        "--port",
        "5",
        "--allow-pickle",
        "--max-batch",
        "4",
    ]
    assert local_service.environment()["MLFLOW_TRACKING_URI"] == mlflow.get_tracking_uri()
