"""Attach, list, load, detach and verify against the embedded store and a real server, with faults."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
from torch import nn

from auditor import plugins
from auditor.errors import AuditError, ModelError, OptionError, RegistryError, TamperError
from auditor.plugins.registry.location import resolve
from auditor.plugins.registry.attachments import TAG
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
    assert subject.digest == digits.digest
    assert subject.describe() == digits.describe()
    torch.testing.assert_close(subject.logits(images), digits.logits(images))
    attached = plugins.attach(concepts, MODEL, "life", subject=subject)
    assert attached.location == f"explainers/life/{attached.digest[:12]}"
    assert "life" in [x.name for x in plugins.list_attached(MODEL) if x.verified]
    loaded = plugins.load(MODEL, "life")
    assert loaded.explain(subject, images)[0].to_json() == concepts.explain(digits, images)[0].to_json()
    logged = mlflow.MlflowClient().get_logged_model(resolve(MODEL).model_id)
    got = {m.key: m for m in logged.metrics}["explainer/life/f_cls"]
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
        assert plugins.load_subject(uri).digest == digits.digest
        with pytest.raises(ModelError, match="attached to a version of a registered model"):
            plugins.attach(concepts, uri)


def files_of(uri: str) -> list[Path]:
    root = Path(resolve(uri).root.removeprefix("file://"))
    return sorted(p for p in (root / "explainers" / "tampered").rglob("*") if p.is_file())


def test_tampering_in_the_artifact_store_is_found(registry, concepts):
    plugins.attach(concepts, MODEL, "tampered")
    files = files_of(MODEL)
    assert {p.name for p in files} == {"manifest.json", "tensors.safetensors"}
    for path in files:
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[len(flipped) // 2] ^= 1
        path.write_bytes(flipped)
        (problem,) = [x.problem for x in plugins.verify(MODEL) if x.name == "tampered"]
        assert path.name in problem
        with pytest.raises(TamperError, match=path.name):
            plugins.load(MODEL, "tampered")
        path.unlink()
        assert [x.verified for x in plugins.verify(MODEL) if x.name == "tampered"] == [False]
        path.write_bytes(content)
    assert [x.verified for x in plugins.verify(MODEL) if x.name == "tampered"] == [True]
    client = mlflow.MlflowClient()
    value = json.loads(client.get_model_version("digits", "1").tags[TAG + "tampered"])
    for bad in ({**value, "digest": "0" * 64}, {**value, "kind": "tree"}, {**value, "location": "explainers/none"}, {}):
        client.set_model_version_tag("digits", "1", TAG + "tampered", json.dumps(bad))
        assert [x.verified for x in plugins.verify(MODEL) if x.name == "tampered"] == [False]
        with pytest.raises(AuditError):
            plugins.load(MODEL, "tampered")
    client.delete_model_version_tag("digits", "1", TAG + "tampered")


def test_attach_mends_a_half_written_or_spoilt_folder(registry, concepts):
    plugins.attach(concepts, MODEL, "tampered")
    path = files_of(MODEL)[0]
    path.write_bytes(b"half")
    plugins.attach(concepts, MODEL, "tampered")
    assert [x.verified for x in plugins.verify(MODEL) if x.name == "tampered"] == [True]
    plugins.detach(MODEL, "tampered")


def test_subject_json_is_verified_and_described(registry, digits, tmp_path):
    plugins.log_subject(digits, "described", experiment="tests")
    uri = "models:/described/1"
    names = [f"digit {i}" for i in range(10)]
    plugins.describe(uri, class_names=names, mean=[0.1], std=[0.5])
    subject = plugins.load_subject(uri)
    assert subject.class_names == tuple(names)
    assert (subject.preprocessing.mean, subject.preprocessing.std) == ((0.1,), (0.5,))
    with pytest.raises(OptionError, match="10 outputs, got 2 class names"):
        plugins.describe(uri, class_names=["a", "b"])
    assert plugins.verify(uri) == []
    path = Path(resolve(uri).root.removeprefix("file://")) / "auditor" / "subject.json"
    path.write_text(path.read_text().replace("0.1", "0.2"))
    assert [x.name for x in plugins.verify(uri)] == ["subject.json"]


def test_an_explainer_of_another_model_is_not_attached(registry, concepts, tiny):
    plugins.log_subject(tiny, "tiny", experiment="tests")
    with pytest.raises(TamperError, match="fit it to this version"):
        plugins.attach(concepts, "models:/tiny/1", "wrong")
    assert plugins.list_attached("models:/tiny/1") == []
    with pytest.raises(OptionError, match=r"explainer name '\.\./x'"):
        plugins.attach(concepts, MODEL, "../x")


def test_pickled_modules_only_when_allowed(registry, digits, images):
    with mlflow.start_run():
        mlflow.pytorch.log_model(
            nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
            name="p",
            serialization_format="pickle",
            registered_model_name="pickled",
            input_example=np.zeros((2, 1, 8, 8), "float32"),
            pip_requirements=["torch"],
        )
    with pytest.raises(ModelError, match="stored as a pickle, which can run any code"):
        plugins.load_subject("models:/pickled/1")
    subject = plugins.load_subject("models:/pickled/1", allow_pickle=True)
    assert subject.logits(images).shape == (len(images), 10)


def test_a_batch_frozen_at_one_still_works(registry, digits, images, digits_data):
    """MLflow exports a batch of one as constant; the subject then runs images one by one."""
    from auditor import fit

    with mlflow.start_run():
        mlflow.pytorch.log_model(
            digits.module.eval(),
            name="m",
            input_example=np.zeros((1, 1, 8, 8), "float32"),
            registered_model_name="frozen",
            pip_requirements=["torch"],
        )
    subject = plugins.load_subject("models:/frozen/1")
    assert subject.max_batch == 1
    torch.testing.assert_close(subject.logits(images), digits.logits(images), rtol=1e-4, atol=1e-4)
    from auditor import open_data

    e = fit("nmf", subject, open_data("sklearn:digits", limit=40), rank=4, refits=1)
    assert all(x.gap() < 1e-6 for x in e.explain(subject, images))


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


def test_two_attaches_at_once_both_whole_one_wins(registry, concepts, digits, digits_data, tmp_path):
    from auditor import fit

    other = fit("nmf", digits, digits_data, rank=3, refits=1, max_eval=20)
    folders = [tmp_path / "a", tmp_path / "b"]
    digests = [concepts.save(folders[0]), other.save(folders[1])]
    processes = [start_attach(registry, folder, "race") for folder in folders]
    for p in processes:
        assert p.stdout.readline() == "ready\n"
    for p in processes:
        p.stdin.write("go\n")
        p.stdin.flush()
    told = [p.communicate(timeout=300)[1] for p in processes]
    assert [p.returncode for p in processes] == [0, 0], told
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
        digest = new.save(tmp_path / str(i))
        process = start_attach(registry, tmp_path / str(i), "killed")
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("go\n")
        process.stdin.flush()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        seen = plugins.load(MODEL, "killed").digest_
        assert seen in (old, digest)
        assert [x.verified for x in plugins.verify(MODEL) if x.name == "killed"] == [True]
        states.add(seen == digest)
        old = seen
    assert False in states  # at least one was killed before its commit point
    plugins.detach(MODEL, "killed")


FAMILIES = ["resnet18", "vgg11", "squeezenet1_1", "mobilenet_v3_small", "vit_b_16"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_torchvision_families_through_the_registry(registry, name, tmp_path):
    """Registered by plain MLflow, not by us: the same layers, activations and explanations as in memory."""
    import torchvision

    from auditor import Subject, fit, open_data

    size = 224 if name == "vit_b_16" else 64
    torch.manual_seed(0)
    net = getattr(torchvision.models, name)(weights=None, num_classes=7).eval()
    if name == "vit_b_16":
        nn.init.normal_(net.heads.head.weight, std=0.1)
    memory = Subject(net, input_shape=(3, size, size))
    with mlflow.start_run():
        mlflow.pytorch.log_model(
            net,
            name=name,
            input_example=np.zeros((2, 3, size, size), "float32"),
            registered_model_name=name,
            pip_requirements=["torch"],
        )
    subject = plugins.load_subject(f"models:/{name}/1")
    assert subject.digest == memory.digest
    layer = memory.default_layer()
    assert subject.default_layer() == layer
    x = torch.rand(2, 3, size, size)
    with torch.no_grad():
        (a, za), (b, zb) = memory.run(x, [layer]), subject.run(x, [layer])
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(za[layer], zb[layer], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(subject.forward_from(layer, zb[layer]), b, rtol=1e-4, atol=1e-4)
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "x.npz", images=rng.integers(0, 255, (12, size, size, 3), dtype=np.uint8))
    e = fit("nmf", subject, open_data(tmp_path / "x.npz"), rank=4, refits=1, batch_size=4, max_iter=40)
    assert all(item.gap() < 1e-4 for item in e.explain(subject, x))
    assert [i.gap() < 1e-4 for i in e.explain(memory, x)] == [True, True]


def test_a_model_for_any_size_needs_to_be_told_one(registry):
    """Exported with free height and width: the size is asked for once, then travels with the version."""
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).eval()
    with mlflow.start_run():
        mlflow.pytorch.log_model(
            net,
            name="m",
            signature=ModelSignature(inputs=Schema([TensorSpec(np.dtype("float32"), (-1, 1, -1, -1))])),
            input_example=np.zeros((2, 1, 20, 24), "float32"),
            registered_model_name="anysize",
            pip_requirements=["torch"],
        )
    with pytest.raises(ModelError, match="its input size is not recorded; say it with `auditor describe"):
        plugins.load_subject("models:/anysize/1")
    plugins.describe("models:/anysize/1", size=[16, 18])
    assert plugins.load_subject("models:/anysize/1").input_shape == (1, 16, 18)


def test_a_tag_that_many_set_at_once_is_set(registry):
    """Writers that all find a tag missing all insert it; the store refuses all but one, and they must try again."""
    import threading

    from auditor.plugins.registry.location import set_tag

    place = resolve(MODEL, registered=True)
    failures: list[BaseException] = []
    for round_ in range(5):
        barrier = threading.Barrier(6)

        def write(who: int, key: str = f"race.{round_}", barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            try:
                set_tag(place, key, str(who))
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=write, args=(who,)) for who in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert resolve(MODEL).tags[f"race.{round_}"] in set("012345")
    assert not failures
