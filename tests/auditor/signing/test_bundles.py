"""Bundles: an envelope comes out as it went in, with its certificates; what is no envelope is refused in one line."""

import base64
import hashlib
import json

import pytest

from auditor.errors import SignatureError
from auditor.signing.bundles import Bundle, keyed, make_bundle, open_bundle

ENVELOPE = {"payload": "eA==", "payloadType": "application/vnd.in-toto+json", "signatures": [{"sig": "eQ=="}]}


def as_bytes(document):
    return json.dumps(document).encode()


def test_a_bundle_is_taken_apart_as_it_was_made():
    chain = (b"the signer's", b"an authority's")
    assert open_bundle(as_bytes(make_bundle(ENVELOPE, chain)), "x") == Bundle(ENVELOPE, chain)


def test_a_bare_envelope_is_a_bundle_without_certificates():
    assert open_bundle(as_bytes(ENVELOPE), "x") == Bundle(ENVELOPE)


def test_sigstore_s_form_with_one_certificate_and_an_entry_of_its_log():
    material = {"certificate": {"rawBytes": base64.b64encode(b"one").decode()}, "tlogEntries": [{"logIndex": "1"}]}
    bundle = open_bundle(as_bytes({"verificationMaterial": material, "dsseEnvelope": ENVELOPE}), "x")
    assert bundle == Bundle(ENVELOPE, (b"one",), is_logged=True)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no JSON",
        b"[1, 2]",
        b'"text"',
        b"\xff\xfe",
        b"[" * 100_000,
        as_bytes({"dsseEnvelope": ENVELOPE}),
        as_bytes({"dsseEnvelope": ENVELOPE, "verificationMaterial": 7}),
        as_bytes({"dsseEnvelope": 3, "verificationMaterial": {}}),
        as_bytes({"dsseEnvelope": ENVELOPE, "verificationMaterial": {"certificate": {"rawBytes": "?"}}}),
        as_bytes({"dsseEnvelope": ENVELOPE, "verificationMaterial": {"certificate": {}}}),
    ],
    ids=lambda content: content[:20].decode(errors="replace"),
)
def test_what_is_no_envelope_is_refused(content):
    with pytest.raises(SignatureError, match=r"^a\.json is no signed envelope \(\w+\); sign it again\.$"):
        open_bundle(content, "a.json")


def test_a_bundle_whose_certificates_were_looked_at_names_the_key_instead():
    pem = b"-----BEGIN PUBLIC KEY-----"
    opened = json.loads(keyed(as_bytes(make_bundle(ENVELOPE, [b"a"])), pem, "x"))
    assert opened["verificationMaterial"]["publicKey"] == {"hint": hashlib.sha256(pem).hexdigest()}
    assert open_bundle(as_bytes(opened), "x") == Bundle(ENVELOPE)
    bare = as_bytes(ENVELOPE)
    assert keyed(bare, pem, "x") is bare
