"""The middleware: keys, limits, time-outs and the one shape of errors, with a made-up application behind it."""

import asyncio
import json

import pytest

from auditor.service.middleware import Middleware
from auditor.service.settings import Settings


def visit(app, settings=None, *, headers=(), body=(b"",), path="/explain", pause_s=0.0):
    """Send one request through the middleware; return status, headers and JSON body."""
    middleware = Middleware(app, settings or Settings(log_requests=False))
    return ask(middleware, headers, body=body, path=path, pause_s=pause_s)


def ask(middleware, headers, *, body=(b"",), path="/explain", pause_s=0.0):
    """Send one request through a middleware that is there."""
    sent = []
    chunks = list(body)

    async def receive():
        if not chunks:
            await asyncio.sleep(3600)
        if pause_s:
            await asyncio.sleep(pause_s)
        chunk = chunks.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": bool(chunks)}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers)}
    asyncio.run(middleware(scope, receive, send))
    head = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
    text = b"".join(m.get("body", b"") for m in sent[1:])
    return sent[0]["status"], head, json.loads(text) if text else None


async def reads_all(scope, receive, send):
    more = True
    while more:
        more = (await receive()).get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


def test_an_undeclared_body_is_counted_as_it_comes():
    small = Settings(max_body_mb=0.001, log_requests=False)
    assert visit(reads_all, small, body=[b"x" * 500] * 2)[0] == 200
    status, head, body = visit(reads_all, small, body=[b"x" * 500] * 5)
    assert status == 413
    assert body["error"]["code"] == "too_large"
    assert head["connection"] == "close"


def test_a_stalled_upload_ends():
    slow = Settings(upload_timeout_s=0.05, log_requests=False)
    status, _, body = visit(reads_all, slow, body=[b"x"] * 3, pause_s=3600)
    assert status == 408
    assert body["error"]["code"] == "upload_timeout"


def test_foreign_errors_are_given_in_our_shape():
    async def foreign(scope, receive, send):
        await send({"type": "http.response.start", "status": 405, "headers": [(b"allow", b"GET")]})
        await send({"type": "http.response.body", "body": b"<html>Method Not Allowed</html>"})

    status, head, body = visit(foreign)
    assert status == 405
    assert head["allow"] == "GET"
    assert body["error"]["code"] == "method_not_allowed"
    assert body["error"]["request_id"] == head["x-request-id"]


def test_an_uncaught_exception_is_a_500_without_internal_details():
    async def broken(scope, receive, send):
        raise RuntimeError("the secret")

    status, _, body = visit(broken)
    assert status == 500
    assert body["error"]["code"] == "internal"
    assert "secret" not in json.dumps(body)


@pytest.fixture
def keyed(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# staff\nfirst-key\n\nsecond-key\n")
    return path


def test_keys_open_and_others_do_not(keyed):
    settings = Settings(api_keys=keyed, log_requests=False)
    assert visit(reads_all, settings)[0] == 401
    for header in ((b"x-api-key", b"first-key"), (b"authorization", b"Bearer second-key")):
        assert visit(reads_all, settings, headers=[header])[0] == 200
    for header in ((b"x-api-key", b"first"), (b"authorization", b"Basic first-key"), (b"x-api-key", b"# staff")):
        status, head, body = visit(reads_all, settings, headers=[header])
        assert status == 401
        assert head["www-authenticate"] == "Bearer"
        assert body["error"]["code"] == "unauthorized"
    for path in ("/livez", "/readyz", "/ui/app.js"):
        assert visit(reads_all, settings, path=path)[0] == 200
    assert visit(reads_all, settings, path="/metrics")[0] == 401


def test_the_reason_of_a_refusal_is_in_the_answer(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text("[[keys]]\nkey = 'app'\nroutes = ['/predict']\n[[keys]]\nkey = 'slow'\nrate_per_minute = 1\n")
    settings = Settings(api_keys=path, model="models:/digits@champion", log_requests=False)
    app, slow = [(b"x-api-key", b"app")], [(b"x-api-key", b"slow")]
    assert visit(reads_all, settings, headers=app, path="/predict")[0] == 200
    status, _, answer = visit(reads_all, settings, headers=app)
    assert (status, answer["error"]["code"]) == (403, "route_not_allowed")
    assert "/predict only" in answer["error"]["message"]
    both = Middleware(reads_all, settings)
    assert ask(both, slow)[0] == 200
    status, head, answer = ask(both, slow)
    assert (status, answer["error"]["code"]) == (429, "rate_limited")
    assert int(head["retry-after"]) > 50


def test_keys_that_cannot_be_read_turn_readiness_red_and_let_nobody_in(tmp_path):
    """Old code answered 500 to everything after a worker had started without its file."""
    settings = Settings(api_keys=tmp_path / "keys", log_requests=False)
    for path in ("/readyz", "/explain"):
        status, _, answer = visit(reads_all, settings, path=path)
        assert (status, answer["error"]["code"]) == (503, "keys_unreadable")
    assert visit(reads_all, settings, path="/livez")[0] == 200
    (tmp_path / "keys").write_text("first-key\n")
    assert visit(reads_all, settings, path="/readyz")[0] == 200


def test_a_name_that_was_pointed_here_gets_nothing():
    """Old code answered every Host: a page of any site could read the service by DNS rebinding."""
    for host, status in ((b"evil.example", 403), (b"127.0.0.1:3000", 200)):
        assert visit(reads_all, headers=[(b"host", host)])[0] == status
        assert visit(reads_all, headers=[(b"host", host)], path="/livez")[0] == 200
    foreign = [(b"host", b"127.0.0.1:3000"), (b"origin", b"https://evil.example")]
    status, _, answer = visit(reads_all, headers=foreign)
    assert (status, answer["error"]["code"]) == (403, "origin_not_allowed")


def test_tokens_and_keys_side_by_side(tmp_path, keyed):
    settings = Settings(api_keys=keyed, oidc_issuer="https://id.example", oidc_audience="a", log_requests=False)
    middleware = Middleware(reads_all, settings)
    middleware.tokens.fetch = lambda address: {}
    assert ask(middleware, [(b"x-api-key", b"first-key")])[0] == 200
    assert ask(middleware, [(b"authorization", b"Bearer ey.ey.x")])[0] == 401
    only_tokens = Middleware(reads_all, settings.model_copy(update={"api_keys": None}))
    status, _, answer = ask(only_tokens, [])
    assert status == 401
    assert "a token is needed" in answer["error"]["message"]
