"""OpenAPI: the document of the service, built from the table of routes and the types; served at ``/openapi.json``."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from auditor.explainers.kinds import BUILT_IN
from auditor.service import types
from auditor.service.kserve_v2 import OUTPUTS, answered, metadata
from auditor.service.problems import BY_STATUS
from auditor.service.routes import PARAMETERS, TABLE, Entry

REF = "#/components/schemas/"
KIND = next(iter(BUILT_IN))
ID = "3f2a9c0d41b7e65a8890cd12"

MODEL = {"name": "digits", "version": "1", "digest": "9d0c…", "attestation": None}
PREDICTION = {
    "index": 7,
    "label": "7",
    "probability": 0.98,
    "probabilities": [{"index": 7, "label": "7", "probability": 0.98}, {"index": 9, "label": "9", "probability": 0.02}],
}
TARGET = {"index": 7, "label": "7", "logit": 11.2}
CONCEPT = {"index": 3, "label": "upper bar", "activation": 0.8, "contribution": 7.1, "heatmap": None, "note": ""}
EXPLANATION = {
    "name": "concepts",
    "kind": KIND,
    "digest": "51aa…",
    "target": TARGET,
    "target_value": 11.2,
    "bias": 1.5,
    "residual": 0.2,
    "others": 2.4,
    "concepts": [CONCEPT],
    "lines": [],
    "extra": {"integration_error": 0.0001},
    "problem": "",
}
STABILITY = {
    "mode": "fast",
    "c1": 3.1,
    "c2": 12.5,
    "radius": 0.02,
    "samples": 8,
    "bound": 58.0,
    "bound_reason": "",
    "score": 0.93,
    "layer": "features.6",
}
EXPLAINED = {
    "prediction": PREDICTION,
    "target": TARGET,
    "explanations": [EXPLANATION],
    "stability": STABILITY,
    "model": MODEL,
    "timings": {"read": 0.4, "queue": 0.1, "forward": 1.2, "concepts": 0.9, "stability": 4.0, "total": 7.1},
    "request_id": ID,
}
EXPLAINER = {
    "name": "concepts",
    "kind": KIND,
    "digest": "51aa…",
    "layer": "features.6",
    "labels": {"0": "lower loop", "1": "upper bar"},
    "n_concepts": 2,
    "metrics": {"f_cls": 0.97},
    "per_request": [],
    "default": True,
    "gallery": True,
    "classes": None,
}
DATA_URL = f"data:image/png;base64,{types.TINY_PNG}"
MODEL_INFO = {
    **MODEL,
    "uri": "models:/digits@champion",
    "input_shape": [1, 8, 8],
    "resize": "stretch",
    "class_names": [str(i) for i in range(10)],
    "output": "logits",
    "engine": "onnx",
    "engine_reason": "an exported graph is there and verifies",
    "explainers": ["concepts"],
    "loaded_at": "2026-11-16T12:00:00+00:00",
}
PICTURE = {
    "id": "image 12",
    "label": "7",
    "score": 1.3,
    "box": [0.0, 0.25, 0.5, 0.75],
    "image": DATA_URL,
    "heat": DATA_URL,
}
MODEL_NAMES = {
    "type": "object",
    "properties": {"models": {"type": "array", "items": {"type": "string"}}},
    "required": ["models"],
}


def examples() -> dict[str, Any]:
    """Return one good answer per handler that answers JSON."""
    return {
        "explain": EXPLAINED,
        "predict": {
            "prediction": PREDICTION,
            "model": MODEL,
            "timings": {"read": 0.4, "queue": 0.1, "forward": 1.2, "total": 2.0},
            "request_id": ID,
        },
        "explain_batch": {"answers": [EXPLAINED, _error(400)], "n_errors": 1, "model": MODEL, "request_id": ID},
        "explainers": [EXPLAINER],
        "model": MODEL_INFO,
        "samples": [{"name": "image 0", "label": "7", "image": DATA_URL}],
        "gallery": {
            "explainer": "concepts",
            "kind": KIND,
            "concepts": [{"index": 0, "label": "lower loop", "pictures": [PICTURE]}],
        },
        "kserve_models": {"models": ["digits"]},
        "kserve_model": {"name": "digits", "ready": True},
        "kserve_explain": {"explanations": [EXPLAINED]},
        "kserve_predict": {"predictions": [PREDICTION]},
        "v2_server": {"name": "mlflow-auditor", "version": "0.2.0", "extensions": ["binary_tensor_data"]},
        "v2_live": {"live": True},
        "v2_ready": {"ready": True},
        "v2_model_ready": {"name": "digits", "ready": True},
        "v2_model": metadata("digits", "1", (1, 8, 8)),
        "v2_infer": answered([{"prediction": PREDICTION}], OUTPUTS, ID, MODEL),
    }


def release() -> str:
    """Return the version of the package."""
    try:
        return version("mlflow-auditor")
    except PackageNotFoundError:
        return "0"


@cache
def document() -> dict[str, Any]:
    """Return the whole document."""
    messages: list[type[BaseModel]] = [
        item
        for item in vars(types).values()
        if isinstance(item, type) and issubclass(item, types.Message) and item is not types.Message
    ]
    _, schemas = models_json_schema([(item, "validation") for item in messages], ref_template=REF + "{model}")
    paths: dict[str, dict[str, Any]] = {}
    for entry in TABLE:
        if entry.in_document:
            paths.setdefault(entry.path, {})[entry.method.lower()] = _operation(entry)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mlflow-auditor",
            "version": release(),
            "description": "A registered image model that explains itself: the prediction, the few concepts that made "
            "it, and how stable all of that is. Every error is {'error': {'code', 'message', 'request_id'}}.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _operation(entry: Entry) -> dict[str, Any]:
    operation: dict[str, Any] = {"operationId": entry.handler or entry.path.strip("/"), "summary": entry.summary}
    if entry.limits:
        operation["description"] = f"Limited by the settings {', '.join(entry.limits)}."
    if entry.parameters:
        operation["parameters"] = [_parameter(name) for name in entry.parameters]
    if entry.request is not None:
        operation["requestBody"] = (
            _image_body(entry.request, entry.images) if entry.images else _json_body(entry.request)
        )
    operation["responses"] = {"200": _answer(entry), **_errors(entry.errors)}
    return operation


def _parameter(name: str) -> dict[str, Any]:
    description, example = PARAMETERS[name]
    return {
        "name": name,
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
        "description": description,
        "example": example,
    }


def _answer(entry: Entry) -> dict[str, Any]:
    """Return the good answer: with a type, or of the one route without, or not JSON."""
    example = examples().get(entry.handler)
    if example is None:
        return {"description": entry.summary}
    schema: dict[str, Any] = {"$ref": REF + entry.answer.__name__} if entry.answer is not None else MODEL_NAMES
    if entry.is_list:
        schema = {"type": "array", "items": schema}
    return {"description": "The answer.", "content": {"application/json": {"schema": schema, "example": example}}}


def _json_body(kind: type[BaseModel]) -> dict[str, Any]:
    values = kind.model_json_schema()["examples"]
    return {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": REF + kind.__name__},
                "examples": {f"example {i + 1}": {"value": value} for i, value in enumerate(values)},
            }
        },
    }


def _image_body(kind: type[BaseModel], images: str) -> dict[str, Any]:
    """Return the body as JSON with base64 and as a form whose options have the same names."""
    body = _json_body(kind)
    schema = kind.model_json_schema(ref_template=REF + "{model}")
    file = {"type": "string", "format": "binary", "contentMediaType": "application/octet-stream"}
    fields = {k: _as_text(v) for k, v in schema["properties"].items() if k != images}
    fields["image"] = file if images == "image" else {"type": "array", "items": file, "minItems": 1}
    body["content"]["multipart/form-data"] = {
        "schema": {
            "type": "object",
            "properties": fields,
            "required": ["image"],
            "additionalProperties": False,
        }
    }
    return body


def _as_text(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a field as a form has it: without null."""
    choices = [item for item in schema.get("anyOf", []) if item.get("type") != "null"]
    plain = {k: v for k, v in schema.items() if k not in ("anyOf", "default") or (k == "default" and v is not None)}
    if len(choices) == 1:
        return {**plain, **choices[0]}
    return {**plain, "anyOf": choices} if choices else plain


def _errors(statuses: tuple[int, ...]) -> dict[str, Any]:
    return {
        str(status): {
            "description": BY_STATUS[status][1],
            "content": {"application/json": {"schema": {"$ref": REF + "ErrorAnswer"}, "example": _error(status)}},
        }
        for status in sorted(statuses)
    }


def _error(status: int) -> dict[str, Any]:
    code, message = BY_STATUS[status]
    return {"error": {"code": code, "message": message, "request_id": ID}}
