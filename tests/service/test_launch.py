"""Launch: what is checked before anything starts, what workers find in their environment, and what is left behind."""

import fcntl
import json
import os
import socket
from pathlib import Path

import mlflow
import pytest

from auditor.errors import ModelError, OptionError, RegistryError
from auditor.plugins import log_subject
from auditor.plugins.registry.location import resolve
from auditor.service import launch, library_internals
from auditor.service.launch import run_server, worker_environment
from auditor.service.settings import from_environment
from tests.free_port import free_port

pytest.importorskip("bentoml")
MODEL = "models:/digits/1"


@pytest.fixture
def environment():
    """Everything that the launch puts into the environment is taken out again."""
    before = dict(os.environ)
    yield os.environ
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def started(monkeypatch, environment):
    """Stands for BentoML: what it was started with, and what lay in the environment at that moment."""
    calls = []

    def serve(service, host, port):
        folder = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
        calls.append({"at": (service, host, port), "settings": from_environment(), "folder": folder})
        assert folder.is_dir()

    monkeypatch.setattr(library_internals, "serve", serve)
    monkeypatch.setattr(library_internals, "use_metrics_folder", lambda folder: calls.append(folder))
    monkeypatch.setattr(library_internals, "configure_logging", lambda: None)
    monkeypatch.setattr(library_internals, "check_workers_every", lambda seconds: None)
    return calls


def test_a_server_is_started_with_its_settings_and_leaves_no_folder(registry, started, tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("secret-key-of-sixteen\n")
    monkeypatch.chdir(tmp_path)  # workers run elsewhere, so they are given the whole path
    port = free_port()
    run_server(MODEL, host="localhost", port=port, max_batch=4, log_requests=False, api_keys=Path("keys"))
    folder, call = started
    assert call["at"] == (launch.SERVICE, "127.0.0.1", port)
    assert call["folder"] == folder
    assert not folder.exists()
    settings = call["settings"]
    assert (settings.model, settings.max_batch, settings.log_requests) == (MODEL, 4, False)
    assert settings.api_keys == tmp_path / "keys"


def test_a_link_to_the_keys_stays_a_link(registry, started, tmp_path):
    """Old code resolved it: after Kubernetes had moved its link the workers read the old keys on."""
    (tmp_path / "..2026_01").mkdir()
    (tmp_path / "..2026_01" / "keys").write_text("secret-key-of-sixteen\n")
    (tmp_path / "keys").symlink_to("..2026_01/keys")
    run_server(MODEL, host="127.0.0.1", port=free_port(), api_keys=tmp_path / "keys")
    assert started[1]["settings"].api_keys == tmp_path / "keys"


def lines_of(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    ("host", "options", "sentence"),
    [
        ("127.0.0.1", {}, "every user of this machine may ask"),
        ("0.0.0.0", {}, "everybody who can reach 0.0.0.0 may ask"),
        ("127.0.0.1", {"allowed_hosts": "*"}, "any Host is answered"),
        ("127.0.0.1", {"allowed_origins": "*"}, "pages of every site may ask"),
        ("127.0.0.1", {"allow_pickle": True}, "pickles are loaded"),
    ],
)
def test_what_is_open_is_said_loudly(registry, started, capsys, host, options, sentence):
    run_server(MODEL, host=host, port=free_port(), **options)
    (line,) = [line for line in lines_of(capsys.readouterr().out) if line["event"].startswith("OPEN: ")]
    assert line["level"] == "warning"
    assert sentence in line["event"]


def test_where_nothing_is_open_nothing_is_said(registry, started, tmp_path, capsys):
    (tmp_path / "keys").write_text("secret-key-of-sixteen\n")
    run_server(MODEL, host="0.0.0.0", port=free_port(), api_keys=tmp_path / "keys")
    assert "OPEN" not in capsys.readouterr().out


def test_folders_of_killed_servers_are_removed(registry, started, monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "_memory_folder", lambda: str(tmp_path))
    left, used, young = (tmp_path / f"auditor-metrics-{name}" for name in ("left", "used", "young"))
    for folder in (left, used, young):
        folder.mkdir()
    for folder in (left, used):
        os.utime(folder, (1, 1))
    descriptor = os.open(tmp_path / "auditor-metrics-used.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    alone = tmp_path / "auditor-metrics-alone.lock"  # its worker removed the folder
    alone.touch()
    for lock in (alone, tmp_path / "auditor-metrics-used.lock"):
        os.utime(lock, (1, 1))
    run_server(MODEL, host="127.0.0.1", port=free_port())
    os.close(descriptor)
    assert [folder.exists() for folder in (left, used, young)] == [False, True, True]
    assert [path.name for path in tmp_path.glob("*.lock")] == ["auditor-metrics-used.lock"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"oidc_issuer": "https://id.example"}, "give --oidc-audience too"),
        ({"oidc_issuer": "http://id.example", "oidc_audience": "a"}, "give an https address"),
    ],
)
def test_a_provider_that_cannot_work_is_refused(registry, started, options, sentence):
    with pytest.raises(OptionError, match=sentence):
        run_server(MODEL, host="127.0.0.1", port=free_port(), **options)


def test_the_folder_goes_also_when_the_server_fails(registry, started, monkeypatch):
    def fails(service, host, port):
        raise KeyboardInterrupt

    monkeypatch.setattr(library_internals, "serve", fails)
    with pytest.raises(KeyboardInterrupt):
        run_server(MODEL, host="127.0.0.1", port=free_port())
    assert not started[0].exists()


def test_nothing_starts_on_what_can_be_checked_at_once(registry, started, tmp_path):
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        port = occupied.getsockname()[1]
        with pytest.raises(OptionError, match=f"--port {port}: cannot listen on 127.0.0.1"):
            run_server(MODEL, host="127.0.0.1", port=port)
    port = free_port()
    for model, options, error, sentence in (
        (MODEL, {"max_batch": 0}, OptionError, "AUDITOR_MAX_BATCH: input should be greater than or equal to 1"),
        (MODEL, {"nosuch": 1}, OptionError, "there is no setting nosuch"),
        (MODEL, {"api_keys": tmp_path / "none"}, OptionError, "none"),
        ("models:/nosuch/1", {}, ModelError, "no registered model is called 'nosuch'"),
        (f"models:/{resolve(MODEL).model_id}", {}, ModelError, "serve a version of a registered model"),
    ):
        with pytest.raises(error, match=sentence):
            run_server(model, host="127.0.0.1", port=port, **options)
    assert started == []


def test_a_version_without_explainers_and_a_registry_out_of_reach_are_logged(registry, tiny, capsys):
    uri = log_subject(tiny, "unexplained", experiment="tests")
    launch._check_model(uri)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["level"] == "warning"
    assert f"nothing is attached to {uri}; only predictions are served" in line
    mlflow.set_tracking_uri("http://127.0.0.1:9")
    mlflow.set_registry_uri("http://127.0.0.1:9")
    launch._check_model(uri)  # the workers try again
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["level"] == "error"
    assert "MLflow cannot be reached; the server starts and tries again" in line


def test_a_database_that_is_missing_stays_missing(registry, tmp_path):
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/none.db")
    mlflow.set_registry_uri(f"sqlite:///{tmp_path}/none.db")
    with pytest.raises(RegistryError, match="there is no MLflow database"):
        launch._check_model(MODEL)


def test_what_the_user_has_set_stands_and_the_metrics_folder_does_not(registry, environment):
    environment["OMP_NUM_THREADS"] = "7"
    environment["PROMETHEUS_MULTIPROC_DIR"] = "/of/another/server"
    environment.pop("MKL_NUM_THREADS", None)
    variables = worker_environment(3, Path("/of/this/one"))
    assert "OMP_NUM_THREADS" not in variables
    assert variables["MKL_NUM_THREADS"] == "3"
    assert variables["PROMETHEUS_MULTIPROC_DIR"] == "/of/this/one"
    assert variables["MLFLOW_TRACKING_URI"] == registry
    assert variables["MLFLOW_REGISTRY_URI"] == registry


@pytest.mark.parametrize(("megabytes", "fits"), [(65, True), (64, False), (1, False)])
def test_metrics_lie_in_memory_where_there_is_room(monkeypatch, megabytes, fits):
    class Space:
        f_bavail, f_frsize = megabytes * 256, 4096

    monkeypatch.setattr(launch.os, "access", lambda path, mode: True)
    monkeypatch.setattr(launch.os, "statvfs", lambda path: Space)
    assert launch._memory_folder() == ("/dev/shm" if fits else None)
    monkeypatch.setattr(launch.os, "access", lambda path, mode: False)
    assert launch._memory_folder() is None
