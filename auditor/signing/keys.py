"""Keys: the private key that signs, and the folder of public keys that are trusted.

A trusted folder holds ``NAME.pub`` (a public key) or ``NAME.crt`` (a certificate, valid between its own dates), and
beside it, optionally, ``NAME.toml`` with ``expires`` or ``revoked``, each a date. Keys are elliptic curves P-256, P-384
or P-521 as PEM: what OpenSSF model-signing and cosign take.
"""

from __future__ import annotations

import contextvars
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.errors import OptionError

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner, SSlibKey

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VARIABLE = "AUDITOR_SIGN_KEY"
NEEDED = "signing needs its packages; install them with: pip install 'mlflow-auditor[sign]'."
CURVES = ("secp256r1", "secp384r1", "secp521r1")

_chosen: contextvars.ContextVar[Path | None] = contextvars.ContextVar("sign_key", default=None)


@dataclass(frozen=True)
class SigningKey:
    """A private key to sign with; its name is that of its file."""

    name: str
    path: Path
    signer: CryptoSigner

    @property
    def keyid(self) -> str:
        """The digest by which envelopes name the key."""
        return str(self.signer.public_key.keyid)


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
    """The keys of a trusted folder."""

    folder: Path
    keys: tuple[TrustedKey, ...]

    def by_id(self, keyid: str) -> TrustedKey | None:
        """Return the key with this id; None for one that is not trusted."""
        return next((key for key in self.keys if key.keyid == keyid), None)


def current_signer() -> SigningKey | None:
    """Return the key that was chosen with ``--sign-key``, else by the environment; None: nothing is signed."""
    path = _chosen.get() or os.environ.get(VARIABLE) or None
    return None if path is None else read_signing_key(Path(path))


@contextmanager
def signing_with(path: Path | None) -> Iterator[None]:
    """Sign with a key inside the block; the key is read now, so that a bad one stops before any work."""
    if path is not None:
        read_signing_key(path)
    token = _chosen.set(path)
    try:
        yield
    finally:
        _chosen.reset(token)


def read_signing_key(path: Path) -> SigningKey:
    """Read a private key (PEM, not encrypted)."""
    _check_installed()
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from securesystemslib.signer import CryptoSigner

    try:
        private = load_pem_private_key(path.read_bytes(), None)
    except OSError as error:
        raise OptionError(f"sign key {path}: cannot be read ({error.strerror or error}).") from None
    except (ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:80]
        raise OptionError(f"sign key {path}: no private key in PEM without a passphrase ({reason}).") from None
    if not isinstance(private, EllipticCurvePrivateKey) or private.curve.name not in CURVES:
        raise OptionError(f"sign key {path}: want an elliptic curve key (P-256); make one with auditor keys new NAME.")
    return SigningKey(path.stem, path, CryptoSigner(private))


def read_trusted(folder: str | Path) -> TrustedKeys:
    """Read a folder of trusted keys; a file that is no key is an error, and so is a folder without any."""
    _check_installed()
    folder = Path(folder)
    if not folder.is_dir():
        raise OptionError(f"trusted keys {folder}: no such folder; make one with auditor keys new NAME --dir {folder}.")
    paths = sorted(p for p in folder.iterdir() if p.suffix in (".pub", ".crt"))
    if not paths:
        raise OptionError(f"trusted keys {folder}: it holds no NAME.pub or NAME.crt; put public keys there.")
    keys = tuple(_read_trusted(path) for path in paths)
    names = [key.name for key in keys]
    if len(set(names)) != len(names) or len({key.keyid for key in keys}) != len(keys):
        raise OptionError(f"trusted keys {folder}: a name or a key is there twice; remove one of the two.")
    return TrustedKeys(folder, keys)


def new_key(name: str, folder: Path, *, expires: datetime | None = None) -> tuple[Path, Path]:
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
    content = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with os.fdopen(os.open(private_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
        stream.write(content)
    public_path.write_bytes(
        private.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    if expires is not None:
        write_notes(public_path, {"expires": expires})
    return private_path, public_path


def revoke(name: str, folder: Path) -> TrustedKey:
    """Note beside a trusted key that it no longer counts."""
    key = next((key for key in read_trusted(folder).keys if key.name == name), None)
    if key is None:
        raise OptionError(f"keys revoke: {folder} trusts no key {name!r}.")
    notes: dict[str, datetime] = {} if key.expires is None else {"expires": key.expires}
    write_notes(folder / f"{name}.pub", {**notes, "revoked": datetime.now(timezone.utc)})
    return next(key for key in read_trusted(folder).keys if key.name == name)


def write_notes(public_path: Path, notes: dict[str, datetime]) -> None:
    """Write the dates of a key beside it."""
    lines = [f"{name} = {moment.astimezone(timezone.utc):%Y-%m-%dT%H:%M:%SZ}" for name, moment in notes.items()]
    public_path.with_suffix(".toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _read_trusted(path: Path) -> TrustedKey:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from securesystemslib.signer import SSlibKey

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
        reason = " ".join(str(error).split())[:80]
        raise OptionError(f"trusted key {path}: no public key or certificate in PEM ({reason}).") from None
    if not isinstance(public, EllipticCurvePublicKey) or public.curve.name not in CURVES:
        raise OptionError(f"trusted key {path}: want an elliptic curve key (P-256, P-384 or P-521).")
    pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    notes = _notes(path.with_suffix(".toml"))
    expires = min((moment for moment in (ends, notes.get("expires")) if moment is not None), default=None)
    return TrustedKey(path.stem, SSlibKey.from_crypto(public), pem, begins, expires, notes.get("revoked"))


def _notes(path: Path) -> dict[str, datetime]:
    if not path.exists():
        return {}
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise OptionError(f"trusted key {path}: it is not TOML ({error}).") from None
    unknown = sorted(set(values) - {"expires", "revoked"})
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
