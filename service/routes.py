"""Routes: the one table of the service's addresses, and the application that answers at them.

The OpenAPI document, the middleware (which paths need a key, which are logged under which name), the pages of the
documentation and the tests all read this table. Light to import: the process that only supervises workers needs no
torch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from auditor.service import types
from auditor.service.problems import Problem

PAGE = Path(__file__).parent / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)

# what a setting's limit answers with when it is exceeded
STATUS_OF_LIMIT = {
    "upload_timeout_s": 408,
    "max_body_mb": 413,
    "max_pixels": 413,
    "decode_timeout_s": 413,
    "decode_memory_mb": 413,
    "queue": 429,
    "slow_queue": 429,
    "request_timeout_s": 503,
}
ALL_LIMITS = tuple(STATUS_OF_LIMIT)
PARAMETERS = {
    "name": ("Registered name of the model.", "digits"),
    "explainer": ("Name of an attached explainer.", "concepts"),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One address: its handler, what goes in and comes out, what limits it, and what the documentation says."""

    method: str
    path: str
    handler: str  # method of `handlers.Routes`; "" for what BentoML answers itself, "page" for the page
    summary: str
    request: type[types.Message] | None = None
    images: str = ""  # field of the request that holds the image or images; "" when a form is not taken
    answer: type[types.Message] | None = None  # None: not JSON, or JSON that has no type
    is_list: bool = False  # a list of answers
    limits: tuple[str, ...] = ()  # settings that limit a request here
    needs_key: bool = True  # where the server wants keys
    is_logged: bool = True  # a log line and metrics per request
    in_document: bool = True

    @property
    def parameters(self) -> list[str]:
        """Return the names inside the path."""
        return [part.partition("}")[0] for part in self.path.split("{")[1:]]

    @property
    def label(self) -> str:
        """Return the name in logs and metrics: the path up to its first parameter."""
        return self.path.partition("{")[0].rstrip("/") or "/"

    @property
    def errors(self) -> tuple[int, ...]:
        """Return the statuses of the errors that a caller may get."""
        if not self.handler:
            return (503,) if self.path == "/readyz" else ()
        statuses = {500, 503} | {STATUS_OF_LIMIT[name] for name in self.limits}
        statuses |= {401, 403, 429} if self.needs_key else {403}
        statuses |= {404} if self.parameters else set()
        statuses |= {400, 415, 422} if self.request is not None else set()
        return tuple(sorted(statuses))


TABLE = (
    Entry(
        "POST",
        "/explain",
        "explain",
        "Explain one image: prediction, concepts with signed contributions, stability.",
        types.ExplainRequest,
        "image",
        types.ExplainAnswer,
        limits=ALL_LIMITS,
    ),
    Entry(
        "POST",
        "/predict",
        "predict",
        "Predict one image.",
        types.PredictRequest,
        "image",
        types.PredictAnswer,
        limits=ALL_LIMITS,
    ),
    Entry(
        "POST",
        "/explain_batch",
        "explain_batch",
        "Explain several images; a bad one gets its error in its place.",
        types.ExplainBatchRequest,
        "images",
        types.ExplainBatchAnswer,
        limits=ALL_LIMITS,
    ),
    Entry(
        "GET",
        "/explainers",
        "explainers",
        "Everything attached to the model, verified.",
        answer=types.ExplainerAnswer,
        is_list=True,
    ),
    Entry("GET", "/model", "model", "The model that is served.", answer=types.ModelInfo),
    Entry(
        "GET",
        "/samples",
        "samples",
        "A few images to try; empty when the server was given none.",
        answer=types.Sample,
        is_list=True,
    ),
    Entry(
        "GET",
        "/gallery/{explainer}",
        "gallery",
        "The pictures that show each concept best.",
        answer=types.GalleryAnswer,
    ),
    Entry("GET", "/v1/models", "kserve_models", "KServe V1: the models of this server, which is one."),
    Entry(
        "POST",
        "/v1/models/{name}:explain",
        "kserve_explain",
        "KServe V1: explain instances.",
        types.KServeRequest,
        answer=types.KServeExplainAnswer,
        limits=ALL_LIMITS,
    ),
    Entry(
        "POST",
        "/v1/models/{name}:predict",
        "kserve_predict",
        "KServe V1: predict instances.",
        types.KServeRequest,
        answer=types.KServePredictAnswer,
        limits=ALL_LIMITS,
    ),
    Entry(
        "GET",
        "/v1/models/{name}",
        "kserve_model",
        "KServe V1: whether the model is ready.",
        answer=types.KServeModel,
    ),
    Entry("GET", "/v2", "v2_server", "KServe V2: the server.", answer=types.ServerMetadata, needs_key=False),
    Entry(
        "GET",
        "/v2/health/live",
        "v2_live",
        "KServe V2: whether the process lives.",
        answer=types.ServerLive,
        needs_key=False,
        is_logged=False,
    ),
    Entry(
        "GET",
        "/v2/health/ready",
        "v2_ready",
        "KServe V2: whether a verified model is loaded.",
        answer=types.ServerReady,
        needs_key=False,
        is_logged=False,
    ),
    Entry(
        "GET",
        "/v2/models/{name}/ready",
        "v2_model_ready",
        "KServe V2: whether the model is ready.",
        answer=types.KServeModel,
    ),
    Entry(
        "POST",
        "/v2/models/{name}/infer",
        "v2_infer",
        "KServe V2: predict a tensor of images; explain them when the output `explanation` is asked for.",
        types.InferRequest,
        answer=types.InferAnswer,
        limits=ALL_LIMITS,
    ),
    Entry(
        "GET",
        "/v2/models/{name}",
        "v2_model",
        "KServe V2: what the model takes and gives.",
        answer=types.ModelMetadata,
    ),
    Entry("GET", "/openapi.json", "openapi", "The OpenAPI document.", needs_key=False, in_document=False),
    Entry("GET", "/docs.json", "openapi", "The same, where BentoML has it.", needs_key=False, in_document=False),
    Entry("GET", "/metrics", "metrics", "Prometheus metrics of all workers.", is_logged=False),
    Entry("GET", "/livez", "", "Whether the process lives.", needs_key=False, is_logged=False),
    Entry("GET", "/readyz", "", "Whether a verified model is loaded and warm.", needs_key=False, is_logged=False),
    Entry("GET", "/healthz", "", "BentoML's own.", needs_key=False, is_logged=False, in_document=False),
    Entry("GET", "/ui", "page", "The page.", needs_key=False, in_document=False),
    # BentoML's own page there calls a tracker on the network
    Entry("GET", "/", "page", "To the page.", needs_key=False, in_document=False),
)
_EXACT = {entry.path: entry.label for entry in TABLE if not entry.parameters and entry.path != "/"}
_BELOW = sorted({entry.label for entry in TABLE if entry.parameters} | {"/ui"})
_OPEN = {entry.path for entry in TABLE if not entry.needs_key}
_QUIET = frozenset(entry.path for entry in TABLE if not entry.is_logged)


def label_of(path: str) -> str:
    """Return a name for a path out of a small set: metrics and logs must not grow with what callers type.

    >>> label_of("/explain"), label_of("/gallery/concepts"), label_of("/ui/app.js"), label_of("/wp-admin")
    ('/explain', '/gallery', '/ui', 'other')
    """
    if path in _EXACT:
        return _EXACT[path]
    return next((label for label in _BELOW if path.startswith(label + "/")), "other")


def needs_key(path: str) -> bool:
    """Whether a request for this path must carry an API key, where the server wants keys.

    >>> needs_key("/explain"), needs_key("/ui/app.js"), needs_key("/nosuch")
    (True, False, True)
    """
    return path not in _OPEN and not path.startswith("/ui/")


def is_logged(path: str) -> bool:
    """Whether a request for this path is counted and gets a log line; questions for health and metrics do not."""
    return path not in _QUIET


def mounted(handlers: Callable[[], Any]) -> Starlette:
    """Return the application for BentoML to mount at ``/``; ``handlers()`` gives the object that answers."""
    routes: list[BaseRoute] = []
    for entry in TABLE:
        if entry.handler:
            endpoint = _to_page if entry.handler == "page" else _endpoint(handlers, entry.handler)
            routes.append(Route(entry.path, endpoint, methods=[entry.method]))
    return Starlette(routes=[*routes, Mount("/ui", _Page(directory=PAGE, html=True))])


def _endpoint(handlers: Callable[[], Any], name: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            response: Response = await getattr(handlers(), name)(request)
            return response
        except Problem as problem:
            scope = request.scope
            scope["auditor.is_problem"] = True
            scope.get("auditor.note", {})["code"] = problem.code
            headers = {k.decode(): v.decode() for k, v in problem.headers()}
            return Response(problem.body(scope.get("auditor.request_id", "")), problem.status, headers)

    return answer


async def _to_page(request: Request) -> Response:
    """Send browsers to the page; a client of KServe's V1 protocol asks here whether the server lives."""
    if request.url.path == "/" and "text/html" not in request.headers.get("accept", ""):
        return JSONResponse({"status": "alive"})
    return RedirectResponse("ui/", 307)  # relative: the service may stand below a path of a proxy


class _Page(StaticFiles):
    """The page's files; a strict policy lets it load nothing but its own and connect to nothing but this server."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        answer = super().file_response(*args, **kwargs)
        answer.headers.update({"content-security-policy": POLICY, "cache-control": "no-cache"})
        return answer
