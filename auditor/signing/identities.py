"""Identities: signing as somebody whom an identity provider knows, by Sigstore, where there is a network.

The key lives for minutes, its certificate names the identity, and Sigstore's log says when it was used. Whom to believe
lies in a trusted folder as ``NAME.identity``: TOML with ``identity``, ``issuer`` and, for a Sigstore of one's own,
``trust_config``, a file. Verifying needs the network only for a fresh list of Sigstore's own keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.errors import OptionError, SignatureError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

    from auditor.signing.keys import TrustedKey

FIELDS = {"identity", "issuer", "trust_config", "expires", "revoked"}


@dataclass(frozen=True)
class Identity:
    """Somebody whom an identity provider vouches for, such as a workflow or an address."""

    name: str
    identity: str
    issuer: str
    trust_config: Path | None = None
    expires: datetime | None = None
    revoked: datetime | None = None

    @property
    def keyid(self) -> str:
        """A digest of the identity: it has another key each time."""
        return id_of(self.identity, self.issuer)

    def problem(self, now: datetime | None = None) -> str:
        """Return why it does not count now, or nothing."""
        if self.revoked is not None:
            return f"the identity {self.name} was revoked on {self.revoked:%Y-%m-%d}"
        if self.expires is not None and (now or datetime.now(timezone.utc)) >= self.expires:
            return f"the identity {self.name} expired on {self.expires:%Y-%m-%d}"
        return ""

    def key_of(self, content: bytes, certificate: Certificate, where: str) -> TrustedKey:
        """Return the key of a bundle that Sigstore says is this identity's; else an error."""
        from sigstore.models import Bundle
        from sigstore.verify import Verifier, policy

        from auditor.signing.keys import trusted_key

        if problem := self.problem():
            raise SignatureError(f"{where}: {problem}.")
        verifier = Verifier(trusted_root=trust(self.trust_config).trusted_root)
        try:
            whom = policy.Identity(identity=self.identity, issuer=self.issuer)
            verifier.verify_dsse(Bundle.from_json(content), whom)
        except Exception as error:  # whatever a damaged bundle makes of the parsers
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise SignatureError(f"{where}: Sigstore does not say that {self.identity} signed it ({reason}).") from None
        return trusted_key(self.name, certificate.public_key(), where)


@dataclass(frozen=True)
class SigstoreSigner:
    """Signs as the identity of whoever runs the command: a workflow's own, else by logging in with a browser."""

    token: Any
    config: Any
    trust_config: Path | None

    @property
    def name(self) -> str:
        """The identity."""
        return str(self.token.identity)

    @property
    def keyid(self) -> str:
        """A digest of the identity: the key itself is another one each time."""
        return id_of(self.token.identity, self.token.federated_issuer)

    def sign_payload(self, payload: bytes, payload_type: str) -> dict[str, Any]:
        """Return a bundle with the payload, the certificate and the entry of the log."""
        from sigstore.dsse import Statement
        from sigstore.sign import SigningContext

        try:
            with SigningContext.from_trust_config(self.config).signer(self.token) as signer:
                document: dict[str, Any] = json.loads(signer.sign_dsse(Statement(payload)).to_json())
        except Exception as error:  # of many libraries below
            raise SignatureError(f"sigstore: {self.name} could not sign ({_short(error)}).") from None
        return document

    @contextmanager
    def choose_in(self, config: Any) -> Iterator[None]:
        """Choose this identity in a configuration of model-signing."""
        config.use_sigstore_signer(identity_token=str(self.token), trust_config=self.trust_config)
        yield


def id_of(identity: str, issuer: str) -> str:
    """Return a digest that stands for somebody."""
    return sha256(f"{issuer} {identity}".encode()).hexdigest()


def current_identity(file: str = "") -> SigstoreSigner:
    """Return who runs the command, as an identity provider says; ``file`` is the trust config of another Sigstore."""
    from sigstore.oidc import IdentityToken, Issuer, detect_credential

    trust_config = Path(file) if file else None
    config = trust(trust_config)
    try:
        raw = detect_credential() or str(Issuer(config.signing_config.get_oidc_url()).identity_token())
        token = IdentityToken(raw)
    except Exception as error:  # no network, no browser, no login
        raise OptionError(f"sign key sigstore: nobody says who you are ({_short(error)}); sign with a key.") from None
    return SigstoreSigner(token, config, trust_config)


def trust(file: Path | None) -> Any:
    """Return which keys and servers of Sigstore count: from a file, else its own list, else what is known here."""
    try:
        from sigstore.models import ClientTrustConfig
    except ImportError:
        raise OptionError("sigstore needs its packages: pip install 'mlflow-auditor[sign]'.") from None
    try:
        if file is not None:
            return ClientTrustConfig.from_json(file.read_text(encoding="utf-8"))
        try:
            return ClientTrustConfig.production()
        except Exception:  # no network: what came with the package, or was fetched before
            return ClientTrustConfig.production(offline=True)
    except Exception as error:
        where = f"trust config {file}" if file is not None else "Sigstore"
        raise OptionError(f"{where}: its keys cannot be read ({_short(error)}).") from None


def read_identity(path: Path, values: dict[str, Any], dates: dict[str, datetime]) -> Identity:
    """Return an identity from its file."""
    unknown = sorted(set(values) - FIELDS)
    if unknown:
        allowed = ", ".join(sorted(FIELDS))
        raise OptionError(f"trusted key {path}: {unknown[0]!r} is not known here; known are {allowed}.")
    for name in ("identity", "issuer"):
        if not isinstance(values.get(name), str) or not values[name]:
            raise OptionError(f'trusted key {path}: want {name} = "…".')
    config = values.get("trust_config")
    if config is not None and not isinstance(config, str):
        raise OptionError(f"trusted key {path}: trust_config names a file.")
    file = None if config is None else path.parent / config
    return Identity(path.stem, values["identity"], values["issuer"], file, dates.get("expires"), dates.get("revoked"))


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
