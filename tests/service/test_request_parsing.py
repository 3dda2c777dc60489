"""Requests as forms, JSON or bare images, in memory and within limits."""

import asyncio
import base64
import json

import pytest
from starlette.requests import Request

from auditor.service.json_bodies import split_body
from auditor.service.kserve_v2 import HEADER, split_tensors
from auditor.service.problems import Problem
from auditor.service.request_parsing import SMALL_JSON, read, read_tensors
from auditor.service.types import ExplainBatchRequest, ExplainRequest, InferRequest, PredictRequest


def request(body: bytes, media: str, query: str = "", headers=()) -> Request:
    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/explain", "query_string": query.encode()}
    return Request({**scope, "headers": [(b"content-type", media.encode()), *headers]}, receive)


def form(*parts: tuple[str, bytes, bool]) -> tuple[bytes, str]:
    """Return a form of (name, content, is a file)."""
    pieces = []
    for name, content, is_file in parts:
        tail = b'; filename="x.png"' if is_file else b""
        head = b'--edge\r\ncontent-disposition: form-data; name="' + name.encode() + b'"' + tail + b"\r\n\r\n"
        pieces.append(head + content + b"\r\n")
    return b"".join(pieces) + b"--edge--\r\n", "multipart/form-data; boundary=edge"


def taken(made: Request, kind=ExplainRequest, images="image"):
    return asyncio.run(read(made, kind, images))


def test_the_same_options_in_all_three_forms():
    options = {"explainers": ["a", "b"], "target": "7", "noise_samples": 3}
    encoded = base64.b64encode(b"bytes").decode()
    as_json = taken(request(json.dumps({"image": encoded, **options}).encode(), "application/json; charset=utf-8"))
    fields = [("explainers", b"a, b", False), ("target", b"7", False), ("noise_samples", b"3", False)]
    as_form = taken(request(*form(("image", b"bytes", True), *fields)))
    bare = taken(request(b"bytes", "image/png", "explainers=a&explainers=b&target=7&noise_samples=3"))
    for body, files in (as_json, as_form, bare):
        assert files == [b"bytes"]
        assert body.model_dump(exclude_unset=True, exclude={"image"}) == options
    aged, _ = taken(request(b"bytes", "image/png", "explainer=a,b&samples=3&target=7"))
    assert aged.model_dump(exclude_unset=True, exclude={"image"}) == options
    assert aged.renamed == {"explainer": "explainers", "samples": "noise_samples"}


def test_several_images_and_images_as_fields():
    encoded = base64.b64encode(b"two")
    body, files = taken(
        request(*form(("image", b"one", True), ("images", encoded, False))), ExplainBatchRequest, "images"
    )
    assert files == [b"one", b"two"]
    assert len(body.images) == 2
    assert taken(request(b"x", "application/octet-stream"), PredictRequest)[1] == [b"x"]


@pytest.mark.parametrize(
    ("made", "status", "sentence"),
    [
        (request(b"x", "text/plain"), 415, "multipart/form-data"),
        (request(b"{", "application/json"), 400, "not JSON"),
        (request(*form(("image", b"a", True), ("image", b"b", True))), 422, "one image at a time"),
        (request(*form(("seed", b"1", False))), 422, "the part with the file is missing"),
        (request(*form(("picture", b"a", True))), 422, "picture: a file is sent as part 'image'"),
        (request(b"x", "image/png", "seed=1&seed=2"), 422, "seed: it is given twice"),
        (request(b"x", "image/png", "seed=-1"), 422, "seed: "),
        (request(b"x", "multipart/form-data"), 400, "the form cannot be read"),
    ],
    ids=["text", "half JSON", "two images", "no image", "another file", "twice", "out of range", "no boundary"],
)
def test_what_cannot_be_read_is_a_problem_with_its_status(made, status, sentence):
    with pytest.raises(Problem) as caught:
        taken(made)
    assert caught.value.status == status
    assert sentence in caught.value.message


def test_a_body_that_does_not_fit_names_the_field():
    with pytest.raises(Problem, match="stability: input should be"):
        taken(request(b'{"image": "aGk=", "stability": "on"}', "application/json"))
    with pytest.raises(Problem, match="nosuch: there is no such field"):
        taken(request(b'{"image": "aGk=", "nosuch": 1}', "application/json"))


class Pool:
    """Stands for the decoder pool and remembers what it was asked to read."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def split_body(self, body, images, json_length=None):
        self.sizes.append(len(body))
        return split_tensors(body, json_length) if images == "inputs" else split_body(body, images)


@pytest.mark.parametrize(("n", "is_small"), [(SMALL_JSON, True), (SMALL_JSON + 1, False)])
def test_large_json_is_read_in_another_process(n, is_small):
    body = json.dumps({"image": "aGk="}).encode()
    body += b" " * (n - len(body))
    pool = Pool()
    _, files = asyncio.run(read(request(body, "application/json"), ExplainRequest, "image", pool))
    assert files == [b"hi"]
    assert pool.sizes == ([] if is_small else [n])


@pytest.mark.parametrize(("n", "is_small"), [(SMALL_JSON, True), (SMALL_JSON + 1, False)])
def test_json_before_binary_data_is_json_like_any_other(n, is_small):
    """A caller says how long it is: 16 MB of it, said to be the head of binary data, held up the event loop."""
    tensor = {"name": "x", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 5}}
    head = json.dumps({"inputs": [tensor]}).encode()
    head += b" " * (n - len(head))
    pool = Pool()
    asked = request(head + b"\1\0\0\0a", "application/octet-stream", headers=[(HEADER.encode(), str(n).encode())])
    _, (part,) = asyncio.run(read_tensors(asked, InferRequest, pool))
    assert part.file == b"a"
    assert pool.sizes == ([] if is_small else [n + 5])


def test_more_images_than_are_taken_are_refused_before_anything_is_made_of_them():
    for images in ("images", "instances"):
        with pytest.raises(Problem, match=f"{images}: 65 images came, 64 are taken at once"):
            split_body(json.dumps({images: ["?"] * 65}).encode(), images)
