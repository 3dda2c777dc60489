"""A Sigstore of one's own, offline: an authority, a log of certificates and a log of signatures, each with a key."""

import base64
import hashlib
import json
import struct
from datetime import timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tests.auditor.signing.authority import DAY, NOW

ISSUER, SCTS = "1.3.6.1.4.1.57264.1.1", "1.3.6.1.4.1.11129.2.4.2"
TYPE = "application/vnd.dev.sigstore."


def b64(content: bytes) -> str:
    return base64.b64encode(content).decode()


class Log:
    """A key that signs what a log has taken in."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.spki = self.key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        self.id = hashlib.sha256(self.spki).digest()

    def sign(self, content: bytes) -> bytes:
        return self.key.sign(content, ec.ECDSA(hashes.SHA256()))

    def to_json(self):
        start = {"start": (NOW - 90 * DAY).strftime("%Y-%m-%dT%H:%M:%SZ")}
        key = {"rawBytes": b64(self.spki), "keyDetails": "PKIX_ECDSA_P256_SHA_256", "validFor": start}
        return {"baseUrl": "none", "hashAlgorithm": "SHA2_256", "publicKey": key, "logId": {"keyId": b64(self.id)}}


class SmallSigstore:
    """Certifies identities for minutes, and logs what they sign."""

    def __init__(self) -> None:
        self.certificates, self.signatures = Log(), Log()
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "small sigstore")])
        public = self.key.public_key()
        builder = x509.CertificateBuilder(self.name, self.name, public, 1, NOW - 90 * DAY, NOW + 90 * DAY)
        usage = dict.fromkeys(
            (
                "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
                "encipher_only", "decipher_only",
            ),
            False,
        )  # fmt: skip
        builder = builder.add_extension(x509.BasicConstraints(True, None), critical=True)
        builder = builder.add_extension(x509.KeyUsage(**usage, key_cert_sign=True, crl_sign=True), critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        self.root = builder.sign(self.key, hashes.SHA256())

    def trust_config(self) -> str:
        """Return what clients are given."""
        chain = {"certificates": [{"rawBytes": b64(self.root.public_bytes(Encoding.DER))}]}
        start = {"start": (NOW - 90 * DAY).strftime("%Y-%m-%dT%H:%M:%SZ")}
        authority = {"subject": {"organization": "x", "commonName": "x"}, "uri": "none", "certChain": chain}
        root = {
            "mediaType": f"{TYPE}trustedroot+json;version=0.1",
            "tlogs": [self.signatures.to_json()], "ctlogs": [self.certificates.to_json()], "timestampAuthorities": [],
            "certificateAuthorities": [{**authority, "validFor": start}],
        }  # fmt: skip
        empty = {"caUrls": [], "oidcUrls": [], "rekorTlogUrls": [], "tsaUrls": []}
        empty |= {"rekorTlogConfig": {"selector": "ANY"}, "tsaConfig": {"selector": "ANY"}}
        config = {"mediaType": f"{TYPE}signingconfig.v0.2+json", **empty}
        kind = f"{TYPE}clienttrustconfig.v0.1+json"
        return json.dumps({"mediaType": kind, "trustedRoot": root, "signingConfig": config})

    def certify(self, identity: str, issuer: str, path: Path) -> x509.Certificate:
        """Write a new key and return its certificate, valid for ten minutes an hour ago."""
        key = ec.generate_private_key(ec.SECP256R1())
        plain = serialization.NoEncryption()
        path.write_bytes(key.private_bytes(Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
        public, begins = key.public_key(), NOW - timedelta(hours=1)
        ends = begins + timedelta(minutes=10)
        builder = x509.CertificateBuilder(self.name, x509.Name([]), public, 7, begins, ends)
        usage = dict.fromkeys(
            (
                "content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "key_cert_sign",
                "crl_sign", "encipher_only", "decipher_only",
            ),
            False,
        )  # fmt: skip
        by = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        named = x509.UnrecognizedExtension(x509.ObjectIdentifier(ISSUER), issuer.encode())
        whom = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity)])
        code = x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.CODE_SIGNING])
        for extension, critical in (
            (x509.KeyUsage(**usage, digital_signature=True), True),
            (code, False), (by, False), (whom, True), (named, False),
        ):  # fmt: skip
            builder = builder.add_extension(extension, critical=critical)
        logged = self._logged(builder.sign(self.key, hashes.SHA256()))
        return builder.add_extension(logged, critical=False).sign(self.key, hashes.SHA256())

    def _logged(self, certificate: x509.Certificate) -> x509.UnrecognizedExtension:
        """Return what the log of certificates says of one, as RFC 6962 has it."""
        content, moment = certificate.tbs_certificate_bytes, int(NOW.timestamp() * 1000)
        issuer = hashlib.sha256(
            self.key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        ).digest()
        entry = issuer + len(content).to_bytes(3, "big") + content
        signature = self.certificates.sign(struct.pack("!BBQH", 0, 0, moment, 1) + entry + b"\0\0")
        timestamp = b"\0" + self.certificates.id + struct.pack("!QH", moment, 0) + b"\4\3"
        timestamp += len(signature).to_bytes(2, "big") + signature
        listed = len(timestamp).to_bytes(2, "big") + timestamp
        listed = len(listed).to_bytes(2, "big") + listed
        assert len(listed) < 128  # the short form of a length in DER
        return x509.UnrecognizedExtension(x509.ObjectIdentifier(SCTS), b"\4" + bytes([len(listed)]) + listed)

    def bundle(self, envelope, certificate: x509.Certificate) -> bytes:
        """Return an envelope with its certificate and its entry in the log of signatures."""
        pem = certificate.public_bytes(Encoding.PEM)
        payload = base64.b64decode(envelope["payload"])
        (signature,) = envelope["signatures"]
        digest = {"algorithm": "sha256", "value": hashlib.sha256(payload).hexdigest()}
        spec = {"envelopeHash": digest, "payloadHash": digest}
        spec["signatures"] = [{"signature": signature["sig"], "verifier": b64(pem)}]
        body = json.dumps({"apiVersion": "0.0.1", "kind": "dsse", "spec": spec}).encode()
        moment, root = int(certificate.not_valid_before_utc.timestamp()) + 60, hashlib.sha256(b"\0" + body).digest()
        said = {"body": b64(body), "integratedTime": moment, "logID": self.signatures.id.hex(), "logIndex": 0}
        promise = self.signatures.sign(json.dumps(said, separators=(",", ":"), sort_keys=True).encode())
        note = f"small\n1\n{b64(root)}\n"
        signed = b64(self.signatures.id[:4] + self.signatures.sign(note.encode()))
        proof = {"logIndex": "0", "rootHash": b64(root), "treeSize": "1", "hashes": []}
        entry = {
            "logIndex": "0", "logId": {"keyId": b64(self.signatures.id)}, "integratedTime": str(moment),
            "kindVersion": {"kind": "dsse", "version": "0.0.1"}, "canonicalizedBody": b64(body),
            "inclusionPromise": {"signedEntryTimestamp": b64(promise)},
            "inclusionProof": {**proof, "checkpoint": {"envelope": f"{note}\n\u2014 small {signed}\n"}},
        }  # fmt: skip
        material = {"certificate": {"rawBytes": b64(certificate.public_bytes(Encoding.DER))}, "tlogEntries": [entry]}
        kind = f"{TYPE}bundle.v0.3+json"
        return json.dumps({"mediaType": kind, "verificationMaterial": material, "dsseEnvelope": envelope}).encode()
