"""Keys: made, trusted, expired, revoked; whatever is no key is one sentence."""

from datetime import datetime, timedelta, timezone

import pytest

pytest.importorskip("securesystemslib")

from auditor.errors import OptionError
from auditor.signing.keys import (
    current_signer,
    new_key,
    read_signing_key,
    read_trusted,
    revoke,
    signing_with,
    write_notes,
)

NOW = datetime.now(timezone.utc)


def test_a_new_key_is_secret_and_trusted_by_its_public_half(tmp_path):
    private, public = new_key("alice", tmp_path)
    assert private.stat().st_mode & 0o777 == 0o600
    (key,) = read_trusted(tmp_path).keys
    assert (key.name, key.keyid, key.problem()) == ("alice", read_signing_key(private).keyid, "")
    assert public.read_bytes().startswith(b"-----BEGIN PUBLIC KEY-----")
    with pytest.raises(OptionError, match="is there already"):
        new_key("alice", tmp_path)


def test_expired_revoked_and_not_yet_valid_keys_do_not_count(tmp_path):
    _, public = new_key("alice", tmp_path, expires=NOW + timedelta(days=1))
    (key,) = read_trusted(tmp_path).keys
    assert key.problem() == ""
    assert "expired on" in key.problem(NOW + timedelta(days=2))
    assert "was revoked on" in revoke("alice", tmp_path).problem()
    write_notes(public, {"expires": NOW - timedelta(days=1)})
    assert "expired on" in read_trusted(tmp_path).keys[0].problem()
    with pytest.raises(OptionError, match="trusts no key 'bob'"):
        revoke("bob", tmp_path)


def certificate(private, begins, ends):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    key = serialization.load_pem_private_key(private.read_bytes(), None)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "alice")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), begins, ends)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def test_a_certificate_counts_between_its_dates(tmp_path):
    private, public = new_key("alice", tmp_path / "secret")
    trusted = tmp_path / "trusted"
    trusted.mkdir()
    (trusted / "alice.crt").write_bytes(certificate(private, NOW - timedelta(days=1), NOW + timedelta(days=1)))
    (key,) = read_trusted(trusted).keys
    assert (key.keyid, key.pem, key.problem()) == (read_signing_key(private).keyid, public.read_bytes(), "")
    assert "expired on" in key.problem(NOW + timedelta(days=2))
    assert "by the clock here it is" in key.problem(NOW - timedelta(days=2))


@pytest.mark.parametrize("content", [b"", b"no key", b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"])
def test_what_is_no_key_is_one_sentence(tmp_path, content):
    (tmp_path / "odd.pub").write_bytes(content)
    with pytest.raises(OptionError, match=r"odd\.pub: no public key"):
        read_trusted(tmp_path)
    (tmp_path / "odd.pem").write_bytes(content)
    with pytest.raises(OptionError, match=r"odd\.pem: no private key"):
        read_signing_key(tmp_path / "odd.pem")


def test_other_sorts_of_keys_folders_and_notes_are_refused(tmp_path):
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    with pytest.raises(OptionError, match="no such folder"):
        read_trusted(tmp_path / "none")
    with pytest.raises(OptionError, match="holds no"):
        read_trusted(tmp_path)
    with pytest.raises(OptionError, match="cannot be read"):
        read_signing_key(tmp_path / "none.pem")
    other = ed25519.Ed25519PrivateKey.generate()
    pem = other.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (tmp_path / "ed.pem").write_bytes(pem)
    with pytest.raises(OptionError, match="want an elliptic curve key"):
        read_signing_key(tmp_path / "ed.pem")
    _, public = new_key("alice", tmp_path)
    public.with_suffix(".toml").write_text("expires = 'soon'")
    with pytest.raises(OptionError, match="want a date"):
        read_trusted(tmp_path)
    public.with_suffix(".toml").write_text("until = 2027-01-01")
    with pytest.raises(OptionError, match="'until' is not known"):
        read_trusted(tmp_path)
    public.with_suffix(".toml").write_text("= 3")
    with pytest.raises(OptionError, match="not TOML"):
        read_trusted(tmp_path)
    public.with_suffix(".toml").unlink()
    (tmp_path / "twice.pub").write_bytes(public.read_bytes())
    with pytest.raises(OptionError, match="there twice"):
        read_trusted(tmp_path)


def test_the_chosen_key_goes_before_the_environment(tmp_path, monkeypatch):
    one, _ = new_key("one", tmp_path)
    two, _ = new_key("two", tmp_path)
    monkeypatch.delenv("AUDITOR_SIGN_KEY", raising=False)
    assert current_signer() is None
    monkeypatch.setenv("AUDITOR_SIGN_KEY", str(one))
    assert current_signer().name == "one"
    with signing_with(two):
        assert current_signer().name == "two"
    assert current_signer().name == "one"
    with pytest.raises(OptionError, match="cannot be read"), signing_with(tmp_path / "none.pem"):
        pass


def test_a_key_with_a_passphrase_opens_with_it_and_is_one_sentence_without(tmp_path, monkeypatch):
    private, _ = new_key("alice", tmp_path, passphrase="open sesame")
    assert b"ENCRYPTED" in private.read_bytes()
    monkeypatch.setenv("AUDITOR_SIGN_PASSPHRASE", "open sesame")
    key = read_signing_key(private)
    assert key.keyid == read_trusted(tmp_path).keys[0].keyid
    assert "sesame" not in repr(key)
    monkeypatch.setenv("AUDITOR_SIGN_PASSPHRASE", "open sesam")
    with pytest.raises(OptionError, match="the passphrase does not open it"):
        read_signing_key(private)
    monkeypatch.delenv("AUDITOR_SIGN_PASSPHRASE")
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    with pytest.raises(OptionError, match="it has a passphrase; set AUDITOR_SIGN_PASSPHRASE"):
        read_signing_key(private)


def test_a_passphrase_is_asked_for_once_at_a_terminal(tmp_path, monkeypatch):
    private, _ = new_key("alice", tmp_path, passphrase="open sesame")
    asked = []
    monkeypatch.delenv("AUDITOR_SIGN_PASSPHRASE", raising=False)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("getpass.getpass", lambda prompt: asked.append(prompt) or "open sesame")
    assert read_signing_key(private).keyid == read_signing_key(private).keyid
    assert asked == [f"passphrase of {private}: "]
