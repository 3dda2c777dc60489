"""Location: URIs resolved to versions, and what is said when something is missing or out of reach."""

import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import mlflow
import pytest
import requests
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INTERNAL_ERROR, RESOURCE_DOES_NOT_EXIST

from auditor import plugins
from auditor.errors import DataError, ModelError, RegistryError, TamperError
from auditor.plugins.registry import location
from auditor.plugins.registry.location import ModelVersion, check_server, mlflow_errors, resolve, set_tag

MODEL = "models:/digits/1"


def test_missing_things_are_said(registry):
    for uri, sentence in {
        "models:/nosuch/1": "no registered model is called 'nosuch'; there are: ",
        "models:/digits/999": "'digits' has no version '999'; there are: 1",
        "models:/digits@nosuch": "'digits' has no alias 'nosuch'",
        "models:/m-nosuch": "no logged model 'm-nosuch'",
        "runs:/nosuch/model": "there is no run 'nosuch'",
        "nosuch": "not an MLflow model URI",
        "models:/digits": "want models:/name/3",
    }.items():
        with pytest.raises(ModelError, match=sentence):
            plugins.load_subject(uri)


def test_unreachable_server_is_said_within_seconds(registry):
    mlflow.set_tracking_uri("http://127.0.0.1:9")
    mlflow.set_registry_uri("http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(RegistryError, match=r"no MLflow server answers at http://127\.0\.0\.1:9 within 5 s"):
        plugins.list_attached(MODEL)
    assert time.monotonic() - start < 10


def test_a_missing_database_is_not_created(tmp_path, registry):
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/none.db")
    mlflow.set_registry_uri(f"sqlite:///{tmp_path}/none.db")
    with pytest.raises(RegistryError, match="there is no MLflow database at"):
        plugins.list_attached(MODEL)
    assert list(tmp_path.iterdir()) == []


def test_a_tag_that_many_set_at_once_is_set(registry):
    """Writers that all find a tag missing all insert it; the store refuses all but one, and they must try again."""
    version = resolve(MODEL, registered=True)
    failures: list[BaseException] = []
    for round_ in range(5):
        barrier = threading.Barrier(6)

        def write(who: int, key: str = f"race.{round_}", barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            try:
                set_tag(version, key, str(who))
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=write, args=(who,)) for who in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert resolve(MODEL).tags[f"race.{round_}"] in set("012345")
    assert not failures


def test_every_way_to_name_a_version_leads_to_the_same_folder(registry, tmp_path):
    client = mlflow.MlflowClient()
    client.set_registered_model_alias("digits", "named", "1")
    copy = client.copy_model_version(MODEL, "copied-here")
    again = client.copy_model_version(f"models:/copied-here/{copy.version}", "copied-there")
    one = resolve(MODEL)
    assert one.label == "models:/digits/1"
    for uri in ("models:/digits@named", "models:/digits/latest"):
        version = resolve(uri, registered=True)
        assert (version.label, version.root, version.model_id) == (one.label, one.root, one.model_id)
        assert version.uri == uri
    for copied in (copy, again):
        version = resolve(f"models:/{copied.name}/{copied.version}")
        assert (version.name, version.root, version.model_id) == (copied.name, one.root, one.model_id)
    logged = resolve(f"models:/{one.model_id}")
    assert (logged.label, logged.root, logged.name) == (f"models:/{one.model_id}", one.root, "")
    folder = resolve(str(tmp_path))
    assert (folder.root, folder.name, folder.model_id) == (str(tmp_path), "", None)
    for uri in (logged.uri, str(tmp_path), logged):
        with pytest.raises(ModelError, match="attached to a version of a registered model"):
            resolve(uri, registered=True)


def test_copies_that_lead_in_a_circle_end():
    copy = SimpleNamespace(name="a", version="1", source="models:/a/1", run_id=None)
    client = SimpleNamespace(get_model_version=lambda name, number: copy)
    with pytest.raises(ModelError, match=f"its chain of copies is longer than {location.MAX_CHAIN}"):
        location._follow(client, copy)


@pytest.mark.parametrize(
    ("error", "wanted", "sentence"),
    [
        (MlflowException("HTTPPool: Max retries exceeded"), RegistryError, "here: the MLflow server did not answer"),
        (MlflowException("GET failed with exception"), RegistryError, "here: the MLflow server did not answer"),
        (requests.ConnectTimeout("late"), RegistryError, "here: the MLflow server did not answer (late)."),
        (ConnectionResetError("gone"), RegistryError, "here: the MLflow server did not answer (gone)."),
        (MlflowException("no\n  such  thing"), ModelError, "here: MLflow says: no such thing"),
        (DataError("ours."), DataError, "ours."),
        (KeyError("a bug"), KeyError, "'a bug'"),
    ],
)
def test_errors_of_mlflow_are_one_sentence_and_others_pass(error, wanted, sentence):
    with pytest.raises(wanted) as raised, mlflow_errors("here"):
        raise error
    assert type(raised.value) is wanted
    assert str(raised.value).startswith(sentence)


def test_patience_that_the_user_has_set_stands(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "9")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT", raising=False)
    with mlflow_errors("here"):
        assert location.os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "9"
        assert location.os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "30"


@pytest.mark.parametrize("status", [200, 401, 500])
def test_a_server_that_answers_anything_is_there(registry, status):
    requests = []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        mlflow.set_tracking_uri(f"http://127.0.0.1:{server.server_port}/")
        check_server()
        server.shutdown()
    assert requests == ["/health"]


def test_a_tag_is_tried_again_only_where_that_can_help(registry, monkeypatch):
    version, tried, waits = resolve(MODEL), [], []
    monkeypatch.setattr(location.time, "sleep", waits.append)

    def fails(code, times):
        def write(self, *args):
            tried.append(args)
            if len(tried) <= times:
                raise MlflowException("refused", error_code=code)

        return write

    monkeypatch.setattr(mlflow.MlflowClient, "set_model_version_tag", fails(INTERNAL_ERROR, 3))
    set_tag(version, "key", "value")
    assert tried == [("digits", "1", "key", "value")] * 4
    assert waits == [0.05, 0.1, 0.2]
    tried.clear()
    monkeypatch.setattr(mlflow.MlflowClient, "set_model_version_tag", fails(INTERNAL_ERROR, 99))
    with pytest.raises(MlflowException, match="refused"):
        set_tag(version, "key", "value")
    assert len(tried) == location.TAG_ATTEMPTS
    tried.clear()
    monkeypatch.setattr(mlflow.MlflowClient, "set_model_version_tag", fails(RESOURCE_DOES_NOT_EXIST, 99))
    with pytest.raises(MlflowException, match="refused"):
        set_tag(version, "key", "value")
    assert len(tried) == 1


def test_a_folder_is_downloaded_whole_or_said_to_be_missing(tmp_path):
    (tmp_path / "store" / "explainers" / "c").mkdir(parents=True)
    (tmp_path / "store" / "explainers" / "c" / "manifest.json").write_text("{}")
    (tmp_path / "store" / "explainers" / "c" / "tensors").write_bytes(b"1")
    (tmp_path / "store" / "MLmodel").write_text("not asked for")
    version = ModelVersion("models:/m@a", "m", "3", (tmp_path / "store").as_uri(), None, "0", {})
    (tmp_path / "here").mkdir()
    folder = version.download("explainers/c", tmp_path / "here")
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "tensors"]
    assert [p.name for p in (tmp_path / "here").iterdir()] == ["explainers"]
    with pytest.raises(TamperError, match=r"explainers/d is missing from the artifact store of models:/m/3; attach it"):
        version.download("explainers/d", tmp_path / "here")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ModuleNotFoundError("no", name="boto3"), r"needs boto3, .* pip install 'mlflow-auditor\[s3\]'"),
        (ModuleNotFoundError("no", name="azure.core"), r"needs azure, .* pip install azure"),
    ],
)
def test_a_store_whose_package_is_missing_says_what_to_install(error, sentence):
    with pytest.raises(RegistryError, match=sentence), mlflow_errors("model m"):
        raise error


def test_a_missing_module_of_ours_is_nothing_to_install():
    with pytest.raises(ModuleNotFoundError, match="no such module"), mlflow_errors("model m"):
        raise ModuleNotFoundError("no such module", name="auditor.nowhere")


def test_what_the_library_of_a_store_raises_is_one_sentence():
    exceptions = pytest.importorskip("botocore.exceptions")
    error = exceptions.EndpointConnectionError(endpoint_url="http://127.0.0.1:9")
    sentence = "model m: its store failed: EndpointConnectionError: Could not connect"
    with pytest.raises(RegistryError, match=sentence), mlflow_errors("model m"):
        raise error
    with pytest.raises(ZeroDivisionError), mlflow_errors("model m"):  # ours to repair, not the store's
        raise ZeroDivisionError
