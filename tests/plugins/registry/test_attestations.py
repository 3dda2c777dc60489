"""Attestations: who signed what, and what a signature of another thing, key or time is worth."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("model_signing")

from auditor import AuditConfig, Subject, fit, open_data, plugins
from auditor.errors import OptionError, SignatureError, TamperError
from auditor.plugins.registry import history, tags
from auditor.plugins.registry.attestations import (
    FOLDER,
    attestations_of,
    passed_by,
    sign_verdict,
    sign_version,
    signed_audit,
)
from auditor.plugins.registry.gates import run_gate
from auditor.plugins.registry.location import resolve, set_tag
from auditor.plugins.registry.verdicts import latest_verdict
from auditor.signing.keys import new_key, read_signing_key, read_trusted, revoke, signing_with

POLICY = '[limits."model/accuracy"]\nmin = 0.0\n'


@pytest.fixture(scope="module")
def world(store, tmp_path_factory):
    """models:/signed/1: the model signed by bob, explainer, audit and verdict by alice; a folder trusts both."""
    mlflow.set_tracking_uri(store)
    mlflow.set_registry_uri(store)
    folder = tmp_path_factory.mktemp("signed")
    keys = {name: read_signing_key(new_key(name, folder / "keys")[0]) for name in ("alice", "bob")}
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))
    uri = plugins.log_subject(Subject(net, input_shape=(1, 9, 11)), "signed", experiment="tests")
    images = np.random.default_rng(0).integers(0, 255, (200, 9, 11), dtype=np.uint8)
    np.savez(folder / "x.npz", images=images, labels=np.arange(200) % 3)
    data, subject = open_data(folder / "x.npz"), plugins.load_subject(uri)
    (folder / "policy.toml").write_text(POLICY)
    sign_version(uri, keys["bob"])
    with signing_with(keys["alice"].path):
        concepts = fit("nmf", subject, data, layer="1", rank=2, refits=1, max_eval=10)
        plugins.attach(concepts, uri, "concepts", subject=subject, attach_anyway=True)
        plugins.run_audit(uri, data, config=AuditConfig(images=20, layers=False, reliance=False))
        run_gate(uri, folder / "policy.toml", promote="champion")
    return uri, folder, keys


@pytest.fixture
def trusted(registry, world):
    return read_trusted(world[1] / "keys")


def test_everything_of_the_version_is_signed_and_said_by_whom(world, trusted):
    entries = attestations_of(world[0], trusted)
    assert [x.problem for x in entries if x.problem] == []
    assert {x.part: x.signer for x in entries} == {
        "model": "bob", "explainer concepts": "alice", "audit": "alice", "verdict": "alice"
    }  # fmt: skip
    assert {x.part: x.says for x in entries if x.part in ("audit", "verdict")}["verdict"] == "PASSED"
    lines = history.verify(history.entries("signed"), heads=history.heads_of("signed"), trusted=trusted)
    assert [x.problem for x in lines if x.problem] == []
    lines = history.shown(lines)
    assert [x.action for x in lines] == ["sign", "attach", "audit", "gate", "promote"]
    assert [x.signer for x in lines] == ["", *["alice"] * 4]


def test_model_signing_s_own_command_verifies_model_and_explainer(world, trusted, tmp_path):
    """Downloaded by plain MLflow, verified without our code."""
    uri, folder, keys = world
    version = resolve(uri)
    root = Path(mlflow.artifacts.download_artifacts(uri, dst_path=str(tmp_path / "m")))
    tag = tags.explainer_tag(version.tags, "concepts")
    model = tags.model_tag(version.tags).digest
    for path, digest, name in ((root, model, "bob"), (root / tag.location, tag.digest, "alice")):
        signature = root / FOLDER / digest[:16] / f"{keys[name].keyid[:16]}.sig"
        command = [sys.executable, "-m", "model_signing", "verify", "key", str(path), "--signature", str(signature)]
        command += ["--public_key", str(folder / "keys" / f"{name}.pub")]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr


def test_the_audit_is_a_test_result_and_the_verdict_a_verification_summary(world, trusted):
    uri = world[0]
    version, audit, subject = resolve(uri), plugins.latest_audit(uri), plugins.load_subject(uri)
    (signed,) = signed_audit(version, audit, trusted)
    assert signed.statement["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    assert signed.predicate["configuration"][0]["digest"] == {"sha256": audit.data["digest"]}
    assert signed.subjects["model/data/model.pt2"] == subject.files["data/model.pt2"]
    assert signed.subjects["explainer/concepts"] == tags.explainer_tag(version.tags, "concepts").digest
    attestation = passed_by(version, subject, trusted)
    assert (attestation.signer, attestation.digest) == ("alice", latest_verdict(version).digest)
    path = Path(version.root.removeprefix("file://")) / FOLDER / attestation.digest[:16]
    (file,) = path.iterdir()
    import base64

    statement = json.loads(base64.b64decode(json.loads(file.read_text())["payload"]))
    assert statement["predicateType"] == "https://slsa.dev/verification_summary/v1"
    names = {entry["name"] for entry in statement["subject"]}
    assert {"data", "policy", "subject", "audit.json", "verdict.json", "explainer/concepts", "model/MLmodel"} <= names
    assert statement["predicate"]["verificationResult"] == "PASSED"


def test_a_forged_pass_is_not_served_whatever_the_tags_say(world, trusted, tmp_path):
    """The hole: one forged file and one tag turned a fail into a pass."""
    uri, folder, keys = world
    version, before = resolve(uri), dict(resolve(uri).tags)
    subject = plugins.load_subject(uri)
    mallory = read_signing_key(new_key("mallory", tmp_path)[0])
    hard = tmp_path / "hard.toml"
    hard.write_text('[limits."model/accuracy"]\nmin = 1.01\n')
    try:
        with signing_with(keys["alice"].path):
            assert run_gate(uri, hard).verdict == "fail"
        with pytest.raises(SignatureError, match="is a fail"):
            passed_by(resolve(uri), subject, trusted)
        gate = run_gate(uri, folder / "policy.toml")  # a pass that nobody signed
        with pytest.raises(SignatureError, match="is not signed"):
            passed_by(resolve(uri), subject, trusted)
        sign_verdict(resolve(uri), latest_verdict(uri), mallory)
        with pytest.raises(SignatureError, match="does not trust"):
            passed_by(resolve(uri), subject, trusted)
        assert gate.verdict == "pass"
    finally:
        set_tag(version, tags.GATE, before[tags.GATE])


def test_a_verdict_of_what_was_there_before_does_not_count(world, trusted):
    uri = world[0]
    version, subject = resolve(uri), plugins.load_subject(uri)
    other = replace(version, tags={k: v for k, v in version.tags.items() if "concepts" not in k})
    with pytest.raises(SignatureError, match="is of another explainers"):
        passed_by(other, subject, trusted)
    subject.files = subject.files | {"MLmodel": "0" * 64}
    with pytest.raises(SignatureError, match="is of another model files"):
        passed_by(version, subject, trusted)
    bare = replace(version, tags={k: v for k, v in version.tags.items() if k != tags.GATE})
    with pytest.raises(SignatureError, match="has no verdict"):
        passed_by(bare, subject, trusted)


def test_a_signature_of_another_model_does_not_count(world, trusted, tiny):
    uri, _, keys = world
    other = resolve(plugins.log_subject(tiny, "signed-other", experiment="tests"))
    sign_version(other, keys["bob"])
    source = Path(other.root.removeprefix("file://")) / FOLDER / tags.model_tag(other.tags).digest[:16]
    version = resolve(uri)
    digest = tags.model_tag(version.tags).digest[:16]
    target = Path(version.root.removeprefix("file://")) / FOLDER / digest / f"{keys['bob'].keyid[:16]}.sig"
    content = target.read_bytes()
    try:
        target.write_bytes(next(source.iterdir()).read_bytes())
        (entry,) = [x for x in attestations_of(uri, trusted) if x.part == "model"]
        assert "the signature of bob does not verify" in entry.problem
    finally:
        target.write_bytes(content)


def test_revoked_keys_and_unsigned_parts_are_named(world, trusted, tmp_path, tiny):
    uri = world[0]
    for name in ("alice", "bob"):
        (tmp_path / f"{name}.pub").write_bytes((world[1] / "keys" / f"{name}.pub").read_bytes())
    revoke("alice", tmp_path)
    problems = {x.part: x.problem for x in attestations_of(uri, read_trusted(tmp_path))}
    assert problems["model"] == ""
    for part in ("explainer concepts", "audit", "verdict"):
        assert "alice was revoked" in problems[part]
    bare = plugins.log_subject(tiny, "unsigned", experiment="tests")
    (entry,) = attestations_of(bare, trusted)
    assert "no key of" in entry.problem


@pytest.mark.parametrize(
    ("signers", "verdict", "failed"),
    [
        ("", "pass", []),
        ('audit = ["alice"]\nmodel = ["bob"]\ndiffer = true', "pass", []),
        ('audit = ["bob"]', "fail", ["signer/audit"]),
        ('model = ["alice"]', "fail", ["signer/model"]),
    ],
)
def test_policies_say_who_must_have_signed(world, trusted, tmp_path, signers, verdict, failed):
    rules = tmp_path / "p.toml"
    rules.write_text(POLICY + (f"[signers]\n{signers}\n" if signers else ""))
    gate = run_gate(world[0], rules, trusted=trusted, require_signed_audit=True, store=False)
    assert (gate.verdict, gate.failed) == (verdict, failed)


def test_owner_and_auditor_can_be_made_to_differ(world, trusted, tmp_path):
    uri, _, keys = world
    sign_version(uri, keys["alice"])  # now alice has signed the model too
    rules = tmp_path / "p.toml"
    rules.write_text(POLICY + "[signers]\ndiffer = true\n")
    gate = run_gate(uri, rules, trusted=trusted, store=False)
    assert gate.failed == ["signer/differ"]
    with pytest.raises(OptionError, match="say whom you trust"):
        run_gate(uri, rules, store=False)


def test_an_unsigned_audit_fails_where_a_signed_one_is_required(world, trusted, tmp_path):
    new_key("carol", tmp_path)
    gate = run_gate(
        world[0], world[1] / "policy.toml", trusted=read_trusted(tmp_path), require_signed_audit=True, store=False
    )
    assert (gate.verdict, gate.failed) == ("fail", ["signer/audit"])
    assert "does not trust" in gate.checks[-1].reason or any("does not trust" in c.reason for c in gate.checks)


def test_an_edited_model_cannot_be_signed(world, trusted, tiny):
    uri = plugins.log_subject(tiny, "edited", experiment="tests")
    path = Path(resolve(uri).root.removeprefix("file://")) / "requirements.txt"
    path.write_text("evil\n")
    with pytest.raises(TamperError, match=r"requirements\.txt"):
        sign_version(uri, world[2]["bob"])
