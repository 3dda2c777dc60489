"""Middleware: what every request passes first: request id, API key, size, time, log line, and one shape of errors.

Errors that BentoML, Starlette or uvicorn word in their own ways leave as ``{"error": {"code", "message",
"request_id"}}``; an exception that nothing caught becomes a 500 without internal details.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from auditor.service.json_logs import log_event
from auditor.service.keys import Keys
from auditor.service.problems import Problem
from auditor.service.prometheus import REFUSED, REQUEST_DURATION, REQUESTS
from auditor.service.routes import is_logged, label_of, needs_key
from auditor.service.settings import Settings, from_environment
from auditor.service.tracing import describe_span, trace_id

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

REQUEST_ID = re.compile(rb"^[A-Za-z0-9._-]{1,64}$")


class Middleware:
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
        await _Exchange(scope, receive, send, self).answer()


class _Exchange:
    """One request and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, middleware: Middleware) -> None:
        self.scope, self._receive, self._send, self.middleware = scope, receive, send, middleware
        self.started = time.perf_counter()
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        header = self.headers.get(b"x-request-id", b"")
        self.request_id = header.decode() if REQUEST_ID.match(header) else secrets.token_hex(12)
        scope["auditor.request_id"] = self.request_id
        self.note: dict[str, str] = {}
        scope["auditor.note"] = self.note
        self.status, self.code = 0, ""
        self.n_body = 0
        self.deadline = 0.0
        self.is_foreign_error = False
        self.extra_headers: list[tuple[bytes, bytes]] = []

    async def answer(self) -> None:
        """Check the request, pass it on, and put foreign errors into our shape."""
        describe_span(request_id=self.request_id, route=label_of(self.scope["path"]))  # it ends with the answer
        try:
            self._check()
            await self.middleware.app(self.scope, self.receive, self.send)
            if self.is_foreign_error:
                not_ready = self.scope["path"] == "/readyz" and self.status == 503
                reason = "the model is not loaded yet; the log says why." if not_ready else ""
                problem = Problem(self.status, reason, code="not_ready" if not_ready else None)
                await self._send_problem(problem, self.extra_headers)
        except Problem as problem:
            await self._send_problem(problem)
        except Exception as error:
            if type(error).__name__ in ("ClientDisconnect", "CancelledError"):
                self.status = self.status or 499
            else:
                log.exception("request %s failed", self.request_id)
                await self._send_problem(Problem(500))
        finally:
            self._account()

    def _check(self) -> None:
        path, middleware = self.scope["path"], self.middleware
        if middleware.keys is not None and needs_key(path):
            key = self.headers.get(b"x-api-key", b"")
            scheme, _, token = self.headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() == b"bearer":
                key = token.strip()
            if not middleware.keys.accepts(key.decode("utf-8", "surrogateescape")):
                raise Problem(401)
        declared = self.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > middleware.max_body:
            raise self._too_large()

    async def receive(self) -> MutableMapping[str, Any]:
        """Pass the body on, counted and timed: the whole of it must arrive within the upload's time."""
        if self.status:  # answered already: this waits for the client to go
            return await self._receive()
        now = time.perf_counter()
        if not self.deadline:
            self.deadline = now + self.middleware.settings.upload_timeout_s
        try:
            message = await asyncio.wait_for(self._receive(), max(0.001, self.deadline - now))
        except asyncio.TimeoutError:
            raise Problem(408) from None
        if message["type"] == "http.request":
            self.n_body += len(message.get("body", b""))
            if self.n_body > self.middleware.max_body:
                raise self._too_large()
            if not message.get("more_body", False):
                self.deadline = float("inf")
        return message

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Pass the answer on with its id; hold back errors that are not in our shape."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = list(message.get("headers", []))
            if self.status >= 400 and not self.scope.get("auditor.is_problem"):
                self.is_foreign_error = True
                self.extra_headers = [(k, v) for k, v in headers if k.lower() in (b"allow", b"retry-after")]
                return
            headers.append((b"x-request-id", self.request_id.encode()))
            headers.append((b"x-content-type-options", b"nosniff"))
            message = {**message, "headers": headers}
        elif self.is_foreign_error:
            return
        await self._send(message)

    async def _send_problem(self, problem: Problem, extra: list[tuple[bytes, bytes]] | None = None) -> None:
        if self.status and not self.is_foreign_error:
            return  # the answer has begun; nothing can be changed
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
        limit = self.middleware.settings.max_body_mb
        return Problem(413, f"the body is larger than {limit:g} MB; send a smaller image.")

    def _account(self) -> None:
        path = self.scope["path"]
        took = time.perf_counter() - self.started
        if not is_logged(path):
            return
        route = label_of(path)
        status = self.status or 499
        REQUESTS.labels(route, str(status)).inc()
        REQUEST_DURATION.labels(route).observe(took)
        code = self.code or self.note.get("code", "")
        if code:
            REFUSED.labels(code).inc()
        if self.middleware.settings.log_requests:
            log_event(
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
