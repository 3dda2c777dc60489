"""A command resolves its model URI once: an alias that moves right after that changes nothing under way."""

import json

import mlflow
import pytest
import torch
from PIL import Image

from auditor import Subject, fit, open_data
from auditor.plugins import attach, load_subject, log_subject, run_gate
from auditor.plugins.registry.location import resolve
from auditor.service.settings import Settings
from tests.conftest import Tiny

ALIAS = "models:/moving@champion"
POLICY = '[limits]\n"model/accuracy" = {min = 0.0}\n'


def tiny_subject(seed: int) -> Subject:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Subject(Tiny(), input_shape=(1, 13, 17), class_names=["a", "b", "c"])


@pytest.fixture(scope="module")
def versions(store, tmp_path_factory):
    """Two versions of a model, each with concepts of its own; returns the data they were fitted on."""
    import numpy as np

    mlflow.set_tracking_uri(store)
    mlflow.set_registry_uri(store)
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("pinned") / "tiny.npz"
    np.savez(path, images=rng.integers(0, 256, (120, 13, 17), dtype=np.uint8), labels=rng.integers(0, 3, 120))
    for seed in (1, 2):
        uri = log_subject(tiny_subject(seed), "moving", experiment="tests")
        subject = load_subject(uri)
        concepts = fit("nmf", subject, open_data(str(path)), layer="relu", rank=2, refits=1, max_eval=10)
        attach(concepts, uri, "concepts", subject=subject)
    return path


@pytest.fixture
def moving(registry, versions, monkeypatch):
    """The alias points to version 1 until it has been resolved once, then to version 2; gives the resolutions."""
    client = mlflow.MlflowClient()
    client.set_registered_model_alias("moving", "champion", "1")
    resolutions = []
    plain = mlflow.MlflowClient.get_model_version_by_alias

    def resolved(self, name, alias):
        version = plain(self, name, alias)
        if name == "moving":
            resolutions.append(str(version.version))
            self.set_registered_model_alias("moving", "champion", "2")
        return version

    monkeypatch.setattr(mlflow.MlflowClient, "get_model_version_by_alias", resolved)
    return resolutions


def digests() -> tuple[str, str]:
    one, two = (load_subject(f"models:/moving/{k}").digest for k in (1, 2))
    assert one != two
    return one, two


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "grey.png"
    Image.new("L", (17, 13), 90).save(path)
    return path


def test_explain_answers_from_the_first_version(cli, moving, picture):
    answer = cli.json("explain", ALIAS, picture)
    assert answer["model"]["version"] == "1"
    assert answer["model"]["digest"] == digests()[0]
    assert moving == ["1"]


def test_fit_attaches_to_the_version_it_fitted(cli, moving, versions):
    document = cli.json(
        "fit", "nmf", ALIAS, "--data", versions, "--name", "late", "--layer", "relu", "--set", "rank=2", "--set",
        "refits=1", "--set", "max_eval=10",
    )  # fmt: skip
    assert moving == ["1"]
    tags = [mlflow.MlflowClient().get_model_version("moving", k).tags for k in ("1", "2")]
    assert json.loads(tags[0]["auditor.explainer.late"])["digest"] == document["digest"]
    assert "auditor.explainer.late" not in tags[1]
    assert cli("detach", "models:/moving/1", "late").exit_code == 0


def test_label_names_a_concept_of_the_first_version(cli, moving):
    document = cli.json("label", ALIAS, "concepts", "1", "a corner")
    assert moving == ["1"]
    first, second = (cli.json("list", f"models:/moving/{k}")[0] for k in (1, 2))
    assert first["digest"] == document["digest"]
    assert second["digest"] != document["digest"]


@pytest.mark.parametrize("command", ["list", "verify", "concepts", "layers", "detach"])
def test_what_only_reads_or_removes_stays_with_the_first_version(cli, moving, versions, tmp_path, command):
    if command == "detach":
        subject = load_subject("models:/moving/1")
        extra = fit("nmf", subject, open_data(str(versions)), layer="relu", rank=2, refits=1, max_eval=10)
        attach(extra, "models:/moving/1", "extra", subject=subject, attach_anyway=True)
    more = {"concepts": ("concepts", "--out", tmp_path / "page.png"), "detach": ("extra",)}.get(command, ())
    result = cli(command, ALIAS, *more)
    assert result.exit_code == 0, result.output
    assert moving == ["1"]


def test_audit_and_gate_are_of_the_first_version_and_promote_it(cli, moving, versions, tmp_path):
    """Hole: the gate resolved the alias again after the verdict, and promoted a version it had not judged."""
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY)
    document = cli.json("audit", ALIAS, "--data", versions, "--images", "20", "--no-store")
    assert (document["model"]["digest"], document["model"]["uri"]) == (digests()[0], ALIAS)
    assert moving == ["1"]
    client = mlflow.MlflowClient()
    client.set_registered_model_alias("moving", "champion", "1")
    gate = run_gate(ALIAS, policy, data=str(versions), promote="released")
    assert (gate.verdict, gate.model, gate.promoted) == ("pass", "models:/moving/1", "released")
    assert client.get_registered_model("moving").aliases["released"] in (1, "1")
    assert "auditor.gate" in client.get_model_version("moving", "1").tags
    assert "auditor.gate" not in client.get_model_version("moving", "2").tags
    assert moving == ["1", "1"]


def test_a_baseline_is_resolved_once_too(moving, versions, tmp_path):
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY)
    gate = run_gate("models:/moving/2", policy, baseline=ALIAS, data=str(versions), store=False)
    assert (gate.model, gate.baseline) == ("models:/moving/2", ALIAS)
    assert moving == ["1"]


def test_a_server_loads_one_version(moving):
    pytest.importorskip("bentoml")
    from auditor.service.served_version import load_version

    served = load_version(Settings(model=ALIAS, engine="torch"))
    assert (served.version, served.subject.digest) == ("1", digests()[0])
    assert moving == ["1"]


def test_a_resolved_version_stands_for_itself(moving):
    version = resolve(ALIAS)
    assert resolve(version, registered=True) is version
    assert load_subject(version).version == "1"
    assert moving == ["1"]
