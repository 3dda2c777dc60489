"""Authorities: certificates that issue others, and whether one of those leads to them now.

An authority lies in a trusted folder as ``NAME.crt``, a certificate that may issue others; ``NAME.crl`` beside it lists
those that it took back (and the lists of those that it let issue others). Nothing is fetched: the chain comes with the
signature. Chains are OpenSSL's matter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from auditor.errors import OptionError, SignatureError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate, CertificateRevocationList

    from auditor.signing.keys import TrustedKey

BEGIN_LIST = b"-----BEGIN X509 CRL-----"
COMMON_NAME = re.compile(r"[\w.@+ -]{1,64}")


@dataclass(frozen=True)
class Authority:
    """A certificate that issues others; whom it certified as X is called NAME/X."""

    name: str
    certificate: Certificate
    revocations: tuple[CertificateRevocationList, ...] = ()
    expires: datetime | None = None
    revoked: datetime | None = None

    @property
    def keyid(self) -> str:
        """The fingerprint of the certificate."""
        from cryptography.hazmat.primitives.hashes import SHA256

        return self.certificate.fingerprint(SHA256()).hex()

    def problem(self, now: datetime | None = None) -> str:
        """Return why it does not count now, or nothing."""
        now = now or datetime.now(timezone.utc)
        if self.revoked is not None:
            return f"the authority {self.name} was revoked on {self.revoked:%Y-%m-%d}"
        expires = min(self.certificate.not_valid_after_utc, self.expires or self.certificate.not_valid_after_utc)
        if now >= expires:
            return f"the authority {self.name} expired on {expires:%Y-%m-%d}"
        if any((entry.next_update_utc or now) < now for entry in self.revocations):
            return f"the list of revoked certificates of {self.name} is out of date; fetch a new {self.name}.crl"
        return ""

    def key_of(self, chain: Sequence[bytes], where: str, now: datetime | None = None) -> TrustedKey:
        """Return the key of the first certificate of a chain (DER) that leads to this authority now; else an error."""
        from OpenSSL import crypto

        now = now or datetime.now(timezone.utc)
        if problem := self.problem(now):
            raise SignatureError(f"{where}: {problem}.")
        leaf, *others = certificates_of(chain, where)
        flags = crypto.X509StoreFlags.PARTIAL_CHAIN
        store = crypto.X509Store()
        store.add_cert(crypto.X509.from_cryptography(self.certificate))
        for entry in self.revocations:
            store.add_crl(entry)
            flags |= crypto.X509StoreFlags.CRL_CHECK
        store.set_flags(flags)
        store.set_time(now.astimezone(timezone.utc))
        intermediates = [crypto.X509.from_cryptography(other) for other in others]
        try:
            crypto.X509StoreContext(store, crypto.X509.from_cryptography(leaf), intermediates).verify_certificate()
        except crypto.X509StoreContextError as error:
            raise SignatureError(
                f"{where}: the certificate of {name_of(leaf, where)} does not count for {self.name} ({error})."
            ) from None
        check_may_sign(leaf, where)
        return key_of_certificate(leaf, f"{self.name}/{name_of(leaf, where)}", where)


def read_authority(name: str, certificate: Certificate, path: Path, notes: dict[str, datetime]) -> Authority:
    """Return an authority with its list of revoked certificates, which must be its own."""
    from cryptography import x509

    list_path = path.with_suffix(".crl")
    revocations: list[CertificateRevocationList] = []
    if list_path.exists():
        try:
            content = list_path.read_bytes()
            parts = [BEGIN_LIST + part for part in content.split(BEGIN_LIST)[1:]] or [content]
            revocations = [x509.load_pem_x509_crl(part) for part in parts]
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:80]
            raise OptionError(f"trusted key {list_path}: no list of revoked certificates in PEM ({reason}).") from None
        by_it = [entry for entry in revocations if entry.issuer == certificate.subject]
        if not by_it or not all(entry.is_signature_valid(certificate.public_key()) for entry in by_it):  # type: ignore[arg-type]
            raise OptionError(f"trusted key {list_path}: {path.name} did not sign this list.")
    return Authority(name, certificate, tuple(revocations), notes.get("expires"), notes.get("revoked"))


def certificates_of(chain: Sequence[bytes], where: str) -> list[Certificate]:
    """Return the certificates of a chain (DER)."""
    from cryptography import x509

    try:
        return [x509.load_der_x509_certificate(der) for der in chain]
    except ValueError:
        raise SignatureError(f"{where}: it carries a certificate that cannot be read; sign it again.") from None


def issues_others(certificate: Certificate) -> bool:
    """Whether a certificate says that it may issue others."""
    from cryptography import x509

    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, ValueError):
        return False


def check_may_sign(certificate: Certificate, where: str) -> None:
    """Raise unless a certificate is for signatures."""
    from cryptography import x509

    try:
        usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
        may = usage.digital_signature and not issues_others(certificate)
    except (x509.ExtensionNotFound, ValueError):
        may = False
    if not may:
        raise SignatureError(f"{where}: the certificate of {name_of(certificate, where)} is not one for signatures.")


def name_of(certificate: Certificate, where: str) -> str:
    """Return whom a certificate stands for."""
    from cryptography.x509 import NameOID

    names = [str(entry.value) for entry in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if len(names) != 1 or COMMON_NAME.fullmatch(names[0]) is None:
        raise SignatureError(f"{where}: the certificate names nobody (want one common name of at most 64 letters).")
    return names[0]


def key_of_certificate(certificate: Certificate, name: str, where: str) -> TrustedKey:
    """Return the key of a certificate as one that counts between the certificate's dates."""
    from auditor.signing.keys import trusted_key

    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    try:
        return trusted_key(name, certificate.public_key(), where, begins=begins, expires=ends)
    except OptionError as error:
        raise SignatureError(str(error)) from None
