"""Problems: every way a request can fail, with its status and code, in one shape.

{"error": {"code", "message", "request_id"}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from auditor.errors import AuditError, DataError, OptionError, ShapeError, UnknownClassError, UnknownExplainerError

if TYPE_CHECKING:
    from pydantic import ValidationError

# what BentoML, Starlette and uvicorn answer by themselves, in our shape
BY_STATUS: Mapping[int, tuple[str, str]] = {
    400: ("bad_request", "the request could not be read."),
    401: ("unauthorized", "an API key is needed; send it as 'Authorization: Bearer KEY' or 'X-API-Key: KEY'."),
    403: ("forbidden", "this is not allowed."),
    404: ("not_found", "there is nothing at this address; GET /openapi.json lists what there is."),
    405: ("method_not_allowed", "this address does not take this method; GET /openapi.json lists what there is."),
    408: ("upload_timeout", "the body did not arrive in time; send it faster or make it smaller."),
    413: ("too_large", "the body is too large."),
    415: (
        "unsupported_media_type",
        "send multipart/form-data with a part 'image', application/json with base64, or the image itself as image/*.",
    ),
    422: ("invalid", "the request does not fit; GET /openapi.json lists the fields."),
    429: ("queue_full", "too many requests are waiting; try again in a moment."),
    500: ("internal", "something went wrong inside; the log has it under this request id."),
    503: ("unavailable", "the service cannot answer now; try again in a moment."),
    504: ("timeout", "the answer took too long; try again in a moment."),
}

# of the errors about options, the most precise first
OPTION_CODES: Mapping[type[AuditError], str] = {
    UnknownClassError: "unknown_class",
    UnknownExplainerError: "unknown_explainer",
    OptionError: "bad_option",
}


class Problem(Exception):
    """A request that cannot be answered: status, code for programs, sentence for people."""

    def __init__(
        self, status: int, message: str = "", *, code: str | None = None, retry_after_s: int | None = None
    ) -> None:
        default_code, default_message = BY_STATUS.get(status, BY_STATUS[400 if status < 500 else 500])
        self.status, self.code, self.message = status, code or default_code, message or default_message
        self.retry_after_s = retry_after_s
        super().__init__(f"{self.status} {self.code}: {self.message}")

    def body(self, request_id: str) -> bytes:
        """Return the JSON body."""
        return json.dumps(self.to_json(request_id)).encode()

    def to_json(self, request_id: str) -> dict[str, dict[str, str]]:
        """Return the body as plain Python."""
        return {"error": {"code": self.code, "message": self.message, "request_id": request_id}}

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that go with it."""
        headers = [(b"content-type", b"application/json")]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers


def late_headers() -> bytes:
    """Return the whole HTTP answer to a request whose headers did not arrive in time."""
    problem = Problem(408, "the headers of the request did not arrive in time.", code="header_timeout")
    body = problem.body("-")
    head = "HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def problem_of(error: AuditError) -> Problem:
    """Return what the caller gets for an error of the library: their doing is a 4xx, the rest a 503."""
    message = " ".join(str(error).split())
    for kind, code in OPTION_CODES.items():
        if isinstance(error, kind):
            return Problem(422, message, code=code)
    if isinstance(error, (DataError, ShapeError)):
        return Problem(400, message, code="bad_image")
    return Problem(503, "the model cannot answer this request; the log has the reason.", retry_after_s=1)


def problem_of_validation(error: ValidationError) -> Problem:
    """Return the first thing that does not fit, without echoing what was sent."""
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return Problem(400, "the body is not JSON.", code="bad_json")
    loc = first["loc"][:4] if "target" not in first["loc"] else first["loc"][: first["loc"].index("target") + 1]
    where = ".".join(str(part)[:40] for part in loc) or "body"  # not which of its types the target was read as
    what = first["msg"][:1].lower() + first["msg"][1:160]
    if first["type"] == "extra_forbidden":
        what = "there is no such field"
    return Problem(422, f"{where}: {what}.", code="invalid")
