"""OIDC: bearer tokens of an identity provider, checked with PyJWT (extra ``oidc``).

A token counts when the provider's key signed it, for this server (``--oidc-audience``), and its time has not run out;
``exp``, ``iat``, ``iss`` and ``aud`` must be there, algorithms with a shared secret are not taken. The keys come from
the provider's own document (``/.well-known/openid-configuration``), over https but on this machine, and are asked for
again when a token names one that is not there, at most every half minute.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from auditor.errors import OptionError
from auditor.service.problems import Problem
from auditor.service.rate_limit import RateLimit
from auditor.service.settings import Settings

log = logging.getLogger(__name__)

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
LEEWAY_S = 30
FETCH_TIMEOUT_S, FETCH_EVERY_S, KEYS_LAST_S = 5.0, 30.0, 3600.0
MAX_DOCUMENT = 1 << 20
MAX_TOKEN = 16 * 1024
NEEDED = "--oidc-issuer needs PyJWT; install it with: pip install 'mlflow-auditor[oidc]'."
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def check_oidc(settings: Settings) -> None:
    """Refuse settings that cannot work before anything starts."""
    if not settings.oidc_issuer:
        return
    try:
        import jwt  # noqa: F401
    except ImportError:
        raise OptionError(NEEDED) from None
    if not settings.oidc_audience:
        raise OptionError("--oidc-issuer: give --oidc-audience too, the name by which tokens mean this server.")
    _check_address(settings.oidc_issuer)


class Tokens:
    """Checks tokens of one issuer."""

    def __init__(
        self, settings: Settings, limit: RateLimit | None = None, fetch: Callable[[str], Any] | None = None
    ) -> None:
        self.issuer, self.audience = settings.oidc_issuer, settings.oidc_audience
        self.scope, self.rate_per_minute = settings.oidc_scope, settings.oidc_rate_per_minute
        self.limit, self.fetch = limit or RateLimit(), fetch or _fetch
        self._keys: dict[str, Any] = {}
        self._fetched = float("-inf")
        self._fetching = asyncio.Lock()

    async def admit(self, token: str) -> str:
        """Return the name of a token's bearer; else the problem says why it is not taken."""
        import jwt

        if len(token) > MAX_TOKEN:
            raise _refused("it is longer than tokens are")
        try:
            key = await self._key(str(jwt.get_unverified_header(token).get("kid", "")))
            claims = jwt.decode(
                token,
                key,
                algorithms=list(ALGORITHMS),
                audience=self.audience,
                issuer=self.issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iat", "iss", "aud"]},
            )
        except jwt.ExpiredSignatureError:
            raise Problem(401, "this token has expired; get a new one.", code="token_expired") from None
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            raise _refused(_reason(error)) from None
        self._check_scope(claims)
        return self._counted(str(claims.get("sub", "")))

    def _check_scope(self, claims: dict[str, Any]) -> None:
        given = claims.get("scope", claims.get("scp", ""))
        scopes = given.split() if isinstance(given, str) else given if isinstance(given, list) else []
        if self.scope and self.scope not in scopes:
            raise Problem(403, f"this token lacks the scope {self.scope}.", code="scope_missing")

    def _counted(self, bearer: str) -> str:
        if self.rate_per_minute is not None:
            caller = hashlib.sha256(f"{self.issuer}\n{bearer}".encode("utf-8", "replace")).digest()
            wait_s = self.limit.wait_s(caller, self.rate_per_minute)
            if wait_s > 0:
                sentence = f"a bearer may ask {self.rate_per_minute:g} times a minute; wait {wait_s:.0f} s."
                raise Problem(429, sentence, code="rate_limited", retry_after_s=int(wait_s) + 1)
        return bearer

    async def _key(self, kid: str) -> Any:
        """Return the provider's key of an id, asking for the keys again when it is not among them."""
        async with self._fetching:
            age_s = time.monotonic() - self._fetched
            if age_s > KEYS_LAST_S or (kid not in self._keys and age_s > FETCH_EVERY_S):
                self._fetched = time.monotonic()
                try:
                    self._keys = await asyncio.get_running_loop().run_in_executor(None, self._ask_for_keys)
                except (OSError, ValueError, KeyError, TypeError) as error:
                    log.error("the keys of %s cannot be read: %s", self.issuer, error)
                    if not self._keys:
                        self._fetched = float("-inf")
        if not self._keys:
            reason = "the identity provider's keys cannot be read, so no token can be checked; try again."
            raise Problem(503, reason, code="provider_unreachable", retry_after_s=5)
        if kid not in self._keys:
            raise _refused("no key of the provider signed it")
        return self._keys[kid]

    def _ask_for_keys(self) -> dict[str, Any]:
        import jwt

        document = self.fetch(self.issuer.rstrip("/") + "/.well-known/openid-configuration")
        if document["issuer"] != self.issuer:
            raise ValueError(f"the document is of {document['issuer']!r}")
        _check_address(document["jwks_uri"])
        keys = jwt.PyJWKSet.from_dict(self.fetch(document["jwks_uri"])).keys
        return {str(key.key_id or ""): key for key in keys}


def looks_like_token(credential: str) -> bool:
    """Whether a credential has the form of a signed token rather than that of a key.

    >>> looks_like_token("eyJh.eyJz.c2ln"), looks_like_token("a-key.of.ours")
    (True, False)
    """
    return credential.startswith("ey") and credential.count(".") == 2


def _refused(reason: str) -> Problem:
    return Problem(401, f"this token is not taken: {reason}.", code="token_refused")


def _reason(error: Exception) -> str:
    import jwt

    reasons = {
        jwt.InvalidAudienceError: "it is for another server",
        jwt.InvalidIssuerError: "another provider issued it",
        jwt.ImmatureSignatureError: "it is not valid yet; see that the clocks agree",
        jwt.MissingRequiredClaimError: "it lacks exp, iat, iss or aud",
        jwt.InvalidAlgorithmError: "its algorithm is not allowed",
        jwt.InvalidSignatureError: "its signature is wrong",
    }
    return next((text for kind, text in reasons.items() if isinstance(error, kind)), "it cannot be read")


def _check_address(address: str) -> None:
    parts = urlsplit(address)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOOPBACK):
        raise OptionError(f"--oidc-issuer {address}: give an https address; http is for this machine only.")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _fetch(address: str) -> Any:
    opener = urllib.request.build_opener(_NoRedirect)
    with opener.open(address, timeout=FETCH_TIMEOUT_S) as answer:
        return json.loads(answer.read(MAX_DOCUMENT))
