"""Attach, list, load, detach and verify against the embedded store and a real server, with faults."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch

from auditor import plugins
from auditor.errors import ModelError, OptionError, TamperError
from auditor.plugins.registry.location import resolve
from tests.plugins.registry.stored_files import files_of
from tests.plugins.server import mlflow_server

MODEL = "models:/digits/1"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with mlflow_server(tmp_path_factory.mktemp("server")) as address:
        yield address


@pytest.fixture(params=["embedded", "http"])
def any_store(request, trained, store):
    """Both kinds of store, with models:/digits/1 in each."""
    uri = store if request.param == "embedded" else request.getfixturevalue("server")
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    if not mlflow.MlflowClient().search_registered_models("name='digits'"):
        plugins.log_subject(trained[0], "digits")
    return uri


def test_the_whole_life_of_an_explainer(any_store, concepts, digits, images):
    subject = plugins.load_subject(MODEL)
    assert not subject.identity.differences(digits.identity)
    assert subject.describe() == digits.describe()
    torch.testing.assert_close(subject.logits(images), digits.logits(images))
    attached = plugins.attach(concepts, MODEL, "life", subject=subject)
    assert attached.location == f"explainers/life/{attached.digest[:12]}"
    assert "life" in [x.name for x in plugins.list_attached(MODEL) if x.verified]
    loaded = plugins.load(MODEL, "life")
    assert loaded.explain(subject, images)[0].to_json() == concepts.explain(digits, images)[0].to_json()
    logged = mlflow.MlflowClient().get_logged_model(resolve(MODEL).model_id)
    got = {m.key: m for m in logged.metrics}["explainer/life/fit/f_cls"]
    assert got.value == concepts.metrics["f_cls"]
    assert got.dataset_digest == concepts.data_digest_[:32]
    plugins.detach(MODEL, "life")
    assert "life" not in [x.name for x in plugins.list_attached(MODEL)]
    with pytest.raises(ModelError, match="no explainer called 'life'"):
        plugins.load(MODEL, "life")


def test_aliases_copies_and_old_style_versions(any_store, concepts, digits, tmp_path):
    client = mlflow.MlflowClient()
    client.set_registered_model_alias("digits", "champion", "1")
    copy = client.copy_model_version(MODEL, "copied")
    again = client.copy_model_version(f"models:/copied/{copy.version}", "copied-twice")
    with mlflow.start_run() as run:
        mlflow.pytorch.save_model(
            digits.module.eval(),
            tmp_path / "old",
            input_example=np.zeros((2, 1, 8, 8), "float32"),
            pip_requirements=["torch"],
        )
        mlflow.log_artifacts(str(tmp_path / "old"), "model")
    old = mlflow.register_model(f"runs:/{run.info.run_id}/model", "old")
    assert not old.source.startswith("models:/m-")
    uris = ["models:/digits@champion", "models:/digits/latest"]
    uris += [f"models:/{v.name}/{v.version}" for v in (copy, again, old)]
    for uri in uris:
        attached = plugins.attach(concepts, uri, "everywhere")
        assert plugins.load(uri, "everywhere").digest_ == attached.digest
        assert [x.problem for x in plugins.verify(uri) if x.name == "everywhere"] == [""]
    for uri in (f"runs:/{run.info.run_id}/model", f"models:/{resolve(MODEL).model_id}"):
        assert not plugins.load_subject(uri).identity.differences(digits.identity)
        with pytest.raises(ModelError, match="attached to a version of a registered model"):
            plugins.attach(concepts, uri)


def test_attach_replaces_a_half_written_or_spoilt_folder(registry, concepts):
    plugins.attach(concepts, MODEL, "tampered")
    path = files_of(MODEL, "tampered")[0]
    path.write_bytes(b"half")
    plugins.attach(concepts, MODEL, "tampered")
    assert [x.verified for x in plugins.verify(MODEL) if x.name == "tampered"] == [True]
    plugins.detach(MODEL, "tampered")


def test_an_explainer_of_another_model_is_not_attached(registry, concepts, tiny):
    plugins.log_subject(tiny, "tiny", experiment="tests")
    with pytest.raises(TamperError, match=r"attach wrong to models:/tiny/1: .* fit it to this model"):
        plugins.attach(concepts, "models:/tiny/1", "wrong")
    assert plugins.list_attached("models:/tiny/1") == []
    with pytest.raises(OptionError, match=r"explainer name '\.\./x'"):
        plugins.attach(concepts, MODEL, "../x")


ATTACH = """
import sys, mlflow
uri, folder, name = sys.argv[1:]
mlflow.set_tracking_uri(uri); mlflow.set_registry_uri(uri)
from auditor import plugins
from auditor.explainers.base import Explainer
subject = plugins.load_subject("models:/digits/1")
explainer = Explainer.load(folder, subject)
print("ready", flush=True)
sys.stdin.readline()
plugins.attach(explainer, "models:/digits/1", name, subject=subject)
print("done", flush=True)
"""


def start_attach(store, folder, name):
    return subprocess.Popen(
        [sys.executable, "-c", ATTACH, store, str(folder), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_two_attaches_at_once_both_whole_one_wins(registry, concepts, digits, digits_data, tmp_path):
    from auditor import fit

    other = fit("nmf", digits, digits_data, rank=3, refits=1, max_eval=20)
    folders = [tmp_path / "a", tmp_path / "b"]
    subject = plugins.load_subject(MODEL)
    digests = [concepts.save(folders[0], subject), other.save(folders[1], subject)]
    processes = [start_attach(registry, folder, "race") for folder in folders]
    for p in processes:
        assert p.stdout.readline() == "ready\n"
    for p in processes:
        p.stdin.write("go\n")
        p.stdin.flush()
    errors = [p.communicate(timeout=300)[1] for p in processes]
    assert [p.returncode for p in processes] == [0, 0], errors
    assert plugins.load(MODEL, "race").digest_ in digests
    root = Path(resolve(MODEL).root.removeprefix("file://")) / "explainers" / "race"
    assert {p.name for p in root.iterdir()} == {d[:12] for d in digests}
    from auditor.explainers.artifact import read_artifact

    assert {read_artifact(p).digest for p in root.iterdir()} == set(digests)
    plugins.detach(MODEL, "race")


@pytest.mark.slow
def test_killed_at_any_moment_readers_see_the_old_state_or_the_new(registry, concepts, digits, digits_data, tmp_path):
    from auditor import fit

    old = plugins.attach(concepts, MODEL, "killed").digest
    states = set()
    for i, delay in enumerate([0.0, 0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.5]):
        new = fit("nmf", digits, digits_data, rank=3, refits=1, max_eval=20, seed=i + 1, init="random")
        digest = new.save(tmp_path / str(i), plugins.load_subject(MODEL))
        process = start_attach(registry, tmp_path / str(i), "killed")
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("go\n")
        process.stdin.flush()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        attached = plugins.load(MODEL, "killed").digest_
        assert attached in (old, digest)
        assert [x.verified for x in plugins.verify(MODEL) if x.name == "killed"] == [True]
        states.add(attached == digest)
        old = attached
    assert False in states  # at least one was killed before its commit point
    plugins.detach(MODEL, "killed")
