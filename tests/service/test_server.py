"""One real server: ``auditor serve`` as a process, asked over the network, its alias moved under it."""

import json
import os
import pickle  # noqa: TID251, to be refused
import signal
import subprocess
import sys
import time
import urllib.request
from urllib.error import HTTPError, URLError

import mlflow
import pytest

from auditor.plugins import attach, load_subject, log_subject
from tests.free_port import free_port

pytestmark = pytest.mark.slow


def post(address: str, path: str, content: bytes, media: str):
    request = urllib.request.Request(address + path, content, {"content-type": media})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except HTTPError as error:
        return error.code, json.load(error)


@pytest.fixture
def server(registry, trained, concepts, tmp_path):
    for _ in range(2):
        uri = log_subject(trained[0], "live", experiment="tests")
        attach(concepts, uri, "concepts", subject=load_subject(uri))
    concepts.name = ""
    mlflow.MlflowClient().set_registered_model_alias("live", "champion", "1")
    port = free_port()
    code = "from auditor.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", "models:/live@champion", "--port", str(port), "--poll-s", "0.5"]
    environment = {**os.environ, "MLFLOW_TRACKING_URI": registry, "MLFLOW_REGISTRY_URI": registry}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{address}/readyz", timeout=5).read()
                break
            except (URLError, OSError):
                assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
                time.sleep(0.5)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def test_a_real_server_answers_refuses_pickles_and_follows_its_alias(server, pngs):
    path = "/explain?heatmaps=none&stability=off"
    status, answer = post(server, path, pngs[0], "image/png")
    assert status == 200
    assert answer["model"]["version"] == "1"
    assert answer["explanations"][0]["concepts"]
    for media in ("application/octet-stream", "application/vnd.bentoml+pickle"):
        status, body = post(server, "/explain", pickle.dumps({"a": 1}), media)
        assert status in (400, 415)
        assert set(body["error"]) == {"code", "message", "request_id"}
    with urllib.request.urlopen(f"{server}/metrics", timeout=30) as response:
        assert b"\nauditor_explain_duration_seconds_bucket" in response.read()
    mlflow.MlflowClient().set_registered_model_alias("live", "champion", "2")
    calls = ["1"]
    for _ in range(600):
        status, answer = post(server, path, pngs[0], "image/png")
        assert status == 200  # not one request fails while the model is swapped
        calls.append(answer["model"]["version"])
        if calls[-1] == "2":
            break
        time.sleep(0.2)
    assert calls[-1] == "2"
