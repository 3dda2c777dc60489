"""Bundles: a signed envelope with the certificates that it was signed by, in the form of Sigstore.

What is signed with a bare key is a bare envelope, or a bundle that names the key. What is signed with a certificate
carries it, and those that lead from it to an authority.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from auditor.errors import SignatureError

MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"


@dataclass(frozen=True)
class Bundle:
    """A bundle taken apart: its envelope, and the certificates (DER), the signer's first; none for a bare key."""

    envelope: dict[str, Any]
    certificates: tuple[bytes, ...] = ()
    is_logged: bool = False  # whether it carries an entry of Sigstore's log


def make_bundle(envelope: Mapping[str, Any], certificates: Sequence[bytes]) -> dict[str, Any]:
    """Return an envelope and its certificates (DER) as a bundle."""
    chain = [{"rawBytes": base64.b64encode(der).decode()} for der in certificates]
    material = {"x509CertificateChain": {"certificates": chain}, "tlogEntries": []}
    return {"mediaType": MEDIA_TYPE, "verificationMaterial": material, "dsseEnvelope": dict(envelope)}


def open_bundle(content: bytes, where: str) -> Bundle:
    """Take a bundle, or a bare envelope, apart."""
    try:
        document = json.loads(content)
        if "dsseEnvelope" not in document:
            return Bundle({**document})
        material = document["verificationMaterial"]
        single = [material["certificate"]] if "certificate" in material else []
        chain = single or material.get("x509CertificateChain", {}).get("certificates", [])
        certificates = tuple(base64.b64decode(entry["rawBytes"], validate=True) for entry in chain)
        return Bundle({**document["dsseEnvelope"]}, certificates, bool(material.get("tlogEntries")))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SignatureError(f"{where} is no signed envelope ({type(error).__name__}); sign it again.") from None


def keyed(content: bytes, pem: bytes, where: str) -> bytes:
    """Return a bundle as if it had been signed with a bare key: for those who have looked at its certificates."""
    bundle = open_bundle(content, where)
    if not bundle.certificates:
        return content
    material = {"publicKey": {"hint": hashlib.sha256(pem).hexdigest()}, "tlogEntries": []}
    return json.dumps(
        {"mediaType": MEDIA_TYPE, "verificationMaterial": material, "dsseEnvelope": bundle.envelope}
    ).encode()
