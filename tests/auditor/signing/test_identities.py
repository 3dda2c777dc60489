"""Identities of Sigstore: what a folder may say of them, and what is said without a network. None is made here."""

import json

import pytest

pytest.importorskip("sigstore")
pytest.importorskip("model_signing")

from auditor.errors import OptionError, SignatureError
from auditor.signing.bundles import open_bundle
from auditor.signing.keys import read_signer, read_signing_key, read_trusted, revoke
from auditor.signing.statements import TEST_RESULT, make_statement, open_envelope, sign
from tests.auditor.signing.authority import NOW, Issuer, person
from tests.auditor.signing.small_sigstore import SmallSigstore

CI = 'identity = "https://github.com/acme/birds/.github/workflows/gate.yml@refs/heads/main"\n'
CI += 'issuer = "https://token.actions.githubusercontent.com"\n'


@pytest.fixture
def trusted(tmp_path, monkeypatch):
    """A folder that trusts a workflow, on a machine that reaches nobody."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "trusted"
    folder.mkdir()
    (folder / "ci.identity").write_text(CI)
    return folder


def logged(tmp_path):
    """A bundle as Sigstore makes one in form: a certificate, an entry of a log; both made up."""
    path, _ = person(Issuer("Fulcio"), "anybody", tmp_path / "p")
    predicate = {"result": "PASSED", "time": NOW.isoformat()}
    statement = make_statement({"model": "a" * 64}, TEST_RESULT, predicate)
    bundle = json.loads(sign(statement, read_signing_key(path)))
    material = bundle["verificationMaterial"]
    (certificate,) = material.pop("x509CertificateChain")["certificates"]
    bundle["verificationMaterial"] = {"certificate": certificate, "tlogEntries": [{"logIndex": "1"}]}
    return json.dumps(bundle).encode()


def test_an_identity_counts_until_it_is_revoked(trusted):
    (entry,) = read_trusted(trusted).identities
    assert (entry.name, entry.issuer, entry.problem()) == ("ci", "https://token.actions.githubusercontent.com", "")
    before = read_trusted(trusted).state()
    assert "ci was revoked" in revoke("ci", trusted).problem()
    assert read_trusted(trusted).state() != before


@pytest.mark.parametrize(
    ("content", "words"),
    [("identity = 'x'", "want issuer"), ("= 3", "not TOML"), (CI + "who = 3", "'who' is not known")],
)
def test_a_file_that_names_nobody_is_one_sentence(trusted, content, words):
    (trusted / "ci.identity").write_text(content)
    with pytest.raises(OptionError, match=words):
        read_trusted(trusted)


def test_what_sigstore_does_not_vouch_for_is_refused(trusted, tmp_path):
    content = logged(tmp_path)
    assert open_bundle(content, "it").is_logged
    with pytest.raises(SignatureError, match=r"Sigstore does not say that https://github.com/acme/birds.* signed it"):
        open_envelope(content, read_trusted(trusted), "it")
    (trusted / "ci.identity").write_text(CI + 'trust_config = "none.json"')
    with pytest.raises((OptionError, SignatureError), match=r"none\.json: its keys cannot be read"):
        open_envelope(content, read_trusted(trusted), "it")


def test_signing_without_a_network_is_one_sentence(trusted, tmp_path):
    from pathlib import Path

    (tmp_path / "trust.json").write_text("{}")
    with pytest.raises(OptionError, match=r"trust\.json: its keys cannot be read"):
        read_signer(Path(f"sigstore:{tmp_path / 'trust.json'}"))


def test_a_bundle_of_sigstore_is_the_identity_s_and_nobody_else_s(trusted, tmp_path):
    """With a Sigstore of one's own: its certificate held for ten minutes, and its log says that it was used then."""
    identity, issuer = (line.split('"')[1] for line in CI.splitlines())
    small = SmallSigstore()
    (trusted / "small.json").write_text(small.trust_config())
    (trusted / "ci.identity").write_text(CI + 'trust_config = "small.json"\n')
    statement = make_statement({"model": "a" * 64}, TEST_RESULT, {"result": "PASSED", "time": NOW.isoformat()})
    path = tmp_path / "key.pem"

    def bundle(whom: str, by: str) -> bytes:
        certificate = small.certify(whom, by, path)
        return small.bundle(json.loads(sign(statement, read_signing_key(path))), certificate)

    content = bundle(identity, issuer)
    signed = open_envelope(content, read_trusted(trusted), "it")
    assert (signed.key.name, signed.statement, signed.key.expires) == ("ci", statement, None)
    for whom, by in (("https://github.com/mallory/birds", issuer), (identity, "https://mallory.example")):
        with pytest.raises(SignatureError, match="Sigstore does not say that"):
            open_envelope(bundle(whom, by), read_trusted(trusted), "it")
    document = json.loads(content)
    document["verificationMaterial"]["tlogEntries"][0]["integratedTime"] = str(int(NOW.timestamp()))
    with pytest.raises(SignatureError, match="Sigstore does not say that"):  # after the certificate's ten minutes
        open_envelope(json.dumps(document).encode(), read_trusted(trusted), "it")
    (trusted / "small.json").write_text(SmallSigstore().trust_config())
    with pytest.raises(SignatureError, match="Sigstore does not say that"):
        open_envelope(content, read_trusted(trusted), "it")
