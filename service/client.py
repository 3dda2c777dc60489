"""Client of the explanation service: typed, sync and async, with the server's own types; needs httpx and pydantic only.

    from auditor.service.client import Client

    with Client("http://127.0.0.1:3000") as service:
        answer = service.explain("seven.png", explainers=["concepts"], heatmaps="none")
        for concept in answer.explanations[0].concepts:
            print(concept.label, concept.contribution)

``AsyncClient`` has the same verbs to ``await``. A verb is written once, as a function that builds a ``Call``; either
client sends it. An answer of status 400 and above is raised as ``ServiceError``; 429, 503 and a lost connection are
tried again first (all verbs only read, so a second try does no harm), after as long as ``Retry-After`` says.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import os
import random
import time
import warnings
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar, overload
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter, ValidationError

from auditor.errors import AuditError, DataError, OptionError
from auditor.explainers.answer_options import OLD_NAMES, OPTION_NAMES, HeatmapStyle, StabilityMode, deprecation
from auditor.service.types import (
    ErrorAnswer,
    ExplainAnswer,
    ExplainBatchAnswer,
    ExplainBatchRequest,
    ExplainerAnswer,
    ExplainRequest,
    GalleryAnswer,
    ModelInfo,
    PredictAnswer,
    PredictRequest,
    Sample,
)

ImageLike = bytes | str | os.PathLike[str]
TRY_AGAIN = frozenset({429, 503})
LONGEST_WAIT_S = 30.0

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", ExplainRequest, ExplainBatchRequest, PredictRequest)


class ServiceError(AuditError):
    """What the server said was wrong. ``code`` is for programs, ``message`` for people.

    ``status`` is 0 when the server could not be reached at all; ``request_id`` finds the request in its log.
    """

    def __init__(
        self, status: int, code: str, message: str, request_id: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(f"{message} ({status} {code}, request {request_id})" if request_id else message)
        self.status, self.code, self.message, self.request_id = status, code, message, request_id
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request, ready to be sent by either client, and the type of its answer."""

    method: str
    path: str
    answer: TypeAdapter[T]
    body: bytes | None = None

    def parse(self, response: httpx.Response) -> T:
        """Return the answer, or raise what the server said was wrong."""
        if response.is_success:
            try:
                return self.answer.validate_json(response.content, extra="ignore")  # a newer server may say more
            except ValidationError as error:
                raise ServiceError(
                    response.status_code,
                    "not_understood",
                    f"{self.method} {self.path}: the answer is not what this client knows "
                    f"({error.error_count()} fields differ); use the client of the server's version.",
                ) from None
        try:
            refusal = ErrorAnswer.model_validate_json(response.content, extra="ignore").error
        except ValidationError:  # a proxy in between, or no service of ours
            message = f"{self.method} {self.path}: status {response.status_code} without an explanation."
            raise ServiceError(response.status_code, "unknown", message) from None
        raise ServiceError(
            response.status_code, refusal.code, refusal.message, refusal.request_id, _retry_after(response)
        )


class Verb(Generic[P, T]):
    """A verb of the service: on a ``Client`` it returns the answer, on an ``AsyncClient`` something to await."""

    def __init__(self, build: Callable[P, Call[T]]) -> None:
        self.build = build
        self.__doc__ = build.__doc__

    @overload
    def __get__(self, client: None, owner: type[Any]) -> Verb[P, T]: ...
    @overload
    def __get__(self, client: Client, owner: type[Any]) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncClient, owner: type[Any]) -> Callable[P, Awaitable[T]]: ...
    def __get__(self, client: Client | AsyncClient | None, owner: type[Any]) -> Any:
        if client is None:
            return self

        @functools.wraps(self.build)
        def send(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.send(self.build(*args, **kwargs))

        return send


def explain(
    image: ImageLike,
    *,
    explainers: Sequence[str] | None = None,
    target: int | str | None = None,
    top_k: int | None = None,
    heatmaps: HeatmapStyle = "png",
    stability: StabilityMode = "fast",
    noise_samples: int = 8,
    radius: float = 0.02,
    seed: int = 0,
    timeout_s: float | None = None,
    max_steps: int | None = None,
    **old_names: Any,
) -> Call[ExplainAnswer]:
    """Explain one image: a path, or the bytes of an image file. The options are those of ``POST /explain``."""
    options = _options(locals())
    return _post("/explain", ExplainAnswer, ExplainRequest, image=_encoded(image), **options)


def explain_batch(
    images: Sequence[ImageLike],
    *,
    explainers: Sequence[str] | None = None,
    target: int | str | None = None,
    top_k: int | None = None,
    heatmaps: HeatmapStyle = "png",
    stability: StabilityMode = "fast",
    noise_samples: int = 8,
    radius: float = 0.02,
    seed: int = 0,
    timeout_s: float | None = None,
    max_steps: int | None = None,
    **old_names: Any,
) -> Call[ExplainBatchAnswer]:
    """Explain several images with the same options; the answer holds an explanation or an error for each."""
    options = _options(locals())
    return _post(
        "/explain_batch", ExplainBatchAnswer, ExplainBatchRequest, images=[_encoded(i) for i in images], **options
    )


def predict(image: ImageLike) -> Call[PredictAnswer]:
    """Return the model's prediction for one image, unexplained."""
    return _post("/predict", PredictAnswer, PredictRequest, image=_encoded(image))


def explainers() -> Call[list[ExplainerAnswer]]:
    """List the attached explainers."""
    return Call("GET", "/explainers", TypeAdapter(list[ExplainerAnswer]))


def model() -> Call[ModelInfo]:
    """Return which model is served: name, version, digest, classes, engine."""
    return Call("GET", "/model", TypeAdapter(ModelInfo))


def samples() -> Call[list[Sample]]:
    """List sample images to try."""
    return Call("GET", "/samples", TypeAdapter(list[Sample]))


def gallery(explainer: str) -> Call[GalleryAnswer]:
    """Return the pictures of each concept of an explainer."""
    return Call("GET", f"/gallery/{quote(explainer, safe='')}", TypeAdapter(GalleryAnswer))


class _Verbs:
    """What both clients can do, and what they share."""

    explain = Verb(explain)
    explain_batch = Verb(explain_batch)
    predict = Verb(predict)
    explainers = Verb(explainers)
    model = Verb(model)
    samples = Verb(samples)
    gallery = Verb(gallery)

    def __init__(
        self, address: str = "http://127.0.0.1:3000", *, api_key: str | None = None, timeout_s: float = 60.0,
        retries: int = 3, transport: Any = None,
    ) -> None:  # fmt: skip
        headers = {"x-api-key": api_key} if api_key else {}
        self.address, self.retries = address.rstrip("/"), retries
        self._settings: dict[str, Any] = {"timeout": timeout_s, "headers": headers, "transport": transport}

    def _request(self, call: Call[Any]) -> dict[str, Any]:
        headers = {"content-type": "application/json"} if call.body is not None else {}
        return {
            "method": call.method,
            "url": self.address + call.path,
            "content": call.body,
            "headers": {"accept": "application/json", **headers},
        }

    def _wait(self, tried: int, result: httpx.Response | httpx.TransportError) -> float | None:
        """Return the seconds to wait before the next try; None: there is none."""
        if tried >= self.retries or (isinstance(result, httpx.Response) and result.status_code not in TRY_AGAIN):
            return None
        retry_after = _retry_after(result) if isinstance(result, httpx.Response) else None
        if retry_after is not None:
            return min(retry_after, LONGEST_WAIT_S)
        return min(0.25 * 2.0**tried, LONGEST_WAIT_S) * random.uniform(0.5, 1.0)  # callers refused together spread out

    def _unreachable(self, error: httpx.TransportError) -> ServiceError:
        what = "timeout" if isinstance(error, httpx.TimeoutException) else "unreachable"
        reason = str(error) or type(error).__name__
        return ServiceError(0, what, f"{self.address}: no answer ({reason}); see that `auditor serve` runs there.")


class Client(_Verbs):
    """Talks to a running service; use it in ``with``, or ``close`` it. Safe to share between threads.

    >>> Client("http://127.0.0.1:3000/", api_key="secret", timeout_s=10).address
    'http://127.0.0.1:3000'
    """

    def __init__(
        self, address: str = "http://127.0.0.1:3000", *, api_key: str | None = None, timeout_s: float = 60.0,
        retries: int = 3, transport: httpx.BaseTransport | None = None, sleep: Callable[[float], object] = time.sleep,
    ) -> None:  # fmt: skip
        super().__init__(address, api_key=api_key, timeout_s=timeout_s, retries=retries, transport=transport)
        self._http, self._sleep = httpx.Client(**self._settings), sleep

    def send(self, call: Call[T]) -> T:
        """Send a call and return its answer."""
        for tried in range(self.retries + 1):
            result: httpx.Response | httpx.TransportError
            try:
                result = self._http.request(**self._request(call))
            except httpx.TransportError as error:
                result = error
            wait = self._wait(tried, result)
            if wait is None:
                break
            self._sleep(wait)
        if isinstance(result, httpx.TransportError):
            raise self._unreachable(result) from result
        return call.parse(result)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(_Verbs):
    """The same verbs, to be awaited; use it in ``async with``, or await ``close``."""

    def __init__(
        self, address: str = "http://127.0.0.1:3000", *, api_key: str | None = None, timeout_s: float = 60.0,
        retries: int = 3, transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:  # fmt: skip
        super().__init__(address, api_key=api_key, timeout_s=timeout_s, retries=retries, transport=transport)
        self._http, self._sleep = httpx.AsyncClient(**self._settings), sleep

    async def send(self, call: Call[T]) -> T:
        """Send a call and return its answer."""
        for tried in range(self.retries + 1):
            result: httpx.Response | httpx.TransportError
            try:
                result = await self._http.request(**self._request(call))
            except httpx.TransportError as error:
                result = error
            wait = self._wait(tried, result)
            if wait is None:
                break
            await self._sleep(wait)
        if isinstance(result, httpx.TransportError):
            raise self._unreachable(result) from result
        return call.parse(result)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _options(values: dict[str, Any]) -> dict[str, Any]:
    """Return a verb's keywords as options of the request; those of an earlier release warn, others are refused."""
    old = values["old_names"]
    for name in old:
        if name not in OLD_NAMES:
            raise TypeError(f"explain: there is no option {name!r}; the options are {', '.join(OPTION_NAMES)}.")
        warnings.warn(deprecation(name, OLD_NAMES[name]), DeprecationWarning, stacklevel=5)
    return {name: values[name] for name in OPTION_NAMES} | {OLD_NAMES[name]: value for name, value in old.items()}


def _encoded(image: ImageLike) -> str:
    if isinstance(image, bytes):
        return base64.b64encode(image).decode("ascii")
    try:
        return base64.b64encode(Path(image).read_bytes()).decode("ascii")
    except OSError as error:
        raise DataError(
            f"image {str(image)[:200]}: {error.strerror or type(error).__name__}; give the path of an image, or the "
            "bytes of the file."
        ) from None


def _post(path: str, answer: type[T], request: type[M], **values: Any) -> Call[T]:
    """Build a call; a value the server would refuse is refused here, with the same types."""
    values = {k: list(v) if k == "explainers" and v is not None else v for k, v in values.items()}
    try:
        body = request.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise OptionError(f"{path[1:]}: {where}: {first['msg'].lower()}.") from None
    return Call("POST", path, TypeAdapter(answer), body.model_dump_json(exclude_defaults=True).encode())


def _retry_after(response: httpx.Response) -> float | None:
    """Return the seconds of ``Retry-After``, which may also be a date."""
    text = response.headers.get("retry-after", "")
    if text.isdigit():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError):
        return None
