"""The middleware: keys, limits, time-outs and the one shape of errors, with a made-up application behind it."""

import asyncio
import json

import pytest

from auditor.service.middleware import Middleware
from auditor.service.settings import Settings


def visit(app, settings=None, *, headers=(), body=(b"",), path="/explain", pause_s=0.0):
    """Send one request through the middleware; return status, headers and JSON body."""
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
    middleware = Middleware(app, settings or Settings(log_requests=False))
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
