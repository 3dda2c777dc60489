"""Problems: one shape, the right status, and nothing of what the caller sent."""

import json

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from auditor.errors import ArtifactError, DataError, ModelError, NumericsError, OptionError, RegistryError, ShapeError
from auditor.service.problems import BY_STATUS, Problem, problem_of, problem_of_validation
from auditor.service.types import ExplainRequest


@pytest.mark.parametrize("status", BY_STATUS)
def test_every_status_has_its_code_and_sentence(status):
    problem = Problem(status)
    assert (problem.code, problem.message) == BY_STATUS[status]
    assert json.loads(problem.body("id")) == {
        "error": {"code": problem.code, "message": problem.message, "request_id": "id"}
    }
    assert str(problem) == f"{status} {problem.code}: {problem.message}"


def test_codes_are_different():
    codes = [code for code, _ in BY_STATUS.values()]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize(("status", "like"), [(418, 400), (499, 400), (502, 500), (507, 500)])
def test_a_status_without_a_sentence_takes_that_of_its_class(status, like):
    problem = Problem(status)
    assert problem.status == status
    assert (problem.code, problem.message) == BY_STATUS[like]


def test_headers_go_with_the_status():
    assert Problem(400).headers() == [(b"content-type", b"application/json")]
    assert (b"www-authenticate", b"Bearer") in Problem(401).headers()
    assert (b"retry-after", b"0") in Problem(429, retry_after_s=0).headers()
    assert len(Problem(503).headers()) == 1


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (OptionError("top_k  is\n odd"), 422, "bad_option"),
        (DataError("x"), 400, "bad_image"),
        (ShapeError("x"), 400, "bad_image"),
        (ModelError("secret path"), 503, "unavailable"),
        (RegistryError("secret path"), 503, "unavailable"),
        (ArtifactError("secret path"), 503, "unavailable"),
        (NumericsError("secret path"), 503, "unavailable"),
    ],
)
def test_the_callers_doing_is_4xx_and_the_rest_a_503_without_its_inside(error, status, code):
    problem = problem_of(error)
    assert (problem.status, problem.code) == (status, code)
    assert "secret" not in problem.message
    assert problem.retry_after_s == (1 if status == 503 else None)
    assert "\n" not in problem.message


def invalid(text: str) -> Problem:
    with pytest.raises(ValidationError) as caught:
        ExplainRequest.model_validate_json(text)
    return problem_of_validation(caught.value)


def test_what_does_not_fit_is_named_and_not_echoed():
    assert invalid("{").code == "bad_json"
    assert invalid("{").status == 400
    problem = invalid('{"image": "x", "secretly": 1}')
    assert (problem.status, problem.code, problem.message) == (422, "invalid", "secretly: there is no such field.")
    problem = invalid('{"image": "x", "top_k": "secret"}')
    assert problem.message.startswith("top_k: input should be a valid integer")
    assert "secret" not in problem.message
    assert invalid("[]").message.startswith("body: ")


def test_a_target_is_named_without_the_types_it_was_tried_as():
    assert invalid('{"image": "x", "target": []}').message.startswith("target: ")


class Deep(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: list[list[list[list[int]]]] = Field(default=[])


def test_places_deep_inside_and_long_names_are_cut():
    with pytest.raises(ValidationError) as caught:
        Deep.model_validate({"a": [[[["x"]]]]})
    assert problem_of_validation(caught.value).message.startswith("a.0.0.0: ")
    with pytest.raises(ValidationError) as caught:
        Deep.model_validate({"b" * 300: 1})
    assert problem_of_validation(caught.value).message == f"{'b' * 40}: there is no such field."
