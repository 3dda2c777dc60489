"""The service through BentoML's own application: every route, every kind of body, every error in one shape."""

import base64
import io
import json
import pickle  # noqa: TID251, to be refused
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image

from auditor.plugins import load_subject
from auditor.service import types
from auditor.service.openapi import document
from auditor.service.types import ErrorAnswer, ExplainAnswer, ExplainBatchAnswer
from auditor.subject.preprocessing import from_pil

QUICK = {"heatmaps": "none", "stability": "off"}


def b64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def ask(http, content: bytes, **options):
    response = http.post("/explain", files={"image": ("image.png", content)}, data=options)
    assert response.status_code == 200, response.text
    answer = response.json()
    ExplainAnswer.model_validate(answer)
    return answer


def sums(explanation) -> float:
    parts = sum(c["contribution"] for c in explanation["concepts"])
    return explanation["bias"] + parts + explanation["others"] + explanation["residual"]


def test_an_image_gets_prediction_concepts_and_stability(http, pngs, digits, concepts, heads):
    answer = ask(http, pngs[0])
    with Image.open(io.BytesIO(pngs[0])) as image:
        x = torch.from_numpy(from_pil(image, digits.preprocessing))[None]
    with torch.no_grad():
        logits = digits.logits(x)
    assert answer["prediction"]["index"] == int(logits.argmax())
    assert len(answer["prediction"]["probabilities"]) == 10
    assert sum(p["probability"] for p in answer["prediction"]["probabilities"]) == pytest.approx(1)
    assert [e["name"] for e in answer["explanations"]] == ["concepts", "heads"]
    for explanation, explainer in zip(answer["explanations"], (concepts, heads), strict=True):
        alone = explainer.explain(digits, x)[0]
        assert explanation["digest"] == explainer.digest_
        assert explanation["target_value"] == pytest.approx(alone.target_value, rel=1e-4)
        assert sums(explanation) == pytest.approx(explanation["target_value"], rel=1e-4)
        for a, b in zip(explanation["concepts"], alone.concepts, strict=True):
            assert a["contribution"] == pytest.approx(b.contribution, rel=1e-3, abs=1e-3)
    assert 0 <= answer["stability"]["score"] <= 1
    assert answer["model"]["name"] == "served"
    version = answer["model"]["version"]
    assert answer["model"]["digest"] == load_subject(f"models:/served/{version}").digest
    assert {"read", "queue", "forward", "concepts", "heads", "stability", "total"} <= set(answer["timings"])


def test_form_json_and_bare_image_say_the_same(http, pngs):
    form = ask(http, pngs[1], target="3", explainers="heads,concepts", **QUICK)
    body = {"image": b64(pngs[1]), "target": 3, "explainers": ["heads", "concepts"], **QUICK}
    as_json = http.post("/explain", json=body).json()
    bare = http.post(
        "/explain?target=3&explainers=heads&explainers=concepts&heatmaps=none&stability=off",
        content=pngs[1],
        headers={"content-type": "image/png"},
    ).json()
    url = http.post("/explain", json={**body, "image": "data:image/png;base64," + body["image"]}).json()
    assert form["target"]["label"] == "3"
    assert [e["name"] for e in form["explanations"]] == ["heads", "concepts"]
    for other in (as_json, bare, url):
        for key in ("prediction", "target", "explanations", "stability", "model"):
            assert other[key] == form[key]


def test_top_k_keeps_the_strongest_and_the_sum(http, pngs):
    whole = ask(http, pngs[2], explainers="concepts", **QUICK)["explanations"][0]
    short = ask(http, pngs[2], explainers="concepts", top_k=2, **QUICK)["explanations"][0]
    strongest = sorted(whole["concepts"], key=lambda c: -abs(c["contribution"]))[:2]
    assert short["concepts"] == strongest
    assert short["others"] != 0
    assert sums(short) == pytest.approx(whole["target_value"], rel=1e-4)


def test_heatmaps_come_as_layers_grids_or_not_at_all(http, pngs):
    drawn = ask(http, pngs[0], stability="off")["explanations"]
    for concept in [c for e in drawn for c in e["concepts"] if c["heatmap"] is not None]:
        with Image.open(io.BytesIO(base64.b64decode(concept["heatmap"].partition(",")[2]))) as layer:
            rgba = layer.convert("RGBA")
        red, _, blue, _ = rgba.getpixel((0, 0))
        assert (red > blue) == (concept["contribution"] >= 0)
        assert rgba.getextrema()[3][1] <= 192
    assert any(c["heatmap"] for c in drawn[0]["concepts"])
    grids = ask(http, pngs[0], heatmaps="array", stability="off", explainers="concepts")["explanations"][0]
    grid = grids["concepts"][0]["heatmap"]
    assert grid["size"] == [len(grid["values"]), len(grid["values"][0])]
    none = ask(http, pngs[0], **QUICK)["explanations"]
    assert all(c["heatmap"] is None for e in none for c in e["concepts"])


def test_stability_is_deterministic_and_can_be_left_out(http, pngs):
    options = {"heatmaps": "none", "explainers": "heads", "stability": "fast"}
    first, again = (ask(http, pngs[3], seed=5, **options)["stability"] for _ in range(2))
    other = ask(http, pngs[3], seed=6, **options)["stability"]
    assert first == again
    assert first["c1"] != other["c1"]
    assert ask(http, pngs[3], **QUICK)["stability"] is None


def test_one_bad_image_in_a_batch_hurts_no_other(http, pngs):
    body = {"images": [b64(pngs[0]), b64(b"no image"), b64(pngs[1])], **QUICK}
    response = http.post("/explain_batch", json=body)
    assert response.status_code == 200, response.text
    batch = ExplainBatchAnswer.model_validate(response.json())
    assert batch.n_errors == 1
    good, bad, good2 = batch.answers
    assert isinstance(bad, ErrorAnswer)
    assert bad.error.code == "bad_image"
    alone = ask(http, pngs[1], **QUICK)
    assert isinstance(good, ExplainAnswer)
    assert isinstance(good2, ExplainAnswer)
    assert good2.prediction.index == alone["prediction"]["index"]
    form = http.post("/explain_batch", files=[("image", pngs[0]), ("image", pngs[2])], data=QUICK).json()
    assert [a["prediction"]["label"] for a in form["answers"]]


def test_many_callers_good_and_bad_at_once(http, pngs):
    """Callers are batched together; each gets the answer to his own image, bad ones their error."""
    expected = [ask(http, png, **QUICK)["target"] for png in pngs]

    def call(i: int):
        if i % 4 == 3:
            return http.post("/explain", files={"image": b"junk" * i}, data=QUICK)
        return http.post("/explain", files={"image": pngs[i % 7]}, data=QUICK)

    with ThreadPoolExecutor(8) as pool:
        responses = list(pool.map(call, range(40)))
    for i, response in enumerate(responses):
        if i % 4 == 3:
            assert response.status_code == 400
        else:
            assert response.status_code == 200, response.text
            target = response.json()["target"]
            assert target["index"] == expected[i % 7]["index"]
            assert target["logit"] == pytest.approx(expected[i % 7]["logit"], rel=1e-4)


def test_what_is_served(http, digits):
    model = http.get("/model").json()
    assert model["resize"] == "stretch"
    types.ModelInfo.model_validate(model)
    assert model["class_names"] == list(digits.class_names)
    assert model["engine"] == "torch"
    document = http.get("/explainers").json()
    for item in document:
        types.ExplainerAnswer.model_validate(item)
    assert [(e["name"], e["kind"], e["n_concepts"]) for e in document] == [("concepts", "nmf", 6), ("heads", "xnn", 5)]
    samples = http.get("/samples").json()
    assert len({s["label"] for s in samples}) == 10
    types.Sample.model_validate(samples[0])
    gallery = http.get("/gallery/concepts").json()
    types.GalleryAnswer.model_validate(gallery)
    assert len(gallery["concepts"]) == 6
    assert gallery["concepts"][0]["pictures"]
    assert http.get("/gallery/heads").json()["concepts"] == []


def test_predict(http, pngs):
    answer = http.post("/predict", files={"image": pngs[0]}).json()
    types.PredictAnswer.model_validate(answer)
    assert answer["prediction"] == ask(http, pngs[0], **QUICK)["prediction"]


def test_kserve_clients_are_understood(http, pngs, images):
    assert http.get("/v1/models").json() == {"models": ["served"]}
    assert http.get("/v1/models/served").json() == {"name": "served", "ready": True}
    instances = [
        {"b64": b64(pngs[0])},
        {"image": b64(pngs[0]), "target": "3"},
        b64(pngs[0]),
        {"image_bytes": {"b64": b64(pngs[0])}},
        images[0].permute(1, 2, 0).tolist(),
    ]
    response = http.post("/v1/models/served:explain", json={"instances": instances, "parameters": QUICK})
    assert response.status_code == 200, response.text
    explanation = response.json()["explanations"]
    for answer in explanation:
        ExplainAnswer.model_validate(answer)
    assert explanation[1]["target"]["label"] == "3"
    assert explanation[2]["prediction"] == explanation[0]["prediction"]
    assert explanation[4]["prediction"]["index"] == explanation[0]["prediction"]["index"]
    predicted = http.post("/v1/models/served:predict", json={"instances": instances}).json()["predictions"]
    assert [p["index"] for p in predicted] == [explanation[0]["prediction"]["index"]] * 5


def image_file(form: str, mode: str = "RGB", size=(9, 7), **options) -> bytes:
    with io.BytesIO() as stream:
        Image.new(mode, size, 1 if mode in ("1", "I;16") else None).save(stream, form, **options)
        return stream.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        image_file("PNG", "L"),
        image_file("PNG", "P"),
        image_file("PNG", "RGBA"),
        image_file("PNG", "I;16"),
        image_file("PNG", size=(1, 1)),
        image_file("PNG", size=(5000, 3)),
        image_file("JPEG", "CMYK"),
        image_file("JPEG", "L"),
        image_file("WEBP"),
        image_file("GIF", "P", save_all=True, append_images=[Image.new("P", (9, 7))]),
        image_file("BMP"),
        image_file("TIFF", "1"),
    ],
    ids=["grey", "palette", "rgba", "16-bit", "1x1", "wide", "cmyk", "jpeg", "webp", "animated", "bmp", "bilevel"],
)
def test_images_of_every_kind_are_answered(http, content):
    ask(http, content, **QUICK)


JSON = {"content-type": "application/json"}
BAD = {
    "nothing there": ("GET", "/nosuch", {}, 404, "not_found"),
    "wrong method": ("GET", "/explain", {}, 405, "method_not_allowed"),
    "wrong method of BentoML's": ("DELETE", "/livez", {}, 405, "method_not_allowed"),
    "no explainer": ("GET", "/gallery/nosuch", {}, 404, "unknown_explainer"),
    "no concept": ("GET", "/gallery/concepts?concept=99", {}, 404, "unknown_concept"),
    "no number": ("GET", "/gallery/concepts?concept=-1", {}, 404, "unknown_concept"),
    "no model": ("GET", "/v1/models/nosuch", {}, 404, "no_model"),
    "text": ("POST", "/explain", {"content": b"hi", "headers": {"content-type": "text/plain"}}, 415, None),
    "no type": ("POST", "/explain", {"content": b"hi"}, 415, "unsupported_media_type"),
    "half of JSON": ("POST", "/explain", {"content": b"{", "headers": JSON}, 400, "bad_json"),
    "not UTF-8": ("POST", "/explain", {"content": b'{"image": "\xff"}', "headers": JSON}, 400, "bad_json"),
    "deep JSON": ("POST", "/explain", {"content": b"[" * 100_000, "headers": JSON}, 400, "bad_json"),
    "a list": ("POST", "/explain", {"json": [1]}, 422, "invalid"),
    "no image": ("POST", "/explain", {"json": {}}, 422, "invalid"),
    "unknown field": ("POST", "/explain", {"json": {"image": types.TINY_PNG, "x": 1}}, 422, "invalid"),
    "unknown field in a form": ("POST", "/explain", {"files": {"image": b"x"}, "data": {"x": "1"}}, 422, "invalid"),
    "file of another name": ("POST", "/explain", {"files": {"picture": b"x"}}, 422, "invalid"),
    "two images": ("POST", "/explain", {"files": [("image", b"x"), ("image", b"y")]}, 422, "invalid"),
    "form without a boundary": (
        "POST",
        "/explain",
        {"content": b"x", "headers": {"content-type": "multipart/form-data"}},
        400,
        "bad_form",
    ),
    "broken form": (
        "POST",
        "/explain",
        {"content": b"garbage", "headers": {"content-type": "multipart/form-data; boundary=x"}},
        400,
        "bad_form",
    ),
    "not base64": ("POST", "/explain", {"json": {"image": "%%%"}}, 400, "bad_base64"),
    "not an image": ("POST", "/explain", {"files": {"image": b"hello"}}, 400, "bad_image"),
    "empty": ("POST", "/explain", {"files": {"image": b""}}, 400, "bad_image"),
    "half an image": ("POST", "/explain", {"files": {"image": image_file("PNG")[:40]}}, 400, "bad_image"),
    "too many pixels": ("POST", "/explain", {"files": {"image": image_file("PNG", "1", (5000, 5000))}}, 413, None),
    "too large": ("POST", "/explain", {"files": {"image": b"x" * 2_000_000}}, 413, "too_large"),
    "unknown explainer": (
        "POST",
        "/explain",
        {"json": {"image": types.TINY_PNG, "explainers": ["nosuch"]}},
        422,
        "unknown_explainer",
    ),
    "unknown class": ("POST", "/explain", {"json": {"image": types.TINY_PNG, "target": "dog"}}, 422, "unknown_class"),
    "class too large": ("POST", "/explain", {"json": {"image": types.TINY_PNG, "target": 99}}, 422, "unknown_class"),
    "strange digits": ("POST", "/explain", {"json": {"image": types.TINY_PNG, "target": "²"}}, 422, "unknown_class"),
    "bad instance": ("POST", "/v1/models/served:explain", {"json": {"instances": [7]}}, 422, "invalid"),
    "ragged pixels": ("POST", "/v1/models/served:explain", {"json": {"instances": [[[1], [1, 2]]]}}, 422, "bad_image"),
    "empty batch": ("POST", "/explain_batch", {"json": {"images": []}}, 422, "invalid"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_have_one_shape(http, case):
    method, path, arguments, status, code = BAD[case]
    response = http.request(method, path, **arguments)
    assert response.status_code == status, response.text
    error = ErrorAnswer.model_validate(response.json()).error
    assert code is None or error.code == code
    assert error.request_id == response.headers["x-request-id"]
    assert "Traceback" not in response.text
    assert "/work" not in response.text


def test_a_pickle_is_refused(http):
    content = pickle.dumps({"image": b"x"})
    for media in ("application/vnd.bentoml+pickle", "application/octet-stream", "application/x-pickle"):
        response = http.post("/explain", content=content, headers={"content-type": media})
        assert response.status_code in (400, 415)
        ErrorAnswer.model_validate(response.json())


def test_the_callers_request_id_is_kept_unless_it_is_strange(http):
    assert http.get("/model", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert http.get("/model", headers={"x-request-id": "a b\tc"}).headers["x-request-id"] != "a b\tc"


def test_metrics_do_not_grow_with_what_callers_type(http, pngs):
    ask(http, pngs[0])
    for i in range(5):
        http.get(f"/no/such/{i}")
    text = http.get("/metrics").text
    for name in ("auditor_explain_duration_seconds_bucket", "auditor_stability_bucket", "auditor_queue_depth"):
        assert name in text
    assert "auditor_verification_failures_total" in text
    assert 'kind="nmf"' in text
    assert 'kind="xnn"' in text
    assert "/no/such" not in text


def test_health_and_page(http):
    assert http.get("/livez").status_code == 200
    assert http.get("/readyz").status_code == 200
    page = http.get("/ui")
    assert page.status_code == 200
    assert page.url.path == "/ui/"
    assert "<html" in page.text
    assert http.get("/ui/nosuch.js").status_code == 404
    assert http.get("/ui/../service.py").status_code == 404


@pytest.mark.parametrize("target", [-1, 1.5, True, 10**30])
def test_a_wrong_target_is_named_as_callers_know_it(http, pngs, target):
    error = http.post("/explain", json={"image": b64(pngs[0]), "target": target}).json()["error"]
    assert error["code"] == "invalid"
    assert error["message"].startswith("target: input should be ")


def test_the_openapi_document_is_served_under_both_names(http):
    served = http.get("/openapi.json").json()
    assert served == http.get("/docs.json").json() == json.loads(json.dumps(document()))
