"""Requests refuse what they do not know; examples are true; the schema is complete."""

import base64
import inspect
import io

import pytest
from PIL import Image
from pydantic import ValidationError

from auditor.service import types
from auditor.service.types import ExplainBatchRequest, ExplainRequest, KServeRequest, Message, Options, PredictRequest

MESSAGES = [
    item for _, item in inspect.getmembers(types, inspect.isclass) if issubclass(item, Message) and item is not Message
]
OPEN = {"InferRequest", "InferTensor"}  # KServe's V2 protocol: its clients add fields of their own


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.__name__)
def test_every_type_refuses_unknown_fields_and_says_what_it_is(message):
    assert message.model_json_schema().get("additionalProperties", True) is (message.__name__ in OPEN)
    assert message.__doc__


@pytest.mark.parametrize("request_type", [ExplainRequest, PredictRequest, ExplainBatchRequest, KServeRequest])
def test_examples_are_valid(request_type):
    examples = request_type.model_json_schema()["examples"]
    assert examples
    for example in examples:
        request_type.model_validate(example)


def test_example_image_is_an_image():
    with Image.open(io.BytesIO(base64.b64decode(types.TINY_PNG))) as image:
        image.load()
        assert image.size == (2, 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 0),
        ("heatmaps", "jpeg"),
        ("stability", "on"),
        ("noise_samples", 0),
        ("noise_samples", 65),
        ("radius", 0),
        ("radius", float("nan")),
        ("seed", -1),
        ("timeout_s", 0),
        ("target", -1),
        ("target", 1.5),
        ("target", True),
        ("explainers", [""]),
        ("explainers", "concepts"),
        ("nosuch", 1),
    ],
)
def test_out_of_range_options_are_refused(field, value):
    with pytest.raises(ValidationError):
        Options.model_validate({field: value})


def test_a_class_may_be_named_or_numbered():
    assert Options(target=3).target == 3
    assert Options(target="seven").target == "seven"
    assert Options.model_validate_json('{"target": "3"}').target == "3"
