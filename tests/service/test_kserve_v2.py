"""KServe's V2 protocol: tensors as JSON and as binary data, what is refused, and KServe's own client."""

import asyncio
import base64
import json
import struct

import numpy as np
import pytest

from auditor.service.kserve_v2 import HEADER, answered, json_length_of, metadata, split_tensors
from auditor.service.problems import Problem

PIXELS = np.arange(2 * 3 * 5, dtype=np.float32).reshape(2, 3, 5) / 30


def body_of(tensor: dict) -> bytes:
    return json.dumps({"inputs": [{"name": "images", **tensor}]}).encode()


def binary(kind: str, shape: list[int], data: bytes) -> tuple[bytes, int]:
    head = body_of({"shape": shape, "datatype": kind, "parameters": {"binary_data_size": len(data)}})
    return head + data, len(head)


@pytest.mark.parametrize(
    ("body", "length"),
    [
        (body_of({"shape": [2, 3, 5], "datatype": "FP32", "data": PIXELS.reshape(-1).tolist()}), None),
        (body_of({"shape": [2, 3, 5], "datatype": "FP64", "data": PIXELS.tolist()}), None),
        binary("FP32", [2, 3, 5], PIXELS.astype("<f4").tobytes()),
        binary("FP64", [2, 3, 5], PIXELS.astype("<f8").tobytes()),
    ],
    ids=["flat", "nested", "binary", "doubles"],
)
def test_pixels_are_the_same_flat_nested_and_binary(body, length):
    rest, parts = split_tensors(body, length)
    np.testing.assert_allclose(np.stack([p.numbers for p in parts]), PIXELS, rtol=1e-6)
    assert rest["inputs"][0]["data"] == "given"


def test_bytes_of_pixels_go_from_0_to_255():
    values = np.array([[[0, 51], [255, 102]]], dtype=np.uint8)
    for body, length in (
        (body_of({"shape": [1, 2, 2], "datatype": "UINT8", "data": values.tolist()}), None),
        binary("UINT8", [1, 2, 2], values.tobytes()),
    ):
        (part,) = split_tensors(body, length)[1]
        np.testing.assert_allclose(part.numbers, [[0, 0.2], [1, 0.4]], rtol=1e-6)


def test_files_come_in_base64_or_bare():
    files = [b"one", b"twotwo"]
    texts = [base64.b64encode(f).decode() for f in files]
    _, parts = split_tensors(body_of({"shape": [2], "datatype": "BYTES", "data": texts}))
    assert [p.file for p in parts] == files
    _, parts = split_tensors(*binary("BYTES", [2], b"".join(struct.pack("<I", len(f)) + f for f in files)))
    assert [p.file for p in parts] == files


BAD = {
    "no JSON": (b"{", None, 400, "not JSON"),
    "a list": (b"[]", None, 422, "one tensor"),
    "two tensors": (json.dumps({"inputs": [{}, {}]}).encode(), None, 422, "one tensor"),
    "shape of text": (body_of({"shape": "2", "datatype": "BYTES", "data": ["a"]}), None, 422, "positive numbers"),
    "shape of nothing": (body_of({"shape": [0, 2, 2], "datatype": "FP32", "data": []}), None, 422, "positive numbers"),
    "huge shape": (body_of({"shape": [1 << 30] * 4, "datatype": "FP32", "data": []}), None, 422, "positive numbers"),
    "too few": (body_of({"shape": [1, 2, 2], "datatype": "FP32", "data": [1, 2, 3]}), None, 422, "3 numbers came"),
    "ragged": (body_of({"shape": [1, 2, 2], "datatype": "FP32", "data": [[1], [1, 2]]}), None, 422, "wanted numbers"),
    "two dimensions": (
        body_of({"shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3, 4]}),
        None,
        422,
        "images, height",
    ),
    "a type": (body_of({"shape": [1, 2, 2], "datatype": "INT64", "data": [1, 2, 3, 4]}), None, 422, "got 'INT64'"),
    "a type of another type": (body_of({"shape": [1, 2, 2], "datatype": [], "data": []}), None, 422, "got '\\[\\]'"),
    "more images than are taken": (*binary("UINT8", [65, 1, 1], bytes(65)), 422, "65 images came, 64 are taken"),
    "millions of empty files": (*binary("BYTES", [4], bytes(1 << 20)), 400, "lengths and bytes"),
    "a list of parameters": (
        *(lambda head: (head, len(head)))(body_of({"shape": [1], "datatype": "BYTES", "parameters": [1]})),
        422,
        "list of image files",
    ),
    "files that lack": (body_of({"shape": [2], "datatype": "BYTES", "data": ["YQ=="]}), None, 422, "1 files came"),
    "no files": (body_of({"shape": [1], "datatype": "BYTES"}), None, 422, "list of image files"),
    "size of another": (*binary("FP32", [1, 1, 1], b"abcd")[:1], 10, 400, "not JSON"),
    "cut off": (binary("FP32", [1, 2, 2], bytes(16))[0][:-1], binary("FP32", [1, 2, 2], bytes(16))[1], 400, "15 bytes"),
    "lengths that lie": (*binary("BYTES", [1], struct.pack("<I", 99) + b"abc"), 400, "lengths and bytes"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_one_sentence(case):
    body, length, status, sentence = BAD[case]
    with pytest.raises(Problem, match=sentence) as caught:
        split_tensors(body, length)
    assert caught.value.status == status


def test_the_header_says_where_json_ends():
    assert json_length_of(None, b"abc") is None
    assert json_length_of("3", b"abc") == 3
    for odd in ("4", "-1", "x", "²", "9" * 40):
        with pytest.raises(Problem, match="wanted a number of at most 3 bytes"):
            json_length_of(odd, b"abc")


def test_answers_become_a_tensor_per_output():
    answers = [{"prediction": {"index": k, "label": str(k), "probability": 0.5}, "more": 1} for k in (3, 8)]
    document = answered(answers, ["index", "explanation"], "r", {"name": "m", "version": "2"})
    assert [(o["name"], o["shape"], o["datatype"]) for o in document["outputs"]] == [
        ("index", [2], "INT64"),
        ("explanation", [2], "BYTES"),
    ]
    assert document["outputs"][0]["data"] == [3, 8]
    assert json.loads(document["outputs"][1]["data"][1]) == answers[1]
    assert metadata("m", "2", (3, 7, 9))["inputs"][0]["shape"] == [-1, 7, 9, 3]


def test_a_client_of_v2_gets_what_v1_gives(http, pngs, images):
    from tests.service.test_handlers import QUICK, b64

    assert http.get("/v2/health/live").json() == {"live": True}
    assert http.get("/v2/health/ready").json() == {"ready": True}
    assert http.get("/v2/models/served/ready").json()["ready"] is True
    assert http.get("/v2/models/nosuch/ready").status_code == 404
    assert http.get("/v2/models/served").json()["inputs"][0]["shape"] == [-1, 8, 8, 1]
    assert http.get("/v2").json()["extensions"] == ["binary_tensor_data"]
    assert http.get("/").json() == {"status": "alive"}
    assert http.get("/", headers={"accept": "text/html"}, follow_redirects=False).status_code == 307
    tensor = {"name": "images", "shape": [1], "datatype": "BYTES", "data": [b64(pngs[0])]}
    wanted = http.post("/v1/models/served:predict", json={"instances": [b64(pngs[0])]}).json()["predictions"][0]
    answer = http.post("/v2/models/served/infer", json={"id": "mine", "inputs": [tensor]}).json()
    assert answer["id"] == "mine"
    assert {o["name"]: o["data"][0] for o in answer["outputs"]} == {
        k: wanted[k] for k in ("label", "index", "probability")
    }
    asked = {"inputs": [tensor], "outputs": [{"name": "explanation"}], "parameters": QUICK}
    (output,) = http.post("/v2/models/served/infer", json=asked).json()["outputs"]
    assert json.loads(output["data"][0])["explanations"]
    pixels = images[0].permute(1, 2, 0).numpy().astype("<f4")
    content, length = binary("FP32", [1, *pixels.shape], pixels.tobytes())
    answer = http.post("/v2/models/served/infer", content=content, headers={HEADER: str(length)})
    assert answer.json()["outputs"][1]["data"] == [wanted["index"]]
    bad = http.post("/v2/models/served/infer", json={"inputs": [tensor | {"shape": [3]}]})
    assert (bad.status_code, bad.json()["error"]["code"]) == (422, "bad_tensor")


def test_kserves_own_client_is_served(http, pngs, images):
    """KServe's client, both protocols; it is not among our packages (pip install kserve)."""
    kserve = pytest.importorskip("kserve")
    httpx = pytest.importorskip("httpx")

    class ToTheApplication(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request):
            answer = http.request(
                request.method, str(request.url.raw_path, "ascii"), content=request.content, headers=request.headers,
                follow_redirects=False,
            )  # fmt: skip
            return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    def client(protocol: str):
        return kserve.InferenceRESTClient(kserve.RESTConfig(protocol=protocol, transport=ToTheApplication()))

    async def ask():
        v1, v2, base = client("v1"), client("v2"), "http://localhost"
        assert await v1.is_server_live(base) is True
        assert await v2.is_server_live(base) is True
        assert await v2.is_server_ready(base) is True
        assert await v1.is_model_ready(base, "served")
        assert await v2.is_model_ready(base, "served")
        assert not await v2.is_model_ready(base, "nosuch")
        tensor = kserve.InferInput("images", [1, 8, 8, 1], "FP32")
        tensor.set_data_from_numpy(images[:1].permute(0, 2, 3, 1).numpy(), binary_data=True)
        answer = await v2.infer(base, kserve.InferRequest(model_name="served", infer_inputs=[tensor]), "served")
        return {output.name: output.data[0] for output in answer.outputs}

    wanted = http.post("/predict", files={"image": pngs[0]}).json()["prediction"]
    outputs = asyncio.run(ask())
    assert outputs["label"] == wanted["label"]
    assert outputs["index"] == wanted["index"]
