"""The client: what it sends, what it returns, what it raises, and when it tries again; no server, no network."""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import httpx
import pytest

from auditor.errors import DataError, OptionError
from auditor.service.client import AsyncClient, Client, ServiceError
from auditor.service.types import ExplainAnswer, ExplainRequest, ModelInfo

MODEL = {"name": "m", "version": "3", "digest": "d" * 64}
TARGET = {"index": 1, "label": "b", "logit": 2.0}
PREDICTION = {
    "index": 1,
    "label": "b",
    "probability": 0.9,
    "probabilities": [{"index": 1, "label": "b", "probability": 0.9}],
}
ANSWER = {
    "prediction": PREDICTION,
    "target": TARGET,
    "explanations": [
        {
            "name": "concepts",
            "kind": "nmf",
            "digest": "e" * 64,
            "target": TARGET,
            "target_value": 2.0,
            "bias": 0.5,
            "residual": 0.25,
            "concepts": [{"index": 0, "label": "wing", "activation": 1.0, "contribution": 1.25, "heatmap": None}],
        }
    ],
    "stability": None,
    "model": MODEL,
    "timings": {"total": 1.0},
    "request_id": "r1",
}
INFO = {
    **MODEL, "uri": "models:/m/3", "input_shape": [1, 13, 17], "class_names": ["a", "b"], "engine": "torch",
    "explainers": ["concepts"], "loaded_at": "now",
}  # fmt: skip
BUSY = {"error": {"code": "queue_full", "message": "too many requests are waiting; try again.", "request_id": "r2"}}


class Script:
    """Plays the server: answers one after the other, and remembers what was asked."""

    def __init__(self, *answers) -> None:
        self.answers, self.requests = list(answers), []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        status, body, headers = answer
        return httpx.Response(status, json=body, headers=headers)

    def body(self, i: int = 0) -> dict:
        return json.loads(self.requests[i].content)


def run(script: Script, how: str, verb: str, *args, **kwargs):
    """Call a verb on either client; returns its answer and how long it would have slept."""
    slept: list[float] = []
    options = kwargs.pop("client", {})
    if how == "sync":
        with Client(transport=httpx.MockTransport(script), sleep=slept.append, **options) as client:
            return getattr(client, verb)(*args, **kwargs), slept

    async def nap(seconds: float) -> None:
        slept.append(seconds)

    async def main():
        async with AsyncClient(transport=httpx.MockTransport(script), sleep=nap, **options) as client:
            return await getattr(client, verb)(*args, **kwargs)

    return asyncio.run(main()), slept


both = pytest.mark.parametrize("how", ["sync", "async"])


@both
def test_explain_sends_what_differs_from_the_defaults_and_returns_the_servers_type(how, tmp_path):
    path = tmp_path / "x.png"
    path.write_bytes(b"some bytes")
    script = Script((200, ANSWER, {}))
    answer, slept = run(
        script, how, "explain", path, explainers=("concepts",), target="b", heatmaps="none", client={"api_key": "k1"}
    )
    assert isinstance(answer, ExplainAnswer)
    assert answer.explanations[0].concepts[0].contribution == 1.25
    assert slept == []
    (request,) = script.requests
    assert (request.method, request.url.path, request.headers["x-api-key"]) == ("POST", "/explain", "k1")
    assert script.body() == {
        "image": base64.b64encode(b"some bytes").decode(), "explainers": ["concepts"], "target": "b", "heatmaps": "none"
    }  # fmt: skip
    ExplainRequest.model_validate(script.body())


@both
def test_a_path_and_its_bytes_are_the_same_request(how, tmp_path):
    path = tmp_path / "x.png"
    path.write_bytes(b"\x00\xff")
    script = Script((200, ANSWER, {}), (200, ANSWER, {}), (200, ANSWER, {}))
    run(script, how, "explain", str(path))
    run(script, how, "explain", path)
    run(script, how, "explain", b"\x00\xff")
    assert script.body(0) == script.body(1) == script.body(2)


@both
def test_other_verbs(how):
    script = Script((200, INFO, {}), (200, [], {}), (200, {"explainer": "a/b", "kind": "nmf", "concepts": []}, {}))
    assert isinstance(run(script, how, "model")[0], ModelInfo)
    assert run(script, how, "explainers")[0] == []
    assert run(script, how, "gallery", "a/b")[0].explainer == "a/b"
    assert [r.url.raw_path for r in script.requests] == [b"/model", b"/explainers", b"/gallery/a%2Fb"]


@both
def test_a_batch_holds_answers_and_errors(how):
    document = {"answers": [ANSWER, BUSY], "n_errors": 1, "model": MODEL, "request_id": "r1"}
    script = Script((200, document, {}))
    batch, _ = run(script, how, "explain_batch", [b"one", b"two"], top_k=3)
    assert [type(a).__name__ for a in batch.answers] == ["ExplainAnswer", "ErrorAnswer"]
    assert script.body()["top_k"] == 3
    assert len(script.body()["images"]) == 2


@both
def test_errors_carry_the_servers_words(how):
    document = {"error": {"code": "bad_image", "message": "the image cannot be read.", "request_id": "r9"}}
    script = Script((400, document, {}))
    with pytest.raises(ServiceError, match="the image cannot be read") as caught:
        run(script, how, "predict", b"junk")
    error = caught.value
    assert (error.status, error.code, error.message, error.request_id) == (
        400, "bad_image", "the image cannot be read.", "r9",
    )  # fmt: skip
    assert len(script.requests) == 1, "a bad image is not tried again"


@both
def test_refused_requests_are_tried_again_after_as_long_as_the_server_says(how):
    script = Script((429, BUSY, {"retry-after": "2"}), (503, BUSY, {}), (200, INFO, {}))
    answer, slept = run(script, how, "model")
    assert answer.version == "3"
    assert slept[0] == 2
    assert 0 < slept[1] <= 0.5
    assert len(script.requests) == 3


@both
def test_retry_after_may_be_a_date_and_is_never_longer_than_the_limit(how):
    tomorrow = format_datetime(datetime.now(timezone.utc) + timedelta(days=1), usegmt=True)
    script = Script((503, BUSY, {"retry-after": tomorrow}), (503, BUSY, {"retry-after": "soon"}), (200, INFO, {}))
    _, slept = run(script, how, "model")
    assert slept[0] == 30
    assert slept[1] <= 0.5


@both
def test_it_gives_up_and_says_what_came_last(how):
    script = Script(*[(503, BUSY, {"retry-after": "1"})] * 3)
    with pytest.raises(ServiceError, match="too many requests") as caught:
        run(script, how, "model", client={"retries": 2})
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
    assert len(script.requests) == 3


@both
def test_a_lost_connection_is_tried_again_then_named(how):
    script = Script(httpx.ConnectError("refused"), (200, INFO, {}))
    assert run(script, how, "model")[0].name == "m"
    script = Script(*[httpx.ReadTimeout("")] * 2)
    with pytest.raises(ServiceError, match="auditor serve") as caught:
        run(script, how, "model", client={"retries": 1, "address": "http://127.0.0.1:9/"})
    assert (caught.value.status, caught.value.code) == (0, "timeout")


@both
def test_an_answer_of_something_else_is_an_error_of_ours(how):
    class Page(Script):
        def __call__(self, request):
            return httpx.Response(502, text="<html>Bad Gateway</html>")

    with pytest.raises(ServiceError, match="status 502 without an explanation"):
        run(Page(), how, "model")
    with pytest.raises(ServiceError, match="use the client of the server's version"):
        run(Script((200, {"name": "m"}, {})), how, "model")
    newer = {**INFO, "news": 1}
    assert run(Script((200, newer, {})), how, "model")[0].name == "m"


@both
def test_bad_values_are_refused_before_anything_is_sent(how):
    script = Script()
    with pytest.raises(OptionError, match="top_k"):
        run(script, how, "explain", b"x", top_k=0)
    with pytest.raises(DataError, match=r"nosuch\.png"):
        run(script, how, "explain", "nosuch.png")
    assert script.requests == []


def test_options_are_those_of_the_request_type():
    fields = {name: field.default for name, field in ExplainRequest.model_fields.items() if name != "image"}
    parameters = inspect.signature(Client.explain.build).parameters
    assert {name: p.default for name, p in parameters.items() if name not in ("image", "old_names")} == fields
    parameters = inspect.signature(Client.explain_batch.build).parameters
    assert {name: p.default for name, p in parameters.items() if name not in ("images", "old_names")} == fields


def test_it_needs_neither_torch_nor_a_host():
    code = (
        "import sys, auditor.service.client; "
        "found = {'torch', 'bentoml', 'mlflow', 'numpy', 'PIL'} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_key_goes_to_no_other_address():
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.url.host, request.headers.get("x-api-key")))
        return httpx.Response(302, headers={"location": "https://evil.example/model"})

    client = Client("http://127.0.0.1:3000", api_key="secret", transport=httpx.MockTransport(answer))
    with client, pytest.raises(ServiceError, match="status 302"):
        client.model()
    assert asked == [("127.0.0.1", "secret")]


def test_every_verb_speaks_to_a_route_of_the_table():
    from auditor.service import client
    from auditor.service.routes import TABLE

    calls = [client.explain(b"x"), client.explain_batch([b"x"]), client.predict(b"x"), client.explainers()]
    calls += [client.model(), client.samples(), client.gallery("a name")]
    verbs = {name for name, value in vars(client._Verbs).items() if isinstance(value, client.Verb)}
    assert len(calls) == len(verbs)
    entries = {(entry.method, entry.label): entry for entry in TABLE if entry.in_document}
    for call in calls:
        path = "/gallery" if call.path.startswith("/gallery/") else call.path
        assert (call.method, path) in entries, call.path
