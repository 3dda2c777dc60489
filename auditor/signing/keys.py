"""Keys: the private key that signs, and the folder of those who are trusted.

A trusted folder holds ``NAME.pub`` (a public key) or ``NAME.crt``: a certificate, valid between its own dates, or an
authority's, whose holders are then trusted too. Beside it, optionally, lies ``NAME.toml`` with ``expires`` or
``revoked``, each a date. ``NAME.identity`` trusts an identity of Sigstore. Keys are elliptic curves P-256, P-384 or
P-521 as PEM: what OpenSSF model-signing and cosign take.
"""

from __future__ import annotations

import contextvars
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from auditor.errors import AuditError, OptionError, SignatureError
from auditor.signing.authorities import Authority, issues_others, read_authority
from auditor.signing.bundles import Bundle, make_bundle

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner, SSlibKey

    from auditor.signing.identities import Identity

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VARIABLE = "AUDITOR_SIGN_KEY"
TRUSTED_VARIABLE = "AUDITOR_TRUSTED"
PASSPHRASE = "AUDITOR_SIGN_PASSPHRASE"
SIGSTORE = "sigstore"  # instead of a file: the identity of whoever runs the command
NEEDED = "signing needs its packages; install them with: pip install 'mlflow-auditor[sign]'."
DATES = ("expires", "revoked")
CURVES = ("secp256r1", "secp384r1", "secp521r1")

_passphrases: dict[Path, bytes] = {}
_chosen: contextvars.ContextVar[Path | None] = contextvars.ContextVar("sign_key", default=None)


class Signer(Protocol):
    """What signs statements and folders."""

    @property
    def name(self) -> str:
        """What people call it."""

    @property
    def keyid(self) -> str:
        """The digest by which stored signatures are named."""

    def sign_payload(self, payload: bytes, payload_type: str) -> dict[str, Any]:
        """Return an envelope with the payload and its signature, or a bundle around one."""

    def choose_in(self, config: Any) -> Any:
        """Choose this signer in a configuration of model-signing, inside the block."""


@dataclass(frozen=True)
class SigningKey:
    """A private key to sign with; its name is that of its file."""

    name: str
    path: Path
    signer: CryptoSigner
    certificates: tuple[bytes, ...] = ()  # DER, the signer's own first
    passphrase: bytes | None = field(default=None, repr=False)

    @property
    def keyid(self) -> str:
        """The digest by which envelopes name the key."""
        return str(self.signer.public_key.keyid)

    def sign_payload(self, payload: bytes, payload_type: str) -> dict[str, Any]:
        """Return an envelope, with the certificates around it where there are any."""
        from securesystemslib.dsse import Envelope

        envelope = Envelope(payload, payload_type, {})
        envelope.sign(self.signer)
        document: dict[str, Any] = envelope.to_dict()
        return make_bundle(document, self.certificates) if self.certificates else document

    @contextmanager
    def choose_in(self, config: Any) -> Iterator[None]:
        """Choose the key in a configuration of model-signing; it reads the files again."""
        if not self.certificates:
            config.use_elliptic_key_signer(private_key=self.path, password=self.passphrase)
            yield
            return
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import Encoding

        with tempfile.TemporaryDirectory(prefix="auditor-") as folder, self._unlocked() as private:
            paths = [Path(folder) / f"{k}.crt" for k in range(len(self.certificates))]
            for path, der in zip(paths, self.certificates, strict=True):
                path.write_bytes(x509.load_der_x509_certificate(der).public_bytes(Encoding.PEM))
            config.use_certificate_signer(
                private_key=private, signing_certificate=paths[0], certificate_chain=paths[1:]
            )
            yield

    @contextmanager
    def _unlocked(self) -> Iterator[Path]:
        """Give a path of the key without its passphrase: in memory, never on a disk."""
        if self.passphrase is None:
            yield self.path
            return
        if not hasattr(os, "memfd_create"):
            raise OptionError(
                f"sign key {self.path}: with a certificate a passphrase needs Linux; take it off the key."
            )
        descriptor = os.memfd_create("key")
        try:
            os.write(descriptor, self.signer.private_bytes)
            yield Path(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)


class Trusted(Protocol):
    """An entry of a trusted folder: a key, or somebody who vouches for others."""

    @property
    def name(self) -> str:
        """What the folder calls it."""

    @property
    def keyid(self) -> str:
        """A digest that is its own."""

    @property
    def expires(self) -> datetime | None:
        """The day from which it does not count, where its notes say one."""

    def problem(self, now: datetime | None = None) -> str:
        """Return why it does not count now, or nothing."""


@dataclass(frozen=True)
class TrustedKey:
    """A public key with the name of whom it stands for, and until when."""

    name: str
    key: SSlibKey
    pem: bytes
    begins: datetime | None = None
    expires: datetime | None = None
    revoked: datetime | None = None

    @property
    def keyid(self) -> str:
        """The digest by which envelopes name the key."""
        return str(self.key.keyid)

    def problem(self, now: datetime | None = None) -> str:
        """Return why the key does not count now, or nothing."""
        now = now or datetime.now(timezone.utc)
        if self.revoked is not None:
            return f"the key {self.name} was revoked on {self.revoked:%Y-%m-%d}"
        if self.expires is not None and now >= self.expires:
            return f"the key {self.name} expired on {self.expires:%Y-%m-%d}"
        if self.begins is not None and now < self.begins:
            return (
                f"the key {self.name} is valid from {self.begins:%Y-%m-%d} on; by the clock here it is {now:%Y-%m-%d}"
            )
        return ""


@dataclass(frozen=True)
class TrustedKeys:
    """Whom a trusted folder trusts: keys, and those whom an authority or an identity provider vouches for."""

    folder: Path
    keys: tuple[TrustedKey, ...]
    authorities: tuple[Authority, ...] = ()
    identities: tuple[Identity, ...] = ()

    @property
    def everybody(self) -> list[Trusted]:
        """Keys, authorities and identities."""
        return [*self.keys, *self.authorities, *self.identities]

    @property
    def names(self) -> str:
        """The names of all, for messages."""
        return ", ".join(entry.name for entry in self.everybody)

    def by_id(self, keyid: str) -> TrustedKey | None:
        """Return the key with this id; None for one that is not trusted."""
        return next((key for key in self.keys if key.keyid == keyid), None)

    def state(self, now: datetime | None = None) -> list[tuple[str, str]]:
        """Return what changes when somebody is trusted no longer, or again."""
        stated = [(key.keyid, key.problem(now)) for key in self.keys]
        for authority in self.authorities:
            serials = sorted(f"{entry.serial_number:x}" for crl in authority.revocations for entry in crl)
            number = f"{authority.certificate.serial_number:x}"
            stated.append((f"{authority.name} {number} {' '.join(serials)}", authority.problem(now)))
        return stated + [(f"{i.name} {i.identity} {i.issuer}", i.problem(now)) for i in self.identities]

    def signer_of(self, content: bytes, bundle: Bundle, where: str, now: datetime | None = None) -> TrustedKey:
        """Return the key of whoever signed a bundle with a certificate, if anybody here vouches for it."""
        try:
            return self._signer_of(content, bundle, where, now)
        except AuditError:
            raise
        except Exception as error:  # whatever a damaged certificate makes of the parsers
            reason = " ".join(str(error).split())[:120] or type(error).__name__
            raise SignatureError(f"{where}: it carries a certificate that cannot be read ({reason}).") from None

    def _signer_of(self, content: bytes, bundle: Bundle, where: str, now: datetime | None) -> TrustedKey:
        from auditor.signing.authorities import certificates_of, key_of_certificate, name_of

        leaf = certificates_of(bundle.certificates[:1], where)[0]
        pinned = self.by_id(key_of_certificate(leaf, "", where).keyid)
        if pinned is not None:
            return pinned
        problems: list[AuditError] = []
        for authority in self.authorities:
            try:
                return authority.key_of(bundle.certificates, where, now)
            except SignatureError as error:
                problems.append(error)
        for identity in self.identities if bundle.is_logged else ():
            try:
                return identity.key_of(content, leaf, where)
            except AuditError as error:
                problems.append(error)
        if problems:
            raise problems[-1]
        who = "an identity of Sigstore" if bundle.is_logged else name_of(leaf, where)
        raise SignatureError(f"{where} is signed by {who}, which {self.folder} does not trust (it has {self.names}).")


def current_signer() -> Signer | None:
    """Return the key that was chosen with ``--sign-key``, else by the environment; None: nothing is signed."""
    path = _chosen.get() or os.environ.get(VARIABLE) or None
    return None if path is None else read_signer(Path(path))


@contextmanager
def signing_with(path: Path | None) -> Iterator[None]:
    """Sign with a key inside the block; the key is read now, so that a bad one stops before any work."""
    if path is not None:
        read_signer(path)
    token = _chosen.set(path)
    try:
        yield
    finally:
        _chosen.reset(token)


def read_signer(path: Path) -> Signer:
    """Return what a value of ``--sign-key`` names: a private key, or ``sigstore``, optionally with ``:FILE``."""
    if path.name == SIGSTORE or path.parts[:1] == (SIGSTORE,) or str(path).startswith(f"{SIGSTORE}:"):
        from auditor.signing.identities import current_identity

        return current_identity(str(path).partition(":")[2])
    return read_signing_key(path)


def read_signing_key(path: Path) -> SigningKey:
    """Read a private key (PEM), and the certificates beside it (``NAME.crt``) where there are any."""
    _check_installed()
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from securesystemslib.signer import CryptoSigner

    try:
        content = path.read_bytes()
    except OSError as error:
        raise OptionError(f"sign key {path}: cannot be read ({error.strerror or error}).") from None
    passphrase = _passphrase(path) if b"ENCRYPTED" in content else None
    try:
        private = load_pem_private_key(content, passphrase)
    except (ValueError, TypeError) as error:
        reason = _reason(error)
        if b"ENCRYPTED" in content:
            raise OptionError(f"sign key {path}: the passphrase does not open it ({reason}).") from None
        raise OptionError(f"sign key {path}: no private key in PEM ({reason}).") from None
    if not isinstance(private, EllipticCurvePrivateKey) or private.curve.name not in CURVES:
        raise OptionError(f"sign key {path}: want an elliptic curve key (P-256); make one with auditor keys new NAME.")
    signer = CryptoSigner(private)
    certificates = _certificates_beside(path, str(signer.public_key.keyid))
    return SigningKey(path.stem, path, signer, certificates, passphrase)


def _reason(error: Exception) -> str:
    """Return the first sentence of a library's error, without what it advises its own callers to do."""
    return " ".join(str(error).split()).partition(". ")[0].rstrip(".")[:80]


def _passphrase(path: Path) -> bytes:
    """Return the passphrase of a key: from the environment, else asked for, once, where somebody can answer."""
    import getpass

    if os.environ.get(PASSPHRASE):
        return os.environ[PASSPHRASE].encode()
    if path not in _passphrases:
        if not sys.stdin.isatty():
            raise OptionError(f"sign key {path}: it has a passphrase; set {PASSPHRASE}.")
        _passphrases[path] = getpass.getpass(f"passphrase of {path}: ").encode()
    return _passphrases[path]


def _certificates_beside(path: Path, keyid: str) -> tuple[bytes, ...]:
    """Return the chain in ``NAME.crt`` beside a private key, as DER; the first must be of this key."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    file = path.with_suffix(".crt")
    if not file.exists():
        return ()
    try:
        chain = x509.load_pem_x509_certificates(file.read_bytes())
    except (OSError, ValueError) as error:
        reason = _reason(error)
        raise OptionError(f"sign key {path}: {file.name} beside it holds no certificates in PEM ({reason}).") from None
    if trusted_key(path.stem, chain[0].public_key(), str(file)).keyid != keyid:
        raise OptionError(f"sign key {path}: the first certificate of {file.name} beside it is of another key.")
    if issues_others(chain[0]):
        raise OptionError(f"sign key {path}: {file.name} beside it may issue others; sign with a key of its own.")
    return tuple(certificate.public_bytes(Encoding.DER) for certificate in chain)


def read_trusted(folder: str | Path) -> TrustedKeys:
    """Read a folder of trusted keys; a file that is no key is an error, and so is a folder without any."""
    _check_installed()
    folder = Path(folder)
    if not folder.is_dir():
        raise OptionError(f"trusted keys {folder}: no such folder; make one with auditor keys new NAME --dir {folder}.")
    paths = sorted(p for p in folder.iterdir() if p.suffix in (".pub", ".crt", ".identity"))
    if not paths:
        raise OptionError(f"trusted keys {folder}: it holds no NAME.pub or NAME.crt; put public keys there.")
    entries = [_read_trusted(path) for path in paths]
    keys = tuple(entry for entry in entries if isinstance(entry, TrustedKey))
    authorities = tuple(entry for entry in entries if isinstance(entry, Authority))
    identities: Any = tuple(entry for entry in entries if entry not in keys and entry not in authorities)
    # alice.pem with alice.crt beside alice.pub is one key that says the same twice
    same = {key.keyid: key for key in sorted(keys, key=lambda key: key.begins is not None)}
    names = [entry.name for entry in (*same.values(), *authorities, *identities)]
    twice = [key for key in keys if same[key.keyid].name != key.name]
    if len(set(names)) != len(names) or twice:
        raise OptionError(f"trusted keys {folder}: a name or a key is there twice; remove one of the two.")
    return TrustedKeys(folder, tuple(sorted(same.values(), key=lambda key: key.name)), authorities, identities)


def new_key(
    name: str, folder: Path, *, expires: datetime | None = None, passphrase: str | None = None
) -> tuple[Path, Path]:
    """Make a key pair ``NAME.pem`` (readable by its owner alone) and ``NAME.pub``; nothing is overwritten."""
    _check_installed()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder.mkdir(parents=True, exist_ok=True)
    private_path, public_path = folder / f"{name}.pem", folder / f"{name}.pub"
    for path in (private_path, public_path):
        if path.exists():
            raise OptionError(f"keys new: {path} is there already; choose another name.")
    private = ec.generate_private_key(ec.SECP256R1())
    locked: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase is not None:
        locked = serialization.BestAvailableEncryption(passphrase.encode())
    content = private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    with os.fdopen(os.open(private_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(content)
    public_path.write_bytes(
        private.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    if expires is not None:
        write_notes(public_path, {"expires": expires})
    return private_path, public_path


def revoke(name: str, folder: Path) -> Trusted:
    """Note beside a trusted key, authority or identity that it no longer counts."""
    entry = _named(name, folder)
    if entry is None:
        raise OptionError(f"keys revoke: {folder} trusts no key {name!r}.")
    notes: dict[str, datetime] = {} if entry.expires is None else {"expires": entry.expires}
    write_notes(folder / f"{name}.pub", {**notes, "revoked": datetime.now(timezone.utc)})
    revoked = _named(name, folder)
    assert revoked is not None
    return revoked


def _named(name: str, folder: Path) -> Trusted | None:
    return next((entry for entry in read_trusted(folder).everybody if entry.name == name), None)


def write_notes(public_path: Path, notes: dict[str, datetime]) -> None:
    """Write the dates of a key beside it."""
    lines = [f"{name} = {moment.astimezone(timezone.utc):%Y-%m-%dT%H:%M:%SZ}" for name, moment in notes.items()]
    public_path.with_name(f"{public_path.stem}.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def trusted_key(
    name: str,
    public: Any,
    where: str | Path,
    *,
    begins: datetime | None = None,
    expires: datetime | None = None,
    revoked: datetime | None = None,
) -> TrustedKey:
    """Return a public key as one to trust; an error for one of another sort."""
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    from securesystemslib.signer import SSlibKey

    if not isinstance(public, EllipticCurvePublicKey) or public.curve.name not in CURVES:
        raise OptionError(f"trusted key {where}: want an elliptic curve key (P-256, P-384 or P-521).")
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return TrustedKey(name, SSlibKey.from_crypto(public), pem, begins, expires, revoked)


def _read_trusted(path: Path) -> TrustedKey | Authority | Identity:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    notes = _dates(path.with_name(f"{path.stem}.toml"))
    if path.suffix == ".identity":
        from auditor.signing.identities import read_identity

        values = _toml(path)
        dates = {name: _moment(value, path) for name, value in values.items() if name in DATES}
        return read_identity(path, values, dates | notes)
    begins = ends = None
    try:
        content = path.read_bytes()
        if path.suffix == ".crt":
            certificate = x509.load_pem_x509_certificate(content)
            begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
            public: Any = certificate.public_key()
        else:
            public = serialization.load_pem_public_key(content)
    except (OSError, ValueError) as error:
        reason = _reason(error)
        raise OptionError(f"trusted key {path}: no public key or certificate in PEM ({reason}).") from None
    if path.suffix == ".crt" and issues_others(certificate):
        return read_authority(path.stem, certificate, path, notes)
    expires = min((moment for moment in (ends, notes.get("expires")) if moment is not None), default=None)
    return trusted_key(path.stem, public, path, begins=begins, expires=expires, revoked=notes.get("revoked"))


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise OptionError(f"trusted key {path}: it is not TOML ({error}).") from None


def _dates(path: Path) -> dict[str, datetime]:
    if not path.exists():
        return {}
    values = _toml(path)
    unknown = sorted(set(values) - set(DATES))
    if unknown:
        raise OptionError(f"trusted key {path}: {unknown[0]!r} is not known here; known are expires and revoked.")
    return {name: _moment(value, path) for name, value in values.items()}


def _moment(value: Any, path: Path) -> datetime:
    if isinstance(value, datetime):
        return value if value.tzinfo is not None else value.replace(tzinfo=timezone.utc)
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=timezone.utc)
    raise OptionError(f"trusted key {path}: want a date such as 2027-01-31, got {value!r}.")


def _check_installed() -> None:
    try:
        import securesystemslib.signer  # noqa: F401
    except ImportError:
        raise OptionError(NEEDED) from None
