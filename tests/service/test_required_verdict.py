"""``--require-verdict``: only what a trusted key has passed is served, while it counts, and answers say so."""

from dataclasses import replace

import mlflow
import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("model_signing")

from auditor import AuditConfig, Subject, fit, open_data, plugins
from auditor.errors import SignatureError
from auditor.explainers.answer import Question, answer
from auditor.plugins.registry.location import resolve
from auditor.service import worker as worker_module
from auditor.service.problems import Problem
from auditor.service.request_cost import Pace
from auditor.service.served_version import load_version
from auditor.service.settings import Settings
from auditor.service.types import ModelAnswer, Options
from auditor.service.worker import Worker
from auditor.signing.keys import new_key, revoke, signing_with


@pytest.fixture(scope="module")
def passed(store, tmp_path_factory):
    """models:/required/1, whose verdict alice has signed; its URI, and a folder with her keys."""
    mlflow.set_tracking_uri(store)
    mlflow.set_registry_uri(store)
    folder = tmp_path_factory.mktemp("required")
    private, _ = new_key("alice", folder / "keys")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))
    uri = plugins.log_subject(Subject(net, input_shape=(1, 9, 11)), "required", experiment="tests")
    images = np.random.default_rng(0).integers(0, 255, (200, 9, 11), dtype=np.uint8)
    np.savez(folder / "x.npz", images=images, labels=np.arange(200) % 3)
    (folder / "policy.toml").write_text('[limits."model/accuracy"]\nmin = 0.0\n')
    data, subject = open_data(folder / "x.npz"), plugins.load_subject(uri)
    concepts = fit("nmf", subject, data, layer="1", rank=2, refits=1, max_eval=10)
    plugins.attach(concepts, uri, "concepts", subject=subject, attach_anyway=True)
    plugins.run_audit(uri, data, config=AuditConfig(images=20, layers=False, reliance=False))
    with signing_with(private):
        plugins.run_gate(uri, folder / "policy.toml")
    return uri, folder


def settings_of(uri, keys) -> Settings:
    return Settings(model=uri, engine="torch", require_verdict=keys)


def test_answers_and_the_model_name_the_attestation(registry, passed):
    uri, folder = passed
    settings = settings_of(uri, folder / "keys")
    served = load_version(settings)
    question = served.question(torch.rand(1, 9, 11), Options(heatmaps="none", stability="off"), settings)
    said = answer(served.explained, [question])[0].to_json()["model"]
    assert isinstance(question, Question)
    assert (said["attestation"]["signer"], said["attestation"]["says"]) == ("alice", "PASSED")
    assert ModelAnswer.model_validate(said).attestation.digest == said["attestation"]["digest"]
    unasked = load_version(Settings(model=uri, engine="torch"))
    assert unasked.explained.identity["attestation"] is None


def test_what_nobody_trusted_has_passed_is_not_served(registry, passed, tmp_path, tiny):
    uri, folder = passed
    new_key("mallory", tmp_path)
    with pytest.raises(SignatureError, match="does not trust"):
        load_version(settings_of(uri, tmp_path))
    bare = plugins.log_subject(tiny, "required-bare", experiment="tests")
    with pytest.raises(SignatureError, match="has no verdict"):
        load_version(settings_of(bare, folder / "keys"))
    with pytest.raises(SignatureError, match="versions of registered models"):
        load_version(settings_of(f"models:/{resolve(uri).model_id}", folder / "keys"))


def test_a_version_whose_key_is_revoked_is_no_longer_served(registry, passed, tmp_path, monkeypatch):
    monkeypatch.setattr(worker_module, "warm_up", lambda loaded, settings: Pace())
    uri, folder = passed
    (tmp_path / "alice.pub").write_bytes((folder / "keys" / "alice.pub").read_bytes())
    worker = Worker(settings_of(uri, tmp_path))
    worker.served = worker._look()
    assert worker.current().explained.identity["attestation"]["signer"] == "alice"
    assert worker._look() is None
    assert worker.served is not None
    revoke("alice", tmp_path)
    assert worker._look() is None
    with pytest.raises(Problem, match="failed verification") as problem:
        worker.current()
    assert problem.value.status == 503


@pytest.fixture
def serving(registry, passed, tmp_path, monkeypatch):
    """A worker that serves what alice passed, and its folder of keys, where bob is trusted too."""
    monkeypatch.setattr(worker_module, "warm_up", lambda loaded, settings: Pace())
    uri, folder = passed
    (tmp_path / "alice.pub").write_bytes((folder / "keys" / "alice.pub").read_bytes())
    new_key("bob", tmp_path)
    worker = Worker(settings_of(uri, tmp_path))
    worker.served = worker._look()
    assert worker.served is not None
    yield worker, tmp_path
    mlflow.set_tracking_uri(registry)
    mlflow.set_registry_uri(registry)


def test_a_revoked_key_ends_serving_also_while_mlflow_is_out_of_reach(serving):
    worker, keys = serving
    mlflow.set_tracking_uri("http://127.0.0.1:9")
    mlflow.set_registry_uri("http://127.0.0.1:9")
    revoke("bob", keys)  # has nothing to do with what is served
    assert worker._look() is None
    assert worker.served is not None
    revoke("alice", keys)
    assert worker._look() is None
    with pytest.raises(Problem, match="nobody who is trusted vouches for the model now"):
        worker.current()


def test_keys_that_cannot_be_read_count_for_the_grace_period_and_no_longer(serving):
    """The hole: a server whose folder of keys was gone served on without end."""
    worker, keys = serving
    keys.rename(keys.with_name("elsewhere"))
    assert worker._look() is None
    assert worker.served is not None
    worker._trusted_at -= worker.settings.keys_grace_s + 1
    assert worker._look() is None
    assert worker.served is None
    keys.with_name("elsewhere").rename(keys)
    assert worker._look().explained.attestation["signer"] == "alice"


def test_a_revoked_key_ends_serving_also_when_the_alias_points_to_what_is_not_served(serving, tiny):
    worker, keys = serving
    bare = plugins.log_subject(tiny, "required-bare-too", experiment="tests")
    worker.settings = settings_of(bare, keys)
    assert worker._look() is None
    assert worker.served is not None  # a version that nobody passed does not take the place of one that was
    revoke("alice", keys)
    assert worker._look() is None
    assert worker.served is None


def test_a_version_whose_attestation_has_expired_is_looked_at_again(registry, passed, monkeypatch):
    monkeypatch.setattr(worker_module, "warm_up", lambda loaded, settings: Pace())
    uri, folder = passed
    worker = Worker(settings_of(uri, folder / "keys"))
    worker.served = worker._look()
    assert worker._look() is None
    said = {**worker.served.explained.attestation, "expires": "2020-01-01T00:00:00+00:00"}
    explained = replace(worker.served.explained, attestation=said)
    worker.served = replace(worker.served, explained=explained)
    assert worker._look().explained.attestation["expires"] == ""  # alice's key never does
