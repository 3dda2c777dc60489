"""A private authority as users of OpenSSL have one: roots, intermediates, certificates of people, revoked ones."""

from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

NOW = datetime.now(timezone.utc)
DAY = timedelta(days=1)


class Issuer:
    """A certificate with its key, that issues others."""

    def __init__(self, name: str, by: "Issuer | None" = None, days: int = 30) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.certificate = (by or self).issue(self.name, self.key.public_key(), issues=True, ends=NOW + days * DAY)

    def issue(self, name, public, *, issues=False, begins=NOW - DAY, ends=NOW + 10 * DAY, signs=True):
        serial = x509.random_serial_number()
        builder = x509.CertificateBuilder(self.name, name, public, serial, begins, ends)
        usage = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
        )
        usage |= {
            "digital_signature": signs and not issues,
            "key_encipherment": not signs,
            "key_cert_sign": issues,
            "crl_sign": issues,
        }
        builder = builder.add_extension(x509.BasicConstraints(issues, None), critical=True)
        builder = builder.add_extension(x509.KeyUsage(**usage, decipher_only=False), critical=True)
        return builder.sign(self.key, hashes.SHA256())

    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    def revoked(self, *certificates, days: int = 5) -> bytes:
        """Return a list of revoked certificates (PEM) that holds for some days."""
        now = NOW.replace(tzinfo=None)  # the builder compares times without a zone
        builder = x509.CertificateRevocationListBuilder(self.name, last_update=now - 20 * DAY)
        builder = builder.next_update(now + days * DAY)
        for certificate in certificates:
            entry = x509.RevokedCertificateBuilder(certificate.serial_number, NOW - DAY)
            builder = builder.add_revoked_certificate(entry.build())
        return builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM)


def person(issuer: Issuer, name: str, folder: Path, *, passphrase: bytes | None = None, others=(), **options):
    """Write NAME.pem and NAME.crt with the chain, as an authority hands them out; return path and certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    whom = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    certificate = issuer.issue(whom, key.public_key(), **options)
    locked = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.pem"
    path.write_bytes(key.private_bytes(Encoding.PEM, serialization.PrivateFormat.PKCS8, locked))
    chain = [certificate, *(other.certificate for other in others)]
    path.with_suffix(".crt").write_bytes(b"".join(c.public_bytes(Encoding.PEM) for c in chain))
    return path, certificate
