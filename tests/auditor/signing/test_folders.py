"""Signed folders: verified by us and by OpenSSF model-signing's own command."""

import subprocess
import sys

import pytest

pytest.importorskip("model_signing")

from auditor.errors import SignatureError
from auditor.signing.folders import sign_folder, verify_folder
from auditor.signing.keys import new_key, read_signing_key, read_trusted, revoke


@pytest.fixture
def signed(tmp_path):
    """A folder, its bundle, and the keys."""
    folder = tmp_path / "model"
    (folder / "data").mkdir(parents=True)
    (folder / "MLmodel").write_text("flavors: {}")
    (folder / "data" / "model.pt2").write_bytes(b"weights")
    private, _ = new_key("alice", tmp_path / "keys")
    return folder, sign_folder(folder, read_signing_key(private), ["auditor"]), tmp_path / "keys"


def test_a_bundle_verifies_the_files_and_names_what_changed(signed):
    folder, bundle, keys = signed
    (key,) = read_trusted(keys).keys
    verify_folder(folder, bundle, key, "model")
    (folder / "auditor").mkdir()
    (folder / "auditor" / "more.json").write_text("{}")
    verify_folder(folder, bundle, key, "model")  # what is attached later is not part of the model
    (folder / "data" / "model.pt2").write_bytes(b"others")
    with pytest.raises(SignatureError, match=r"does not verify \(it is of another data/model\.pt2\)\.$"):
        verify_folder(folder, bundle, key, "model")
    with pytest.raises(SignatureError, match="does not verify"):
        verify_folder(folder, b"{}", key, "model")


def test_another_key_and_a_revoked_one_do_not_verify(signed, tmp_path):
    folder, bundle, keys = signed
    new_key("bob", tmp_path / "others")
    with pytest.raises(SignatureError, match="the signature of bob does not verify"):
        verify_folder(folder, bundle, read_trusted(tmp_path / "others").keys[0], "model")
    with pytest.raises(SignatureError, match="alice was revoked"):
        verify_folder(folder, bundle, revoke("alice", keys), "model")


def test_their_own_command_verifies_it(signed, tmp_path):
    folder, bundle, keys = signed
    signature = tmp_path / "model.sig"
    signature.write_bytes(bundle)
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(folder), "--signature", str(signature)]
    command += ["--public_key", str(keys / "alice.pub")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (folder / "MLmodel").write_text("flavors: {x: {}}")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "MLmodel" in result.stdout + result.stderr
