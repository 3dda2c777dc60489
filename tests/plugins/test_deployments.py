"""mlflow deployments with the target auditor: the client, its command line, and services as background processes."""

import base64
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner
from mlflow.deployments import get_deploy_client
from mlflow.exceptions import MlflowException

from auditor.errors import AuditError
from auditor.plugins import local_service
from auditor.plugins.local_service import LocalServices, start_time
from auditor.plugins.service_http import records
from tests.plugins.small_service import small_service

STUB = (sys.executable, str(Path(__file__).parent / "small_service.py"))


@pytest.fixture(scope="module")
def service():
    with small_service() as running:
        yield running


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


def command(*args: str):
    """Run ``mlflow deployments`` in this process."""
    from mlflow.deployments.cli import commands

    return CliRunner().invoke(commands, [str(a) for a in args])


# input


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"columns": ["image"], "index": [0], "data": [["x"]]}, "split or wrapped table"),
        ({"dataframe_split": {"columns": ["image"], "data": [["x"]]}}, "split or wrapped table"),
        ({"instances": [{"image": "x"}]}, "split or wrapped table"),
        ([{"picture": "x"}], "want a column image, got picture"),
        ([{"image": "x", "imgae": 1}], "record 0: unknown imgae"),
        ([{"image": "no/such/file.png"}], "neither a file here nor base64"),
        ([{"image": 7}], "must be a path or base64, got int"),
        ([{"image": None}], "must be a path or base64"),
        ([], "no image in it"),
    ],
)
def test_other_input_is_refused_in_one_sentence(inputs, message, tmp_path, service):
    file = tmp_path / "in.json"
    file.write_text(json.dumps(inputs))
    frame = pd.read_json(file)
    with pytest.raises(AuditError, match=message) as caught:
        records(frame if len(frame.columns) else inputs)
    assert "\n" not in str(caught.value)
    if inputs:
        done = command("explain", "-t", f"auditor:/{service.address}", "--name", "digits", "-I", file)
        assert done.exit_code == 2
        assert done.stderr.strip().splitlines() == [f"Error: {caught.value}"]


# a service elsewhere


def test_explain_and_predict_by_command_line(service, tmp_path):
    file = tmp_path / "in.json"
    file.write_text(json.dumps([{"image": b64(text), "target": 3} for text in ("a", "bb", "ccc")]))
    for target in (f"auditor:/{service.address}", f"auditor:{service.address.removeprefix('http:')}"):
        done = command("explain", "-t", target, "--name", "digits", "-I", file)
        assert done.exit_code == 0, done.output
        assert [a["prediction"]["label"] for a in json.loads(done.stdout)] == ["a", "bb", "ccc"]
        assert [a["target"] for a in json.loads(done.stdout)] == [3, 3, 3]
    out = tmp_path / "out.json"
    assert command("explain", "-t", target, "--endpoint", "digits", "-I", file, "-O", out).exit_code == 0
    assert len(json.loads(out.read_text())) == 3
    done = command("predict", "-t", target, "--name", "digits", "-I", file)
    assert [p["index"] for p in json.loads(done.stdout)["predictions"]] == [1, 2, 3]
    assert command("predict", "-t", target, "--name", "digits", "-I", file, "-O", out).exit_code == 0
    assert len(json.loads(out.read_text())["predictions"]) == 3
    assert "'name': 'digits'" in command("list", "-t", target).stdout
    assert "name: digits" in command("get", "-t", target, "--name", "digits").stdout
    assert "auditor:/http://host:3000" in command("help", "-t", "auditor").stdout


def test_what_goes_wrong_elsewhere_is_one_mlflow_error(service):
    client = get_deploy_client(f"auditor:/{service.address}")
    with pytest.raises(MlflowException, match="the image cannot be read"):
        client.explain("digits", [{"image": b64("bad")}])
    with pytest.raises(MlflowException, match=r"deployment birds: the service at .* serves 'digits'") as caught:
        client.predict("birds", [{"image": b64("a")}])
    assert caught.value.error_code == "RESOURCE_DOES_NOT_EXIST"
    for verb in (lambda: client.create_deployment("a", "models:/a/1"), lambda: client.delete_deployment("a")):
        with pytest.raises(MlflowException, match="runs elsewhere"):
            verb()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(MlflowException, match="cannot be reached"):
        get_deploy_client(f"auditor://127.0.0.1:{port}").list_deployments()
    for target in ("auditor:/ftp://a", "auditor:/http://", "auditor://h:x"):
        with pytest.raises(MlflowException, match="want auditor, auditor:/http://host:port"):
            get_deploy_client(target)


# services of this machine


def test_the_life_of_a_deployment_by_command_line(here, tmp_path):
    file = tmp_path / "in.json"
    file.write_text(json.dumps([{"image": b64("seven")}]))
    done = command("create", "-t", "auditor", "--name", "d1", "-m", "models:/digits/1", "-C", "threads=2")
    assert done.exit_code == 0, done.output
    assert "pytorch deployment d1 is created" in done.stdout
    (service,) = here.all()
    assert Path(f"/proc/{service.pid}").exists() or start_time(service.pid)
    assert "'status': 'ready'" in command("list", "-t", "auditor").stdout
    assert "model_uri: models:/digits/1" in command("get", "-t", "auditor", "--name", "d1").stdout
    done = command("explain", "-t", "auditor", "--name", "d1", "-I", file)
    assert json.loads(done.stdout)[0]["prediction"]["label"] == "seven"
    done = command("update", "-t", "auditor", "--name", "d1", "-m", "models:/digits/2")
    assert "Deployment d1 is updated" in done.stdout
    (again,) = here.all()
    assert (again.model_uri, again.port, again.config["threads"]) == ("models:/digits/2", service.port, "2")
    assert not service.runs
    assert command("delete", "-t", "auditor", "--name", "d1").exit_code == 0
    assert not again.runs
    assert here.all() == []
    assert command("delete", "-t", "auditor", "--name", "d1").exit_code == 0  # deleting twice is no error
    done = command("get", "-t", "auditor", "--name", "d1")
    assert done.stderr.strip() == "Error: deployment d1: there is none of this name; there are: none."


def test_what_cannot_start_leaves_nothing_behind(here):
    client = get_deploy_client("auditor")
    with pytest.raises(MlflowException, match=r"ended at once: model models:/broken/1: it is broken\."):
        client.create_deployment("b", "models:/broken/1")
    with pytest.raises(MlflowException, match="not ready within 1 s"):
        client.create_deployment("s", "models:/slow/1", config={"start_timeout_s": "1"})
    assert client.list_deployments() == []
    assert list(here.folder.glob("*.json")) == []
    for config, message in (
        ({"prot": 1}, "config: unknown prot"),
        ({"port": "99999"}, "port must be 1 to 65535"),
        ({"port": ""}, "port must have a value"),
        ({"engine": "--workers=9"}, "engine must have a value"),
        ({"start_timeout_s": "soon"}, "must be seconds above 0"),
        ({"host": "203.0.113.7"}, "no address of this machine"),
    ):
        with pytest.raises(MlflowException, match=message):
            client.create_deployment("c", "models:/digits/1", config=config)
    with pytest.raises(MlflowException, match="only pytorch models are served"):
        client.create_deployment("c", "models:/digits/1", flavor="sklearn")
    with pytest.raises(MlflowException, match=r"name '\.\./up': want 1 to 64"):
        client.create_deployment("../up", "models:/digits/1")


@pytest.mark.slow
def test_the_real_service_from_create_to_delete(tmp_path, monkeypatch, registry, concepts):
    """The whole path with the real ``auditor serve`` in a real ``mlflow deployments`` process."""
    from PIL import Image

    from auditor import plugins

    plugins.attach(concepts, "models:/digits/1", "deployed")
    picture = tmp_path / "seven.png"
    Image.new("L", (8, 8), 128).save(picture)
    file = tmp_path / "in.json"
    file.write_text(json.dumps([{"image": str(picture), "heatmaps": "none"}, {"image": b64(""), "target": 3}][:1] * 3))
    variables = {**os.environ, "AUDITOR_DEPLOYMENTS": str(tmp_path / "state"), "MLFLOW_TRACKING_URI": registry}

    def deployments(*args: str) -> subprocess.CompletedProcess[str]:
        full = [sys.executable, "-m", "mlflow", "deployments", *args]
        return subprocess.run(full, env=variables, capture_output=True, text=True, timeout=900, check=False)

    try:
        done = deployments(
            "create", "-t", "auditor", "--name", "d", "-m", "models:/digits/1", "-C", "start_timeout_s=600"
        )
        assert done.returncode == 0, done.stderr[-2000:]
        done = deployments("explain", "-t", "auditor", "--name", "d", "-I", str(file))
        assert done.returncode == 0, done.stderr[-2000:]
        answers = json.loads(done.stdout)
        assert len(answers) == 3
        assert "deployed" in [e["name"] for e in answers[0]["explanations"]]
        assert answers[0]["model"]["name"] == "digits"
        done = deployments("predict", "-t", "auditor", "--name", "d", "-I", str(file))
        assert json.loads(done.stdout)["predictions"][0]["index"] == answers[0]["prediction"]["index"]
        (tmp_path / "bad.json").write_text(json.dumps([{"image": b64("not an image")}]))
        done = deployments("explain", "-t", "auditor", "--name", "d", "-I", str(tmp_path / "bad.json"))
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        done = deployments("create", "-t", "auditor", "--name", "e", "-m", "models:/nosuch/1")
        assert done.returncode == 2
        assert "no registered model is called 'nosuch'" in done.stderr
        assert "Traceback" not in done.stderr
    finally:
        done = deployments("delete", "-t", "auditor", "--name", "d")
    assert done.returncode == 0
    assert LocalServices(tmp_path / "state").all() == []
    plugins.detach("models:/digits/1", "deployed")
