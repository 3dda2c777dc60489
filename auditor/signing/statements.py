"""Statements: what was found of what, in the form of in-toto, signed in a DSSE envelope.

A statement names its subjects by their sha256 and says one thing of them, its predicate; an envelope is the statement's
bytes with signatures. Both are standards, so that others verify them without this package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from auditor.errors import SignatureError
from auditor.signing.bundles import open_bundle
from auditor.signing.keys import Signer, TrustedKey, TrustedKeys

STATEMENT = "https://in-toto.io/Statement/v1"
PAYLOAD = "application/vnd.in-toto+json"
TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"
SUMMARY = "https://slsa.dev/verification_summary/v1"
SLACK = timedelta(minutes=5)  # between the clocks of two machines


@dataclass(frozen=True, slots=True)
class Signed:
    """A statement whose signature was verified, and by whose key."""

    statement: dict[str, Any]
    key: TrustedKey

    @property
    def predicate(self) -> dict[str, Any]:
        """What is said of the subjects."""
        return dict(self.statement["predicate"])

    @property
    def subjects(self) -> dict[str, str]:
        """The sha256 of each subject by name."""
        return {entry["name"]: entry["digest"]["sha256"] for entry in self.statement["subject"]}

    @property
    def time(self) -> str:
        """When it was said, by the signer's clock."""
        return time_of(self.statement)


def make_statement(subjects: Mapping[str, str], predicate_type: str, predicate: Mapping[str, Any]) -> dict[str, Any]:
    """Return a statement about subjects, each a name with its sha256; checked by in-toto's own library."""
    from google.protobuf.json_format import MessageToDict
    from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
    from in_toto_attestation.v1.statement import Statement

    entries = [ResourceDescriptor(name=name, digest={"sha256": digest}).pb for name, digest in sorted(subjects.items())]
    statement = Statement(entries, predicate_type, json.loads(json.dumps(predicate)))
    statement.validate()
    return dict(MessageToDict(statement.pb))


def sign(statement: Mapping[str, Any], key: Signer) -> bytes:
    """Return the statement in an envelope with one signature, and the signer's certificates where there are any."""
    payload = json.dumps(statement, sort_keys=True).encode()
    return (json.dumps(key.sign_payload(payload, PAYLOAD), sort_keys=True) + "\n").encode()


def open_envelope(content: bytes, trusted: TrustedKeys, where: str, now: datetime | None = None) -> Signed:
    """Return the statement in an envelope after verifying it with a key that is trusted now; else an error."""
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import UnverifiedSignatureError, VerificationError

    bundle = open_bundle(content, where)
    key = trusted.signer_of(content, bundle, where, now) if bundle.certificates else None
    try:
        if key is not None:  # whose signature it is says the certificate
            (signature,) = bundle.envelope["signatures"]
            bundle.envelope["signatures"] = [{**signature, "keyid": key.keyid}]
        envelope = Envelope.from_dict(bundle.envelope)
        ids = list(envelope.signatures)
    except Exception as error:  # whatever a damaged file makes of the parsers
        raise SignatureError(f"{where} is no signed envelope ({type(error).__name__}); sign it again.") from None
    if envelope.payload_type != PAYLOAD:
        raise SignatureError(f"{where} holds {str(envelope.payload_type)[:60]!r}, not an in-toto statement.")
    key = key or next((key for key in map(trusted.by_id, ids) if key is not None), None)
    if key is None:
        signed_by = ", ".join(keyid[:12] for keyid in ids) or "nobody"
        raise SignatureError(
            f"{where} is signed by {signed_by}, which {trusted.folder} does not trust (it has {trusted.names})."
        )
    problem = key.problem(now)
    if problem:
        raise SignatureError(f"{where}: {problem}.")
    try:
        envelope.verify([key.key], 1)
    except (VerificationError, UnverifiedSignatureError):
        raise SignatureError(f"{where}: the signature of {key.name} does not fit its content.") from None
    statement = _statement(envelope.payload, where)
    _check_time(statement, where, now or datetime.now(timezone.utc))
    return Signed(statement, key)


def time_of(statement: Mapping[str, Any]) -> str:
    """Return when a statement was made, by its predicate."""
    predicate = statement.get("predicate", {})
    return str(predicate.get("timeVerified") or predicate.get("time") or "")


def _statement(payload: bytes, where: str) -> dict[str, Any]:
    try:
        statement: dict[str, Any] = json.loads(payload)
        digests = [entry["digest"]["sha256"] for entry in statement["subject"]]
        whole = statement["_type"] == STATEMENT and isinstance(statement["predicate"], dict) and bool(digests)
    except (ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise SignatureError(f"{where} holds no in-toto statement; sign it again.")
    return statement


def _check_time(statement: Mapping[str, Any], where: str, now: datetime) -> None:
    """Raise where a statement is from the future: one of the two clocks is wrong, so no date means anything."""
    try:
        said = datetime.fromisoformat(time_of(statement).replace("Z", "+00:00"))
        late = said > now + SLACK
    except (ValueError, TypeError):
        raise SignatureError(f"{where} does not say when it was made; sign it again.") from None
    if late:
        raise SignatureError(
            f"{where} was signed at {said:%Y-%m-%d %H:%M}, after now by the clock here; check the clocks."
        )
