"""Audits and gates in the registry, by the commands: storage, staleness, exit codes, promotion."""

import json
from pathlib import Path
from xml.etree import ElementTree

import mlflow
import numpy as np
import pytest

from auditor import Subject, plugins
from auditor.errors import TamperError
from auditor.plugins.pytest_plugin import audit_gate  # noqa: F401
from auditor.plugins.registry.audits import store_audit
from auditor.plugins.registry.location import resolve
from auditor.plugins.registry.model_record import ModelRecord
from auditor.plugins.registry.staleness import stale_reason
from auditor.plugins.registry.tags import AUDIT, GATE

DATA, IMAGES = "sklearn:digits?split=test", "20"


@pytest.fixture
def version(registry, gated):
    """models:/gated/1 with concepts, audited once; its URI and the files the audit wrote."""
    return gated


@pytest.fixture
def policy(cli, version, tmp_path):
    """A policy drafted from the version's audit."""
    result = cli("policy", "init", version[0])
    assert result.exit_code == 0, result.output
    (tmp_path / "policy.toml").write_text(result.stdout)
    return tmp_path / "policy.toml"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_an_audit_is_stored_with_the_version_and_its_metrics_in_mlflow(registry, version):
    uri, folder = version
    version = resolve(uri)
    tag = json.loads(version.tags[AUDIT])
    assert set(tag) >= {"location", "digest", "time", "data", "data_digest", "seed", "n_metrics", "explainers"}
    names = {Path(e.path).name for e in version.repository().list_artifacts(tag["location"])}
    assert names == {"audit.json", "report.html", "model_card.json"}
    audit = plugins.latest_audit(uri)
    assert audit.digest == tag["digest"]
    assert audit.sealed() == (folder / "a.json").read_bytes()
    assert (folder / "r.html").read_text().startswith("<!doctype html>")
    logged = mlflow.MlflowClient().get_logged_model(version.model_id)
    mine = {m.key: m for m in logged.metrics if m.dataset_digest == audit.data["digest"][:32]}
    assert mine["model/accuracy"].value == pytest.approx(audit.metrics["model/accuracy"].value)
    assert "explainer/concepts/f_cls" in mine
    assert audit.model["uri"] == uri


def test_a_version_without_an_audit_has_none(registry):
    assert plugins.latest_audit("models:/digits/1") is None


def test_loading_the_model_does_not_fetch_its_audits(registry, version, monkeypatch):
    from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

    requests = []
    real = LocalArtifactRepository.download_artifacts

    def seen(self, artifact_path, dst_path=None):
        requests.append(artifact_path)
        return real(self, artifact_path, dst_path)

    monkeypatch.setattr(LocalArtifactRepository, "download_artifacts", seen)
    plugins.load_subject(version[0])
    assert requests
    assert not [path for path in requests if path.startswith(("audits", "explainers"))]


def test_the_gate_passes_its_own_version_and_only_then_promotes(cli, version, policy, tmp_path):
    uri, _ = version
    hard = write(tmp_path / "hard.toml", '[limits."model/accuracy"]\nmin = 1.01\n')
    client = mlflow.MlflowClient()
    result = cli("gate", uri, "--policy", hard, "--promote", "best", "--markdown", tmp_path / "m.md")
    assert result.exit_code == 1
    assert "FAIL" in result.stdout
    assert "**FAIL**" in (tmp_path / "m.md").read_text()
    assert "best" not in client.get_registered_model("gated").aliases
    answer = cli.json("gate", uri, "--policy", policy, "--promote", "best", "--junit", tmp_path / "out" / "j.xml")
    assert answer["verdict"] == "pass"
    assert all(c["verdict"] == "pass" for c in answer["checks"])
    assert ElementTree.parse(tmp_path / "out" / "j.xml").getroot().get("failures") == "0"
    assert client.get_registered_model("gated").aliases["best"] in (1, "1")  # MLflow gives either
    tag = json.loads(resolve(uri).tags[GATE])
    assert (tag["verdict"], tag["failed"], tag["checks"]) == ("pass", [], len(answer["checks"]))
    assert set(tag) >= {"verdict", "time", "policy", "policy_digest", "baseline", "audit_digest"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it sets no limits, so it would pass anything"),
        ('[limits."model/acuracy"]\nmin = 0.1', "near names are model/accuracy"),
        ('[limits."model/accuracy"]\nmni = 0.1', "is not known here"),
        ('[limits."model/accuracy"]\nmax_absolute_loss = 0.1', "name one with --baseline"),
    ],
)
def test_a_policy_that_cannot_be_judged_is_no_pass(cli, version, tmp_path, text, message):
    assert message in cli.fails("gate", version[0], "--policy", write(tmp_path / "p.toml", text))


def test_an_audit_file_edited_by_hand_is_no_pass(cli, version, policy, tmp_path):
    uri, folder = version
    good = folder / "a.json"
    assert cli("gate", uri, "--policy", policy, "--audit", good).exit_code == 0
    edited = good.read_bytes().replace(b'"status": "failed"', b'"status": "passed"').replace(b"0.9", b"1.0", 1)
    (tmp_path / "edited.json").write_bytes(edited)
    assert "checksum does not match" in cli.fails("gate", uri, "--policy", policy, "--audit", tmp_path / "edited.json")
    assert "cannot be read" in cli.fails("gate", uri, "--policy", policy, "--audit", tmp_path / "none.json")


def test_a_stored_audit_edited_in_the_artifact_store_is_no_pass(cli, version, policy):
    uri, _ = version
    version = resolve(uri)
    location = json.loads(version.tags[AUDIT])["location"]
    file = Path(version.root.removeprefix("file://")) / location / "audit.json"
    original = file.read_bytes()
    try:
        file.write_bytes(original.replace(b'"seed": 0', b'"seed": 7'))
        with pytest.raises(TamperError, match="is not what was stored"):
            plugins.latest_audit(uri)
        assert "is not what was stored" in cli.fails("gate", uri, "--policy", policy)
    finally:
        file.write_bytes(original)


def test_an_audit_is_stale_when_anything_it_describes_has_changed(registry, version, digits_data, tiny):
    uri, _ = version
    audit, subject = plugins.latest_audit(uri), plugins.load_subject(uri)
    model = ModelRecord.of(subject)
    now = {name: info["digest"] for name, info in audit.explainers.items()}
    assert stale_reason(audit, model, now, None) == ""
    assert "other data" in stale_reason(audit, model, now, digits_data)
    assert "attached has changed since (concepts)" in stale_reason(audit, model, {"concepts": "0" * 64}, None)
    assert "attached has changed since (concepts, more)" in stale_reason(audit, model, {"more": "0" * 64}, None)
    assert "other weights" in stale_reason(audit, ModelRecord.of(tiny), now, None)
    renamed = Subject(subject.module, input_shape=(1, 8, 8), class_names=[f"d{i}" for i in range(10)])
    assert "class names" in stale_reason(audit, ModelRecord.of(renamed), now, None)


def test_a_tampered_explainer_never_passes(cli, version, policy):
    uri, _ = version
    version, audit = resolve(uri), plugins.latest_audit(uri)
    location = json.loads(version.tags["auditor.explainer.concepts"])["location"]
    file = Path(version.root.removeprefix("file://")) / location / "tensors.safetensors"
    original = file.read_bytes()
    try:
        file.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
        answer = cli("gate", uri, "--policy", policy, "--images", IMAGES, "--json")
        assert answer.exit_code == 1
        checks = {c["metric"]: c for c in json.loads(answer.stdout)["checks"]}
        assert checks["explainer/concepts/verified"]["verdict"] == "fail"
        assert "not what was attached" in checks["explainer/concepts/verified"]["reason"]
        assert checks["explainer/concepts/f_cls"]["verdict"] == "fail"
    finally:
        file.write_bytes(original)
        store_audit(audit, version)  # the gate had stored an audit of the tampered state


def test_a_baseline_is_compared_with_and_one_of_another_task_refused(cli, version, tmp_path, digits, tiny):
    uri, _ = version
    text = '[limits."model/accuracy"]\nmax_absolute_loss = 0.0\n'
    same = plugins.log_subject(digits, "gated", experiment="tests")  # the same weights, registered anew
    answer = cli.json("gate", uri, "--policy", write(tmp_path / "p.toml", text), "--baseline", same)
    (check,) = answer["checks"]
    assert check["baseline"] == check["value"]
    other = plugins.log_subject(tiny, "tiny-task", experiment="tests")
    message = cli.fails("gate", uri, "--policy", tmp_path / "p.toml", "--baseline", other)
    assert "is of another task" in message


def test_data_that_cannot_be_judged_on(cli, version, policy, tmp_path):
    uri, _ = version
    np.savez(tmp_path / "few.npz", images=np.zeros((5, 8, 8), np.uint8), labels=np.zeros(5, np.int64))
    assert "too few for an interval" in cli.fails("gate", uri, "--policy", policy, "--data", tmp_path / "few.npz")
    np.savez(tmp_path / "odd.npz", images=np.zeros((30, 8, 8), np.uint8), labels=np.full(30, 12))
    assert "labels must be 0 to 9" in cli.fails("audit", uri, "--data", tmp_path / "odd.npz")


def test_without_an_audit_and_without_data_there_is_no_verdict(cli, tmp_path):
    rules = write(tmp_path / "p.toml", '[limits."model/accuracy"]\nmin = 0.5')
    assert "has no stored audit" in cli.fails("gate", "models:/digits/1", "--policy", rules)
    assert "has no stored audit" in cli.fails("policy", "init", "models:/digits/1")
