"""The OpenAPI document of the service, from the types; served at ``/openapi.json`` and as BentoML's ``/docs.json``."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from auditor.service import types
from auditor.service.problems import BY_STATUS

REF = "#/components/schemas/"
ID = "3f2a9c0d41b7e65a8890cd12"

MODEL = {"name": "digits", "version": "1", "digest": "9d0c…"}
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
    "kind": "nmf",
    "digest": "51aa…",
    "target": TARGET,
    "target_value": 11.2,
    "bias": 1.5,
    "residual": 0.2,
    "others": 2.4,
    "concepts": [CONCEPT],
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
    "kind": "nmf",
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


@cache
def document() -> dict[str, Any]:
    """Return the whole document."""
    found: list[type[BaseModel]] = [
        item
        for item in vars(types).values()
        if isinstance(item, type) and issubclass(item, types.Message) and item is not types.Message
    ]
    _, schemas = models_json_schema([(item, "validation") for item in found], ref_template=REF + "{model}")
    try:
        release = version("mlflow-auditor")
    except PackageNotFoundError:
        release = "0"
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mlflow-auditor",
            "version": release,
            "description": "A registered image model that explains itself: the prediction, the few concepts that made "
            "it, and how stable all of that is. Every error is {'error': {'code', 'message', 'request_id'}}.",
        },
        "paths": _paths(),
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _paths() -> dict[str, Any]:
    explain_errors = (400, 401, 408, 413, 415, 422, 429, 500, 503)
    get_errors = (401, 500, 503)
    name = {
        "name": "name",
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
        "description": "Registered name of the model.",
        "example": "digits",
    }
    explainer = {
        "name": "explainer",
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
        "description": "Name of an attached explainer.",
        "example": "concepts",
    }
    batch = {"answers": [EXPLAINED, _error(400)], "n_errors": 1, "model": MODEL, "request_id": ID}
    info = {
        **MODEL,
        "uri": "models:/digits@champion",
        "input_shape": [1, 8, 8],
        "resize": "stretch",
        "class_names": [str(i) for i in range(10)],
        "engine": "onnx",
        "engine_reason": "an exported graph is there and verifies",
        "explainers": ["concepts"],
        "loaded_at": "2026-11-16T12:00:00+00:00",
    }
    shot = {
        "id": "image 12",
        "label": "7",
        "score": 1.3,
        "box": [0.0, 0.25, 0.5, 0.75],
        "image": DATA_URL,
        "heat": DATA_URL,
    }
    gallery = {
        "explainer": "concepts",
        "kind": "nmf",
        "concepts": [{"index": 0, "label": "lower loop", "pictures": [shot]}],
    }
    return {
        "/explain": {
            "post": {
                "operationId": "explain",
                "summary": "Explain one image: prediction, concepts with signed contributions, stability.",
                "requestBody": _image_body("ExplainRequest", types.ExplainRequest, "image"),
                "responses": _responses("ExplainAnswer", EXPLAINED, explain_errors),
            }
        },
        "/predict": {
            "post": {
                "operationId": "predict",
                "summary": "Predict one image.",
                "requestBody": _image_body("PredictRequest", types.PredictRequest, "image"),
                "responses": _responses(
                    "PredictAnswer",
                    {
                        "prediction": PREDICTION,
                        "model": MODEL,
                        "timings": {"read": 0.4, "queue": 0.1, "forward": 1.2, "total": 2.0},
                        "request_id": ID,
                    },
                    explain_errors,
                ),
            }
        },
        "/explain_batch": {
            "post": {
                "operationId": "explain_batch",
                "summary": "Explain several images; a bad one gets its error in its place.",
                "requestBody": _image_body("ExplainBatchRequest", types.ExplainBatchRequest, "images"),
                "responses": _responses("ExplainBatchAnswer", batch, explain_errors),
            }
        },
        "/explainers": {
            "get": {
                "operationId": "explainers",
                "summary": "Everything attached to the model, verified.",
                "responses": _responses("ExplainerAnswer", [EXPLAINER], get_errors, is_list=True),
            }
        },
        "/model": {
            "get": {
                "operationId": "model",
                "summary": "The model that is served.",
                "responses": _responses("ModelInfo", info, get_errors),
            }
        },
        "/samples": {
            "get": {
                "operationId": "samples",
                "summary": "A few images to try; empty when the server was not told of any.",
                "responses": _responses(
                    "Sample", [{"name": "image 0", "label": "7", "image": DATA_URL}], get_errors, is_list=True
                ),
            }
        },
        "/gallery/{explainer}": {
            "get": {
                "operationId": "gallery",
                "summary": "The pictures that show each concept best.",
                "parameters": [explainer],
                "responses": _responses("GalleryAnswer", gallery, (401, 404, 500, 503)),
            }
        },
        "/v1/models": {
            "get": {
                "operationId": "kserve_models",
                "summary": "KServe V1: the models of this server, which is one.",
                "responses": {
                    "200": {
                        "description": "Names.",
                        "content": {
                            "application/json": {
                                "schema": {
                                    "type": "object",
                                    "properties": {"models": {"type": "array", "items": {"type": "string"}}},
                                    "required": ["models"],
                                },
                                "example": {"models": ["digits"]},
                            }
                        },
                    },
                    **_errors(get_errors),
                },
            }
        },
        "/v1/models/{name}": {
            "get": {
                "operationId": "kserve_model",
                "summary": "KServe V1: whether the model is ready.",
                "parameters": [name],
                "responses": _responses("KServeModel", {"name": "digits", "ready": True}, (401, 404, 500, 503)),
            }
        },
        "/v1/models/{name}:explain": {
            "post": {
                "operationId": "kserve_explain",
                "summary": "KServe V1: explain instances.",
                "parameters": [name],
                "requestBody": _json_body("KServeRequest", types.KServeRequest),
                "responses": _responses("KServeExplainAnswer", {"explanations": [EXPLAINED]}, (404, *explain_errors)),
            }
        },
        "/v1/models/{name}:predict": {
            "post": {
                "operationId": "kserve_predict",
                "summary": "KServe V1: predict instances.",
                "parameters": [name],
                "requestBody": _json_body("KServeRequest", types.KServeRequest),
                "responses": _responses("KServePredictAnswer", {"predictions": [PREDICTION]}, (404, *explain_errors)),
            }
        },
        **{
            path: {
                "get": {
                    "operationId": path.strip("/"),
                    "summary": summary,
                    "responses": {"200": {"description": "Yes."}, **_errors((503,) if path == "/readyz" else ())},
                }
            }
            for path, summary in {
                "/livez": "Whether the process lives.",
                "/readyz": "Whether a verified model is loaded and warm.",
                "/metrics": "Prometheus metrics of all workers.",
            }.items()
        },
    }


def _json_body(name: str, kind: type[BaseModel]) -> dict[str, Any]:
    examples = kind.model_json_schema()["examples"]
    return {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": REF + name},
                "examples": {f"example {i + 1}": {"value": value} for i, value in enumerate(examples)},
            }
        },
    }


def _image_body(name: str, kind: type[BaseModel], images: str) -> dict[str, Any]:
    """Return the body as JSON with base64 and as a form whose options have the same names."""
    body = _json_body(name, kind)
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


def _responses(name: str, example: Any, errors: tuple[int, ...], is_list: bool = False) -> dict[str, Any]:
    schema: dict[str, Any] = {"$ref": REF + name}
    if is_list:
        schema = {"type": "array", "items": schema}
    good = {"description": "The answer.", "content": {"application/json": {"schema": schema, "example": example}}}
    return {"200": good, **_errors(errors)}


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
