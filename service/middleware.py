"""Front: what every request passes first, whoever answers it: id, key, size, time, log line, and one shape of errors.

Errors that BentoML, Starlette or uvicorn word in their own ways leave as ``{"error": {"code", "message",
"request_id"}}``; what nobody caught becomes a 500 without a trace of the inside.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from auditor.service.keys import Keys
from auditor.service.json_logs import tell
from auditor.service.prometheus import REFUSED, REQUEST_DURATION, REQUESTS
from auditor.service.problems import Problem
from auditor.service.settings import Settings, from_environment
from auditor.service.tracing import tell_span, trace_id

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

REQUEST_ID = re.compile(rb"^[A-Za-z0-9._-]{1,64}$")
OPEN = ("/livez", "/readyz", "/healthz", "/ui", "/openapi.json", "/docs.json")  # no key needed
QUIET = frozenset({"/livez", "/readyz", "/healthz", "/metrics"})  # no log line
ROUTES = frozenset({"/explain", "/predict", "/explain_batch", "/explainers", "/model", "/samples", "/metrics"})


class Front:
    """ASGI middleware around the whole server."""

    def __init__(self, app: App, settings: Settings | None = None) -> None:
        settings = settings if settings is not None else from_environment()
        self.app, self.settings = app, settings
        self.keys = Keys(settings.api_keys) if settings.api_keys is not None else None
        self.max_body = int(settings.max_body_mb * 1024 * 1024)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        visit = _Visit(scope, receive, send, self)
        await visit.answer()


class _Visit:
    """One request on its way through."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, front: Front) -> None:
        self.scope, self._receive, self._send, self.front = scope, receive, send, front
        self.started = time.perf_counter()
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        given = self.headers.get(b"x-request-id", b"")
        self.request_id = given.decode() if REQUEST_ID.match(given) else secrets.token_hex(12)
        scope["auditor.request_id"] = self.request_id
        self.note: dict[str, str] = {}
        scope["auditor.note"] = self.note
        self.status, self.code = 0, ""
        self.n_body = 0
        self.deadline = 0.0
        self.is_foreign_error = False
        self.extra_headers: list[tuple[bytes, bytes]] = []

    async def answer(self) -> None:
        """Check, pass on, and mend what comes back."""
        tell_span(request_id=self.request_id, route=route_of(self.scope["path"]))  # it ends with the answer
        try:
            self._check()
            await self.front.app(self.scope, self.receive, self.send)
            if self.is_foreign_error:
                not_ready = self.scope["path"] == "/readyz" and self.status == 503
                reason = "the model is not loaded yet; the log tells why." if not_ready else ""
                problem = Problem(self.status, reason, code="not_ready" if not_ready else None)
                await self._tell(problem, self.extra_headers)
        except Problem as problem:
            await self._tell(problem)
        except Exception as error:
            if type(error).__name__ in ("ClientDisconnect", "CancelledError"):
                self.status = self.status or 499
            else:
                log.exception("request %s failed", self.request_id)
                await self._tell(Problem(500))
        finally:
            self._account()

    def _check(self) -> None:
        path, front = self.scope["path"], self.front
        if front.keys is not None and not path.startswith(OPEN) and path != "/":
            key = self.headers.get(b"x-api-key", b"")
            scheme, _, token = self.headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() == b"bearer":
                key = token.strip()
            if not front.keys.opens(key.decode("utf-8", "surrogateescape")):
                raise Problem(401)
        declared = self.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > front.max_body:
            raise self._too_large()

    async def receive(self) -> MutableMapping[str, Any]:
        """Pass the body on, counted and timed: the whole of it must arrive within the upload's time."""
        if self.status:  # answered already: this waits for the client to go
            return await self._receive()
        now = time.perf_counter()
        if not self.deadline:
            self.deadline = now + self.front.settings.upload_timeout_s
        try:
            message = await asyncio.wait_for(self._receive(), max(0.001, self.deadline - now))
        except asyncio.TimeoutError:
            raise Problem(408) from None
        if message["type"] == "http.request":
            self.n_body += len(message.get("body", b""))
            if self.n_body > self.front.max_body:
                raise self._too_large()
            if not message.get("more_body", False):
                self.deadline = float("inf")
        return message

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Pass the answer on with its id; hold back errors that are not in our shape."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = list(message.get("headers", []))
            if self.status >= 400 and not self.scope.get("auditor.told"):
                self.is_foreign_error = True
                self.extra_headers = [(k, v) for k, v in headers if k.lower() in (b"allow", b"retry-after")]
                return
            headers.append((b"x-request-id", self.request_id.encode()))
            headers.append((b"x-content-type-options", b"nosniff"))
            message = {**message, "headers": headers}
        elif self.is_foreign_error:
            return
        await self._send(message)

    async def _tell(self, problem: Problem, extra: list[tuple[bytes, bytes]] | None = None) -> None:
        if self.status and not self.is_foreign_error:
            return  # the answer has begun; nothing can be mended
        self.status, self.code = problem.status, problem.code
        body = b"" if self.scope["method"] == "HEAD" else problem.body(self.request_id)
        headers = [
            *problem.headers(),
            *(extra or []),
            (b"content-length", str(len(problem.body(self.request_id))).encode()),
            (b"x-request-id", self.request_id.encode()),
        ]
        if problem.status in (408, 413):
            headers.append((b"connection", b"close"))  # the rest of the body is not wanted
        await self._send({"type": "http.response.start", "status": problem.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def _too_large(self) -> Problem:
        limit = self.front.settings.max_body_mb
        return Problem(413, f"the body is larger than {limit:g} MB; send a smaller image.")

    def _account(self) -> None:
        path = self.scope["path"]
        took = time.perf_counter() - self.started
        if path in QUIET:
            return
        route = route_of(path)
        status = self.status or 499
        REQUESTS.labels(route, str(status)).inc()
        REQUEST_DURATION.labels(route).observe(took)
        code = self.code or self.note.get("code", "")
        if code:
            REFUSED.labels(code).inc()
        if self.front.settings.log_requests:
            tell(
                "info" if status < 500 else "error",
                "request",
                request_id=self.request_id,
                method=self.scope["method"],
                route=route,
                status=status,
                ms=round(took * 1000, 2),
                bytes_in=self.n_body,
                version=self.note.get("version"),
                code=code or None,
                trace_id=trace_id(),
            )


def route_of(path: str) -> str:
    """Return a name for the path out of a small set: metrics and logs must not grow with what callers type.

    >>> route_of("/explain"), route_of("/gallery/concepts"), route_of("/wp-admin")
    ('/explain', '/gallery', 'other')
    """
    if path in ROUTES:
        return path
    for prefix in ("/gallery", "/ui", "/v1/models", "/openapi.json", "/docs.json"):
        if path.startswith(prefix):
            return prefix
    return "other"
