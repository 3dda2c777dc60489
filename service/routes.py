"""The addresses of the service. Light to import: the process that only supervises workers needs no torch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from auditor.service.problems import Problem

PAGE = Path(__file__).parent / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)

TABLE = (
    ("POST", "/explain", "explain"),
    ("POST", "/predict", "predict"),
    ("POST", "/explain_batch", "explain_batch"),
    ("GET", "/explainers", "explainers"),
    ("GET", "/model", "model"),
    ("GET", "/samples", "samples"),
    ("GET", "/gallery/{explainer}", "gallery"),
    ("GET", "/v1/models", "kserve_models"),
    ("POST", "/v1/models/{name}:explain", "kserve_explain"),
    ("POST", "/v1/models/{name}:predict", "kserve_predict"),
    ("GET", "/v1/models/{name}", "kserve_model"),
    ("GET", "/openapi.json", "openapi"),
    ("GET", "/docs.json", "openapi"),
    ("GET", "/metrics", "metrics"),
)


def mounted(handlers: Callable[[], Any]) -> Starlette:
    """Return the application for BentoML to mount at ``/``; ``handlers()`` gives the object that answers."""
    routes: list[BaseRoute] = [Route(path, _endpoint(handlers, name), methods=[m]) for m, path, name in TABLE]
    if PAGE.is_dir():
        # "/" too: BentoML's own page there calls a tracker on the network
        routes += [Route(path, _to_page, methods=["GET"]) for path in ("/", "/ui")]
        routes += [Mount("/ui", _Page(directory=PAGE, html=True))]
    return Starlette(routes=routes)


def _endpoint(handlers: Callable[[], Any], name: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            found: Response = await getattr(handlers(), name)(request)
            return found
        except Problem as problem:
            scope = request.scope
            scope["auditor.told"] = True
            scope.get("auditor.note", {})["code"] = problem.code
            headers = {k.decode(): v.decode() for k, v in problem.headers()}
            return Response(problem.body(scope.get("auditor.request_id", "")), problem.status, headers)

    return answer


async def _to_page(request: Request) -> Response:
    return RedirectResponse("ui/", 307)  # relative: the service may stand below a path of a proxy


class _Page(StaticFiles):
    """The page's files; a strict policy lets it load nothing but its own and talk to nobody but us."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        answer = super().file_response(*args, **kwargs)
        answer.headers.update({"content-security-policy": POLICY, "cache-control": "no-cache"})
        return answer
