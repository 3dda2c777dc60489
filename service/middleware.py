"""Middleware: what every request passes first: request id, host, key, size, time, log line, and one shape of errors.

Errors that BentoML, Starlette or uvicorn word in their own ways leave as ``{"error": {"code", "message",
"request_id"}}``; an exception that nothing caught becomes a 500 without internal details.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from auditor.service.host_check import HostCheck
from auditor.service.json_logs import log_event
from auditor.service.keys import Keys
from auditor.service.oidc import Tokens, looks_like_token
from auditor.service.problems import Problem
from auditor.service.prometheus import REFUSED, REQUEST_DURATION, REQUESTS
from auditor.service.rate_limit import RateLimit
from auditor.service.routes import is_logged, label_of, needs_key
from auditor.service.settings import Settings, from_environment
from auditor.service.tracing import describe_span, trace_id

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

REQUEST_ID = re.compile(rb"^[A-Za-z0-9._-]{1,64}$")


def shared_folder() -> Path | None:
    """Return the folder that the workers of a server share, when there is one."""
    folder = Path(os.environ.get("PROMETHEUS_MULTIPROC_DIR") or "/nonexistent")
    return folder if folder.is_dir() and os.access(folder, os.W_OK) else None


def registered_name(uri: str) -> str:
    """Return the registered name in a model URI; another URI stands for itself.

    >>> registered_name("models:/birds@champion"), registered_name("models:/birds/3"), registered_name("runs:/1/m")
    ('birds', 'birds', 'runs:/1/m')
    """
    match = re.match(r"models:/+([^/@]+)[/@]", uri)
    return match.group(1) if match else uri


class Middleware:
    """ASGI middleware around the whole server."""

    def __init__(self, app: App, settings: Settings | None = None) -> None:
        settings = settings if settings is not None else from_environment()
        self.app, self.settings = app, settings
        limit = RateLimit(shared_folder())
        self.hosts = HostCheck(settings)
        self.keys = (
            Keys(settings.api_keys, grace_s=settings.keys_grace_s, limit=limit)
            if settings.api_keys is not None
            else None
        )
        self.tokens = Tokens(settings, limit) if settings.oidc_issuer else None
        self.model = registered_name(settings.model)
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
            await self._check()
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

    async def _check(self) -> None:
        path, middleware = self.scope["path"], self.middleware
        if is_logged(path):  # questions for health come from anywhere
            middleware.hosts.check(self.headers)
        if path == "/readyz" and middleware.keys is not None and not middleware.keys.is_readable:
            raise Problem(503, "the API keys cannot be read; the log says why.", code="keys_unreadable")
        if middleware.settings.is_guarded and needs_key(path):
            await self._check_credential(path)
        declared = self.headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > middleware.max_body:
            raise self._too_large()

    async def _check_credential(self, path: str) -> None:
        middleware = self.middleware
        credential = self.headers.get(b"x-api-key", b"")
        scheme, _, token = self.headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer":
            credential = token.strip()
        text = credential.decode("utf-8", "surrogateescape")
        if middleware.tokens is not None and (middleware.keys is None or looks_like_token(text)):
            if not text:
                raise Problem(401, "a token is needed; send it as 'Authorization: Bearer TOKEN'.")
            self.note["caller"] = (await middleware.tokens.admit(text))[:100]
        elif middleware.keys is not None:
            self.note["caller"] = middleware.keys.admit(text, path, middleware.model).name

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
                caller=self.note.get("caller") or None,
                code=code or None,
                trace_id=trace_id(),
            )
