"""The OpenAPI document: every reference leads somewhere, every example is valid, every field of a form is text."""

import json
import re

import pytest
from pydantic import TypeAdapter

from auditor.service import types
from auditor.service.openapi import REF, document, examples
from auditor.service.problems import BY_STATUS
from auditor.service.routes import TABLE

OPERATIONS = [entry for entry in TABLE if entry.in_document]


def operation_of(entry):
    return document()["paths"][entry.path][entry.method.lower()]


def test_every_reference_leads_to_a_schema():
    schemas = document()["components"]["schemas"]
    names = set(re.findall(rf"{REF}(\w+)", json.dumps(document())))
    assert names <= set(schemas)
    messages = {n for n, t in vars(types).items() if isinstance(t, type) and issubclass(t, types.Message)} - {"Message"}
    assert messages <= set(schemas)


def test_operations_have_names_of_their_own():
    ids = [operation_of(entry)["operationId"] for entry in OPERATIONS]
    assert len(set(ids)) == len(ids)
    assert {"explain", "kserve_explain", "livez", "metrics"} <= set(ids)


@pytest.mark.parametrize("entry", OPERATIONS, ids=lambda e: e.path)
def test_the_good_answer_is_of_its_type(entry):
    content = operation_of(entry)["responses"]["200"].get("content")
    assert (content is None) == (entry.handler in ("", "metrics"))
    if entry.answer is None:
        return
    schema = content["application/json"]["schema"]
    assert schema == (
        {"type": "array", "items": {"$ref": REF + entry.answer.__name__}}
        if entry.is_list
        else {"$ref": REF + entry.answer.__name__}
    )
    expected = list[entry.answer] if entry.is_list else entry.answer
    TypeAdapter(expected).validate_python(content["application/json"]["example"])


def test_every_handler_with_json_has_an_example():
    assert set(examples()) == {entry.handler for entry in OPERATIONS} - {"", "metrics"}


@pytest.mark.parametrize("entry", [e for e in OPERATIONS if e.request], ids=lambda e: e.path)
def test_examples_of_requests_are_valid(entry):
    body = operation_of(entry)["requestBody"]["content"]
    assert ("multipart/form-data" in body) == bool(entry.images)
    for example in body["application/json"]["examples"].values():
        entry.request.model_validate(example["value"])
    assert body["application/json"]["examples"]


@pytest.mark.parametrize("entry", [e for e in OPERATIONS if e.images], ids=lambda e: e.path)
def test_a_form_has_the_fields_of_the_json_with_the_image_as_a_file(entry):
    schema = operation_of(entry)["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert set(schema["properties"]) == set(entry.request.model_fields) - {entry.images} | {"image"}
    assert schema["required"] == ["image"]
    assert schema["additionalProperties"] is False
    image = schema["properties"]["image"]
    assert (image["type"] == "array") == (entry.images == "images")
    file = image["items"] if entry.images == "images" else image
    assert file["format"] == "binary"
    for name, field in schema["properties"].items():
        assert {"type": "null"} not in field.get("anyOf", []), name
        assert field.get("default", "") is not None, name


@pytest.mark.parametrize("entry", OPERATIONS, ids=lambda e: e.path)
def test_errors_are_in_the_one_shape(entry):
    for status in entry.errors:
        answer = operation_of(entry)["responses"][str(status)]
        example = answer["content"]["application/json"]["example"]
        types.ErrorAnswer.model_validate(example)
        assert (example["error"]["code"], answer["description"]) == BY_STATUS[status]


def test_routes_with_limits_say_which_settings_they_are():
    assert "max_pixels" in operation_of(TABLE[0])["description"]
    assert "description" not in document()["paths"]["/model"]["get"]
