"""Service over HTTP: tables of images into requests of the explanation service, and its answers back."""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
import time
import urllib.request
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

from auditor.errors import AuditError, DataError, OptionError
from auditor.explainers.answer_options import OLD_NAMES, OPTION_NAMES, deprecation

IMAGE = "image"
NOT_RECORDS = ("columns", "data", "dataframe_records", "dataframe_split", "inputs", "instances")
AT_ONCE = 8  # requests in flight; the service batches what arrives together
ATTEMPTS = 6
LONGEST_WAIT_S = 10.0
LARGEST_PATH = 4096


class ServiceError(AuditError):
    """What the service said was wrong; ``status`` is 0 when it cannot be reached at all."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def ask(address: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = 120.0) -> Any:
    """Ask the service and return its JSON; a busy service is asked again, everything else wrong is one sentence."""
    headers = {"Accept": "application/json"}
    content = None
    if body is not None:
        content, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
    for attempt in range(ATTEMPTS):
        request = urllib.request.Request(address + path, content, headers)
        if key := os.environ.get("AUDITOR_API_KEY"):
            request.add_unredirected_header("X-API-Key", key)  # a redirect may lead anywhere: the key does not follow
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return json.load(answer)
        except HTTPError as error:
            if error.code in (429, 503) and attempt < ATTEMPTS - 1:
                time.sleep(_wait_s(error.headers.get("Retry-After"), attempt))
                continue
            raise _service_error(error, address) from None
        except (URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            text = getattr(reason, "strerror", None) or reason
            raise ServiceError(0, f"the service at {address} cannot be reached: {text}; see that it runs.") from None
        except ValueError:
            raise ServiceError(0, f"{address} answered with something that is no JSON; is it auditor serve?") from None
    raise AssertionError("unreachable")


def ask_each(address: str, path: str, bodies: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Ask once per body, several at a time, and return the answers in order; the first failure is raised."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda body: ask(address, path, body), bodies))


def records(inputs: Any) -> list[dict[str, Any]]:
    """Return one request body per image from a DataFrame, a list of records or images, or one record.

    A record has ``image`` (a path, or the file in base64, or bytes) and may have options of the service; a value that
    is missing (None or NaN) counts as not given.

    >>> records([{"image": "iVBORw0KGgo=", "target": 7.0, "top_k": None}])
    [{'image': 'iVBORw0KGgo=', 'target': 7}]
    """
    if hasattr(inputs, "to_dict") and hasattr(inputs, "columns"):
        _check_columns([str(c) for c in inputs.columns])
        rows = inputs.to_dict(orient="records")
    elif isinstance(inputs, Mapping):
        _check_columns([str(c) for c in inputs])
        rows = [inputs]
    elif isinstance(inputs, (list, tuple)):
        rows = [row if isinstance(row, Mapping) else {IMAGE: row} for row in inputs]
    elif isinstance(inputs, (str, bytes, os.PathLike)):
        rows = [{IMAGE: inputs}]
    else:
        raise DataError(f"input: want a table or records with a column image, got {type(inputs).__name__}.")
    if not rows:
        raise DataError("input: there is no image in it.")
    return [_body(row, k) for k, row in enumerate(rows)]


def _check_columns(columns: list[str]) -> None:
    if IMAGE in columns:
        return
    if set(columns) & set(NOT_RECORDS):
        raise DataError(
            "input: this is a split or wrapped table, which mlflow deployments cannot read; write records, "
            '[{"image": "seven.png"}, …], with the path of each image or the file in base64.'
        )
    raise DataError(f"input: want a column image, got {', '.join(columns[:8]) or 'none'}.")


def _body(row: Mapping[str, Any], k: int) -> dict[str, Any]:
    unknown = sorted(str(c) for c in row if c != IMAGE and c not in OPTION_NAMES and c not in OLD_NAMES)
    if unknown:
        options = ", ".join(OPTION_NAMES)
        raise OptionError(f"record {k}: unknown {', '.join(unknown)}; a record has image and {options}.")
    old = {key: OLD_NAMES[key] for key in row if key in OLD_NAMES}
    for key, name in old.items():
        warnings.warn(deprecation(key, name), DeprecationWarning, stacklevel=3)
    values = {name: _plain(row[key]) for key, name in old.items()}
    values |= {key: _plain(row[key]) for key in OPTION_NAMES if key in row}
    return {IMAGE: _image(row.get(IMAGE), k), **{key: value for key, value in values.items() if value is not None}}


def _plain(value: Any) -> Any:
    """Return a table's value as JSON has it: numbers that pandas widened are narrowed, NaN is nothing."""
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        value = value.item()
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return int(value) if value.is_integer() else value
    return value


def _image(value: Any, k: int) -> str:
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not value:
        raise DataError(f"record {k}: image must be a path or base64, got {type(value).__name__}.")
    if value.startswith("data:"):
        return value
    try:
        if len(value) < LARGEST_PATH and Path(value).is_file():
            return base64.b64encode(Path(value).read_bytes()).decode()
        base64.b64decode(value, validate=True)
    except OSError as error:
        raise DataError(f"record {k}: image {value[:80]} cannot be read: {error.strerror or error}.") from None
    except (binascii.Error, ValueError):
        raise DataError(f"record {k}: image {value[:80]!r} is neither a file here nor base64.") from None
    return value


def _service_error(error: HTTPError, address: str) -> ServiceError:
    try:
        message = str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        message = f"the service at {address} answered {error.code} without an explanation."
    return ServiceError(error.code, " ".join(message.split()))


def _wait_s(retry_after: str | None, attempt: int) -> float:
    try:
        return min(max(float(retry_after or ""), 0.0), LONGEST_WAIT_S)
    except ValueError:
        return min(0.25 * 2.0**attempt, LONGEST_WAIT_S)
