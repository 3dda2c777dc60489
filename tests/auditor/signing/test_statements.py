"""Statements: signed, opened by those who trust the key, and by nobody else; other tools read them too."""

import base64
import contextlib
import json
from datetime import datetime, timedelta, timezone

import pytest

pytest.importorskip("securesystemslib")
pytest.importorskip("in_toto_attestation")

from auditor.errors import SignatureError
from auditor.signing.keys import new_key, read_signing_key, read_trusted, revoke
from auditor.signing.statements import PAYLOAD, TEST_RESULT, make_statement, open_envelope, sign

NOW = datetime.now(timezone.utc)
A, B = "a" * 64, "b" * 64


@pytest.fixture
def keys(tmp_path):
    """Alice's signing key and a folder that trusts her."""
    private, public = new_key("alice", tmp_path / "secret")
    trusted = tmp_path / "trusted"
    trusted.mkdir()
    (trusted / "alice.pub").write_bytes(public.read_bytes())
    return read_signing_key(private), trusted


def statement(time=None):
    predicate = {"result": "PASSED", "time": (time or NOW).isoformat(), "passedTests": ["x"], "value": 0.1}
    return make_statement({"model/MLmodel": A, "explainer/parts": B}, TEST_RESULT, predicate)


def test_a_signed_statement_comes_back_with_its_signer(keys):
    key, trusted = keys
    signed = open_envelope(sign(statement(), key), read_trusted(trusted), "it")
    assert signed.key.name == "alice"
    assert signed.subjects == {"model/MLmodel": A, "explainer/parts": B}
    assert (signed.predicate["result"], signed.time) == ("PASSED", NOW.isoformat())


def test_every_flipped_byte_of_an_envelope_is_refused(keys):
    key, trusted = keys
    content, folder = sign(statement(), key), read_trusted(trusted)
    opened = open_envelope(content, folder, "it").statement
    for position in range(0, len(content), 7):
        flipped = bytearray(content)
        flipped[position] ^= 1
        with contextlib.suppress(SignatureError):
            # a byte that means nothing, such as a space between two words of JSON
            assert open_envelope(bytes(flipped), folder, "it").statement == opened


def test_unknown_revoked_and_expired_keys_and_other_content_are_refused(keys, tmp_path):
    key, trusted = keys
    content = sign(statement(), key)
    new_key("bob", tmp_path / "others")
    with pytest.raises(SignatureError, match=r"does not trust \(it has bob\)"):
        open_envelope(content, read_trusted(tmp_path / "others"), "it")
    envelope = json.loads(content)
    envelope["payload"] = base64.b64encode(json.dumps(statement(NOW - timedelta(1))).encode()).decode()
    with pytest.raises(SignatureError, match="the signature of alice does not fit"):
        open_envelope(json.dumps(envelope).encode(), read_trusted(trusted), "it")
    revoke("alice", trusted)
    with pytest.raises(SignatureError, match="alice was revoked"):
        open_envelope(content, read_trusted(trusted), "it")


def test_a_statement_from_the_future_or_without_a_time_is_refused(keys):
    key, trusted = keys
    folder = read_trusted(trusted)
    with pytest.raises(SignatureError, match="after now by the clock here"):
        open_envelope(sign(statement(NOW + timedelta(hours=1)), key), folder, "it")
    with pytest.raises(SignatureError, match="after now by the clock here"):
        open_envelope(sign(statement(), key), folder, "it", now=NOW - timedelta(days=400))
    timeless = make_statement({"x": A}, TEST_RESULT, {"result": "PASSED"})
    with pytest.raises(SignatureError, match="does not say when"):
        open_envelope(sign(timeless, key), folder, "it")


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"payload": "", "payloadType": "x", "signatures": []}', b"\xff"]
)
def test_what_is_no_envelope_is_one_sentence(keys, content):
    with pytest.raises(SignatureError, match="it "):
        open_envelope(content, read_trusted(keys[1]), "it")


def test_what_is_signed_but_no_statement_is_refused(keys):
    from securesystemslib.dsse import Envelope

    key, trusted = keys
    envelope = Envelope(b'{"_type": "x"}', PAYLOAD, {})
    envelope.sign(key.signer)
    with pytest.raises(SignatureError, match="no in-toto statement"):
        open_envelope(json.dumps(envelope.to_dict()).encode(), read_trusted(trusted), "it")


def test_the_field_s_own_library_verifies_and_reads_it(keys):
    """securesystemslib checks the envelope, in-toto's library the statement; none of our code takes part."""
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
    from google.protobuf.json_format import ParseDict
    from in_toto_attestation.v1.statement import Statement
    from in_toto_attestation.v1.statement_pb2 import Statement as Message
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import SSlibKey

    key, trusted = keys
    public = SSlibKey.from_crypto(load_pem_public_key((trusted / "alice.pub").read_bytes()))
    envelope = Envelope.from_dict(json.loads(sign(statement(), key)))
    assert list(envelope.verify([public], 1)) == [key.keyid]
    Statement.copy_from_pb(ParseDict(json.loads(envelope.payload), Message())).validate()
