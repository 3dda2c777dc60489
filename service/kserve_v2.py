"""KServe's V2 protocol (the Open Inference Protocol): tensors in, tensors out, as JSON or with binary data after it.

An input is one tensor of images: ``BYTES`` of shape (images,) holds image files (base64 in JSON, bare bytes in binary),
numbers of shape (images, height, width[, channels]) hold pixels: ``UINT8`` from 0 to 255, floats from 0 to 1. Outputs
are ``label``, ``index`` and ``probability``;
``explanation`` (JSON, a text per image) is computed when it is asked for.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic_core import from_json

from auditor.service.json_bodies import GIVEN, MAX_BATCH, Part, check_count, from_base64
from auditor.service.problems import Problem

HEADER = "inference-header-content-length"
FLOATS = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}
NUMBERS = {**FLOATS, "UINT8": "|u1"}
OUTPUTS = ("label", "index", "probability")
EXPLANATION = "explanation"


def split_tensors(body: bytes, json_length: int | None = None) -> tuple[Any, list[Part]]:
    """Return a request's JSON with a short word where its data was, and its images.

    ``json_length`` is the header that says where the JSON ends and the binary data begins.
    """
    head, rest = (body, b"") if json_length is None else (body[:json_length], body[json_length:])
    try:
        content = from_json(head)
    except ValueError:
        raise Problem(400, "the body is not JSON.", code="bad_json") from None
    inputs = content.get("inputs") if isinstance(content, dict) else None
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise Problem(422, "inputs: wanted one tensor of images, {'name', 'shape', 'datatype', 'data'}.")
    tensor = inputs[0]
    shape, kind = _shape(tensor.get("shape")), tensor.get("datatype")
    check_count(shape[0], "inputs.0.shape")
    given = tensor.get("parameters")
    size = given.get("binary_data_size") if isinstance(given, dict) and json_length is not None else None
    if size is not None and size != len(rest):
        raise Problem(400, f"inputs.0: binary_data_size is {size!r}, {len(rest)} bytes came.", code="bad_tensor")
    data = tensor.get("data") if size is None else rest
    parts = _files(data, shape) if kind == "BYTES" else _pixels(data, shape, kind)
    return {**content, "inputs": [{**tensor, "data": GIVEN}]}, parts


def json_length_of(header: str | None, body: bytes) -> int | None:
    """Return where the JSON of a body ends, as the header says; None: there is no binary data."""
    if header is None:
        return None
    if not header.isdecimal() or len(header) > 12 or int(header) > len(body):
        raise Problem(400, f"{HEADER}: wanted a number of at most {len(body)} bytes, got {header[:20]!r}.")
    return int(header)


def answered(
    answers: Sequence[Mapping[str, Any]], names: Sequence[str], request_id: str, model: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the response: one tensor per output asked for, an element per image.

    >>> answer = {"prediction": {"index": 7, "label": "7", "probability": 0.98}}
    >>> answered([answer], ["label"], "r1", {"name": "digits", "version": "1"})["outputs"]
    [{'name': 'label', 'shape': [1], 'datatype': 'BYTES', 'data': ['7']}]
    """
    columns: dict[str, tuple[str, list[Any]]] = {
        "label": ("BYTES", [a["prediction"]["label"] for a in answers]),
        "index": ("INT64", [a["prediction"]["index"] for a in answers]),
        "probability": ("FP64", [a["prediction"]["probability"] for a in answers]),
    }
    if EXPLANATION in names:
        columns[EXPLANATION] = ("BYTES", [json.dumps(a, separators=(",", ":")) for a in answers])
    outputs = [
        {"name": name, "shape": [len(answers)], "datatype": columns[name][0], "data": columns[name][1]}
        for name in names
    ]
    return {"id": request_id, "model_name": model["name"], "model_version": model["version"], "outputs": outputs}


def metadata(name: str, version: str, shape: Sequence[int]) -> dict[str, Any]:
    """Return what a model takes and gives; -1 is any number of images."""
    channels, height, width = shape
    kinds = {"label": "BYTES", "index": "INT64", "probability": "FP64", EXPLANATION: "BYTES"}
    return {
        "name": name,
        "versions": [version],
        "platform": "mlflow_auditor",
        "inputs": [{"name": "images", "datatype": "FP32", "shape": [-1, height, width, channels]}],
        "outputs": [{"name": output, "datatype": kind, "shape": [-1]} for output, kind in kinds.items()],
    }


def _shape(given: Any) -> tuple[int, ...]:
    whole = isinstance(given, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in given)
    if not whole or not given or min(given) < 1 or len(given) > 4 or math.prod(given) > 1 << 40:
        raise Problem(422, f"inputs.0.shape: wanted 1 to 4 positive numbers, got {str(given)[:60]}.", code="bad_tensor")
    return tuple(given)


def _files(data: Any, shape: tuple[int, ...]) -> list[Part]:
    """Read a tensor of image files."""
    if isinstance(data, bytes):
        files: list[Any] = []
        at = 0
        while at + 4 <= len(data) and len(files) <= MAX_BATCH:
            (size,) = struct.unpack_from("<I", data, at)
            files.append(data[at + 4 : at + 4 + size])
            at += 4 + size
        if at != len(data):
            raise Problem(400, "inputs.0: the binary data is not lengths and bytes in turn.", code="bad_tensor")
    else:
        texts = data if isinstance(data, list) else []
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise Problem(422, "inputs.0.data: wanted a list of image files in base64.", code="bad_tensor")
        files = [from_base64(text) for text in texts]
    if len(shape) != 1 or shape[0] != len(files):
        raise Problem(422, f"inputs.0: shape {list(shape)}, but {len(files)} files came.", code="bad_tensor")
    return [Part(file) for file in files]


def _pixels(data: Any, shape: tuple[int, ...], kind: Any) -> list[Part]:
    """Read a tensor of pixels."""
    if not isinstance(kind, str) or kind not in NUMBERS:
        raise Problem(
            422, f"inputs.0.datatype: wanted BYTES or {', '.join(sorted(NUMBERS))}, got {str(kind)[:20]!r}.",
            code="bad_tensor",
        )  # fmt: skip
    if len(shape) not in (3, 4):
        raise Problem(422, f"inputs.0.shape: pixels are (images, height, width, channels), got {list(shape)}.")
    try:
        if isinstance(data, bytes):
            flat = np.frombuffer(data, np.dtype(NUMBERS[kind]))
        else:
            flat = np.asarray(data, dtype=np.float64).reshape(-1)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise Problem(422, "inputs.0.data: wanted numbers, flat or nested by shape.", code="bad_tensor") from None
    if flat.size != math.prod(shape):
        raise Problem(422, f"inputs.0: shape {list(shape)}, but {flat.size} numbers came.", code="bad_tensor")
    images = flat.astype(np.float32).reshape(shape) / (1.0 if kind in FLOATS else 255.0)
    return [Part(numbers=image) for image in images]
