"""OIDC: tokens of the provider and nobody else's, with a key pair made here and documents served by a function."""

import asyncio
import json
import time

import pytest

from auditor.errors import OptionError
from auditor.service.oidc import FETCH_EVERY_S, Tokens, check_oidc
from auditor.service.problems import Problem
from auditor.service.rate_limit import RateLimit
from auditor.service.settings import Settings

jwt = pytest.importorskip("jwt")
from cryptography.hazmat.primitives.asymmetric import ec, rsa  # noqa: E402

ISSUER = "https://id.example"
SETTINGS = Settings(oidc_issuer=ISSUER, oidc_audience="auditor")


class Provider:
    """An identity provider: its documents by address, and how often each was asked for."""

    def __init__(self) -> None:
        self.keys = {"one": rsa.generate_private_key(public_exponent=65537, key_size=2048)}
        self.asked: list[str] = []
        self.is_reachable = True

    def fetch(self, address: str):
        self.asked.append(address)
        if not self.is_reachable:
            raise OSError("no route")
        if address == f"{ISSUER}/.well-known/openid-configuration":
            return {"issuer": ISSUER, "jwks_uri": f"{ISSUER}/keys"}
        assert address == f"{ISSUER}/keys"
        algorithm = jwt.algorithms.RSAAlgorithm
        listed = [json.loads(algorithm.to_jwk(key.public_key())) | {"kid": kid} for kid, key in self.keys.items()]
        return {"keys": [{**key, "alg": "RS256", "use": "sig"} for key in listed]}

    def token(self, kid="one", key=None, algorithm="RS256", **claims) -> str:
        now = int(time.time())
        claims = {"iss": ISSUER, "aud": "auditor", "sub": "ann", "iat": now, "exp": now + 60, **claims}
        claims = {name: value for name, value in claims.items() if value is not None}
        return jwt.encode(claims, key or self.keys[kid], algorithm, headers={"kid": kid})


@pytest.fixture
def provider():
    return Provider()


def admit(tokens: Tokens, *given: str):
    """Return what each token gives: the bearer's name, or status and code."""

    async def story():
        answers = []
        for token in given:
            try:
                answers.append(await tokens.admit(token))
            except Problem as problem:
                answers.append((problem.status, problem.code))
        return answers

    return asyncio.run(story())


def test_a_token_of_the_provider_is_taken_and_its_keys_are_asked_for_once(provider):
    tokens = Tokens(SETTINGS, fetch=provider.fetch)
    assert admit(tokens, provider.token(), provider.token(sub="bob")) == ["ann", "bob"]
    assert len(provider.asked) == 2


@pytest.mark.parametrize(
    ("claims", "code"),
    [
        ({"exp": 1}, "token_expired"),
        ({"exp": None}, "token_refused"),
        ({"iat": None}, "token_refused"),
        ({"aud": "another"}, "token_refused"),
        ({"aud": None}, "token_refused"),
        ({"iss": "https://evil.example"}, "token_refused"),
        ({"nbf": int(time.time()) + 3600}, "token_refused"),
    ],
    ids=["expired", "no end", "no time", "audience", "no audience", "issuer", "not yet"],
)
def test_a_token_that_is_not_for_us_now_is_not(provider, claims, code):
    assert admit(Tokens(SETTINGS, fetch=provider.fetch), provider.token(**claims)) == [(401, code)]


def test_a_token_that_somebody_else_signed_is_not(provider):
    foreign = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    curve = ec.generate_private_key(ec.SECP256R1())
    public = provider.fetch(f"{ISSUER}/keys")["keys"][0]["n"]
    forged = [
        provider.token(key=foreign),
        provider.token(key=curve, algorithm="ES256"),
        provider.token(key=public, algorithm="HS256"),  # what is public as a shared secret
        jwt.encode({"sub": "ann"}, None, "none", headers={"kid": "one"}),
        provider.token()[:-4] + "AAAA",
        "ey.ey.x",
        "",
        "x" * 20_000,
    ]
    tokens = Tokens(SETTINGS, fetch=provider.fetch)
    assert admit(tokens, *forged) == [(401, "token_refused")] * len(forged)


def test_a_new_key_is_asked_for_but_not_at_every_stranger_s_wish(provider, monkeypatch):
    tokens = Tokens(SETTINGS, fetch=provider.fetch)
    assert admit(tokens, provider.token()) == ["ann"]
    provider.keys["two"] = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    assert admit(tokens, *[provider.token("two")] * 5) == [(401, "token_refused")] * 5
    assert len(provider.asked) == 2
    tokens._fetched -= FETCH_EVERY_S + 1
    assert admit(tokens, provider.token("two"), provider.token()) == ["ann", "ann"]


def test_a_provider_out_of_reach_lets_nobody_in_and_is_asked_again(provider):
    provider.is_reachable = False
    tokens = Tokens(SETTINGS, fetch=provider.fetch)
    assert admit(tokens, provider.token()) == [(503, "provider_unreachable")]
    provider.is_reachable = True
    assert admit(tokens, provider.token()) == ["ann"]
    provider.is_reachable = False
    tokens._fetched -= 10_000  # its keys are old and cannot be renewed: they stay
    assert admit(tokens, provider.token()) == ["ann"]


def test_scope_and_rate(provider):
    scoped = Tokens(SETTINGS.model_copy(update={"oidc_scope": "explain"}), fetch=provider.fetch)
    given = [provider.token(scope="read explain"), provider.token(scp=["explain"]), provider.token(scope="explainer")]
    assert admit(scoped, *given, provider.token()) == ["ann", "ann", (403, "scope_missing"), (403, "scope_missing")]
    slow = SETTINGS.model_copy(update={"oidc_rate_per_minute": 2.0})
    limited = Tokens(slow, RateLimit(clock=lambda: 5.0), provider.fetch)
    given = [provider.token()] * 3 + [provider.token(sub="bob")]
    assert admit(limited, *given) == ["ann", "ann", (429, "rate_limited"), "bob"]


def test_a_document_of_another_issuer_is_not_believed(provider):
    def fetch(address):
        return {**provider.fetch(address), **({"issuer": "https://evil.example"} if "well-known" in address else {})}

    assert admit(Tokens(SETTINGS, fetch=fetch), provider.token()) == [(503, "provider_unreachable")]


def test_settings_that_cannot_work_are_refused():
    check_oidc(Settings())
    check_oidc(SETTINGS)
    check_oidc(Settings(oidc_issuer="http://127.0.0.1:8080", oidc_audience="a"))
    for settings in (Settings(oidc_issuer=ISSUER), Settings(oidc_issuer="http://id.example", oidc_audience="a")):
        with pytest.raises(OptionError):
            check_oidc(settings)
