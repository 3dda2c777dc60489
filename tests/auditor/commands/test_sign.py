"""``auditor sign`` and ``auditor verify --trusted``: who signed what, and every key that does not count."""

import pytest

pytest.importorskip("model_signing")

from auditor import plugins


@pytest.fixture(scope="module")
def model(store, tmp_path_factory):
    """A small registered model, and a folder with a key of alice."""
    import mlflow
    import torch
    from torch import nn

    from auditor import Subject
    from auditor.signing.keys import new_key

    mlflow.set_tracking_uri(store)
    mlflow.set_registry_uri(store)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 7 * 9, 3))
    folder = tmp_path_factory.mktemp("sign")
    new_key("alice", folder)
    return plugins.log_subject(Subject(net, input_shape=(1, 9, 11)), "to-sign", experiment="tests"), folder


def test_what_is_signed_verifies_by_those_who_trust_the_key(cli, registry, model, tmp_path):
    uri, keys = model
    unsigned = cli("verify", uri, "--trusted", keys)
    assert unsigned.exit_code == 1
    assert "model: no key of" in unsigned.stderr
    answer = cli.json("sign", uri, "--sign-key", keys / "alice.pem")
    assert (answer["signer"], answer["signed"]) == ("alice", ["model"])
    assert "alice" in cli("sign", uri, "--sign-key", keys / "alice.pem").stdout
    verified = cli.json("verify", uri, "--trusted", keys)
    assert verified["verified"]
    assert [(x["part"], x["signer"]) for x in verified["attestations"]] == [("model", "alice")]
    plain = cli("verify", uri)
    assert plain.exit_code == 0
    assert "Signatures were not looked at" in plain.stdout


def test_the_key_may_come_from_the_environment(cli, registry, model, monkeypatch):
    monkeypatch.setenv("AUDITOR_SIGN_KEY", str(model[1] / "alice.pem"))
    monkeypatch.setenv("AUDITOR_TRUSTED", str(model[1]))
    assert cli.json("sign", model[0])["signer"] == "alice"
    assert cli.json("verify", model[0])["attestations"][0]["signer"] == "alice"


def test_missing_unknown_and_revoked_keys_are_one_line_and_never_a_pass(cli, registry, model, tmp_path):
    uri, keys = model
    cli.json("sign", uri, "--sign-key", keys / "alice.pem")
    assert "give --sign-key KEY" in cli.fails("sign", uri)
    assert "cannot be read" in cli.fails("sign", uri, "--sign-key", tmp_path / "none.pem")
    assert "no private key" in cli.fails("sign", uri, "--sign-key", keys / "alice.pub")
    assert "no such folder" in cli.fails("verify", uri, "--trusted", tmp_path / "none")
    (tmp_path / "alice.pub").write_bytes((keys / "alice.pub").read_bytes())
    (tmp_path / "alice.toml").write_text("expires = 2020-01-01\n")
    expired = cli("verify", uri, "--trusted", tmp_path)
    assert (expired.exit_code, "alice expired on 2020-01-01" in expired.stderr) == (1, True)
    (tmp_path / "alice.toml").write_text("revoked = 2026-01-01\n")
    revoked = cli("verify", uri, "--trusted", tmp_path)
    assert (revoked.exit_code, "alice was revoked" in revoked.stderr) == (1, True)
