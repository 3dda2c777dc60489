"""Authorities: whoever holds a certificate of theirs is believed while it holds, and nobody else; offline."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("model_signing")
pytest.importorskip("in_toto_attestation")

from auditor.errors import OptionError, SignatureError
from auditor.signing.folders import sign_folder, verify_folder
from auditor.signing.keys import read_signing_key, read_trusted, revoke
from auditor.signing.statements import PAYLOAD, TEST_RESULT, make_statement, open_envelope, sign
from tests.auditor.signing.authority import DAY, NOW, Issuer, person

PREDICATE = {"result": "PASSED", "time": (NOW).isoformat()}


def statement():
    return make_statement({"model/MLmodel": "a" * 64}, TEST_RESULT, PREDICATE)


@pytest.fixture
def acme(tmp_path):
    """A root, an intermediate that it let issue others, and a folder that trusts the root."""
    root = Issuer("Acme Root")
    (tmp_path / "trusted").mkdir()
    (tmp_path / "trusted" / "acme.crt").write_bytes(root.pem())
    return root, Issuer("Acme Teams", root), tmp_path / "trusted"


def test_a_statement_by_a_certificate_is_its_holder_s_by_root_and_by_intermediate(acme, tmp_path):
    root, teams, trusted = acme
    by_root, _ = person(root, "alice", tmp_path / "a")
    by_teams, _ = person(teams, "bob", tmp_path / "b", others=[teams])
    for path, name in ((by_root, "acme/alice"), (by_teams, "acme/bob")):
        key = read_signing_key(path)
        signed = open_envelope(sign(statement(), key), read_trusted(trusted), "it")
        assert (signed.key.name, signed.key.keyid, signed.statement) == (name, key.keyid, statement())
    alone, _ = person(teams, "carol", tmp_path / "c")  # without the intermediate nothing leads to the root
    with pytest.raises(SignatureError, match=r"certificate of carol does not count for acme .*issuer certificate"):
        open_envelope(sign(statement(), read_signing_key(alone)), read_trusted(trusted), "it")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ends": NOW - DAY / 2}, "certificate has expired"),
        ({"begins": NOW + DAY}, "certificate is not yet valid"),
        ({"signs": False}, "is not one for signatures"),
    ],
)
def test_certificates_that_do_not_hold_are_refused(acme, tmp_path, options, words):
    root, _, trusted = acme
    path, _ = person(root, "alice", tmp_path, **options)
    with pytest.raises(SignatureError, match=words):
        open_envelope(sign(statement(), read_signing_key(path)), read_trusted(trusted), "it")


def test_certificates_of_others_and_a_signature_by_another_key_are_refused(acme, tmp_path):
    root, _, trusted = acme
    mallory = Issuer("Acme Root")  # the same name, another key
    path, _ = person(mallory, "alice", tmp_path / "m")
    with pytest.raises(SignatureError, match="certificate of alice does not count for acme"):
        open_envelope(sign(statement(), read_signing_key(path)), read_trusted(trusted), "it")
    alice, _ = person(root, "alice", tmp_path / "a")
    bundle = json.loads(sign(statement(), read_signing_key(alice)))
    forged = json.loads(sign(statement(), read_signing_key(path)))
    bundle["dsseEnvelope"] = forged["dsseEnvelope"]  # alice's certificate around what mallory signed
    with pytest.raises(SignatureError, match="signature of acme/alice does not fit"):
        open_envelope(json.dumps(bundle).encode(), read_trusted(trusted), "it")
    plain, _ = person(root, "dave", tmp_path / "d")
    leaf_issued = Issuer.__new__(Issuer)  # somebody's own certificate issues nothing
    leaf_issued.key = read_signing_key(plain).signer._private_key
    leaf_issued.name = person(root, "dave", tmp_path / "e")[1].subject
    sub, _ = person(leaf_issued, "eve", tmp_path / "s")
    with pytest.raises(SignatureError, match="certificate of eve does not count for acme"):
        open_envelope(sign(statement(), read_signing_key(sub)), read_trusted(trusted), "it")


def test_a_list_of_revoked_certificates_counts_while_it_holds(acme, tmp_path):
    root, _, trusted = acme
    path, certificate = person(root, "alice", tmp_path / "a")
    other, _ = person(root, "bob", tmp_path / "b")
    content = sign(statement(), read_signing_key(path))
    before = read_trusted(trusted).state()
    (trusted / "acme.crl").write_bytes(root.revoked(certificate))
    assert read_trusted(trusted).state() != before  # a server that follows it loads again
    with pytest.raises(SignatureError, match="certificate revoked"):
        open_envelope(content, read_trusted(trusted), "it")
    assert open_envelope(sign(statement(), read_signing_key(other)), read_trusted(trusted), "it").key.name == "acme/bob"
    (trusted / "acme.crl").write_bytes(root.revoked(days=-1))
    with pytest.raises(SignatureError, match=r"revoked certificates of acme is out of date; fetch a new acme\.crl"):
        open_envelope(content, read_trusted(trusted), "it")
    (trusted / "acme.crl").write_bytes(Issuer("Acme Root").revoked())
    with pytest.raises(OptionError, match=r"acme\.crt did not sign this list"):
        read_trusted(trusted)
    (trusted / "acme.crl").write_bytes(b"nothing")
    with pytest.raises(OptionError, match="no list of revoked certificates in PEM"):
        read_trusted(trusted)


def test_an_authority_can_be_revoked_as_a_whole_and_expires(acme, tmp_path):
    root, _, trusted = acme
    path, _ = person(root, "alice", tmp_path)
    content = sign(statement(), read_signing_key(path))
    later = NOW + 40 * DAY
    with pytest.raises(SignatureError, match="the authority acme expired on"):
        open_envelope(content, read_trusted(trusted), "it", later)
    assert "acme was revoked" in revoke("acme", trusted).problem()
    with pytest.raises(SignatureError, match="the authority acme was revoked on"):
        open_envelope(content, read_trusted(trusted), "it")


def test_a_certificate_that_is_trusted_itself_needs_no_authority(acme, tmp_path):
    root, _, _ = acme
    path, _ = person(root, "alice", tmp_path / "a")
    pinned = tmp_path / "pinned"
    pinned.mkdir()
    (pinned / "ally.crt").write_bytes(path.with_suffix(".crt").read_bytes())
    assert open_envelope(sign(statement(), read_signing_key(path)), read_trusted(pinned), "it").key.name == "ally"


def test_a_folder_verifies_by_us_and_by_their_command_with_the_root_alone(acme, tmp_path):
    _, teams, trusted = acme
    path, _ = person(teams, "bob", tmp_path / "b", others=[teams], passphrase=b"open sesame")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUDITOR_SIGN_PASSPHRASE", "open sesame")
        key = read_signing_key(path)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "MLmodel").write_text("flavors: {}")
    bundle = sign_folder(folder, key)
    from auditor.signing.bundles import open_bundle

    signer = read_trusted(trusted).signer_of(bundle, open_bundle(bundle, "it"), "it")
    assert signer.name == "acme/bob"
    verify_folder(folder, bundle, signer, "it")
    (tmp_path / "model.sig").write_bytes(bundle)
    command = [sys.executable, "-m", "model_signing", "verify", "certificate", str(folder)]
    command += ["--signature", str(tmp_path / "model.sig"), "--certificate_chain", str(trusted / "acme.crt")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (folder / "MLmodel").write_text("flavors: {x: {}}")
    with pytest.raises(SignatureError, match="MLmodel"):
        verify_folder(folder, bundle, signer, "it")
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_certificates_beside_a_key_must_be_its_own(acme, tmp_path):
    root, _, _ = acme
    path, _ = person(root, "alice", tmp_path / "a")
    other, _ = person(root, "bob", tmp_path / "b")
    path.with_suffix(".crt").write_bytes(other.with_suffix(".crt").read_bytes())
    with pytest.raises(OptionError, match=r"first certificate of alice\.crt beside it is of another key"):
        read_signing_key(path)
    path.with_suffix(".crt").write_bytes(b"nothing")
    with pytest.raises(OptionError, match="holds no certificates in PEM"):
        read_signing_key(path)


def test_every_flipped_byte_of_a_bundle_is_refused_or_means_nothing(acme, tmp_path):
    root, _, trusted = acme
    path, _ = person(root, "alice", tmp_path)
    content, folder = sign(statement(), read_signing_key(path)), read_trusted(trusted)
    for position in range(0, len(content), 3):
        flipped = bytearray(content)
        flipped[position] ^= 1
        try:
            signed = open_envelope(bytes(flipped), folder, "it")
        except SignatureError:
            continue
        assert (signed.key.name, signed.statement) == ("acme/alice", statement())
    assert json.loads(content)["dsseEnvelope"]["payloadType"] == PAYLOAD
