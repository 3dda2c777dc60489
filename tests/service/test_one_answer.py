"""Every way to an answer gives the same numbers: terminal, REST, KServe, deployments client, clients and Python."""

import base64
import io
import math

import pytest

pytest.importorskip("bentoml")

import httpx
import mlflow
import torch
from PIL import Image
from starlette.testclient import TestClient

from auditor import fit, open_data
from auditor.auditing.case import Case, Effort
from auditor.auditing.images import AuditImages
from auditor.explainers.answer import answer_images
from auditor.plugins import attach, load, load_subject, log_subject
from auditor.plugins.deployments import AuditorDeploymentClient
from auditor.plugins.registry.explain_image import explain_image
from auditor.service.client import Client
from auditor.service.handlers import Routes
from auditor.service.middleware import Middleware
from auditor.service.routes import mounted
from auditor.service.settings import Settings
from auditor.service.worker import Worker
from auditor.subject.preprocessing import from_pil
from tests.service.conftest import png_of

TOLERANCE = 1e-6  # of the value, or of 1: float32 sums of a batch may come in another order
SEARCH = {"timeout_s": 60.0, "max_steps": 3}  # time enough that no clock decides
OPTIONS = {"explainers": ["*"], "target": "3", "seed": 5, "noise_samples": 3, "radius": 0.01, **SEARCH}
KINDS = {
    "coupled": {"rank": 4, "max_iter": 60, "lambda_table": False},
    "tree": {"n_features": 16, "epochs": 1, "depth": 3},
    "deepfacto": {"rank": 6, "epochs": 1, "refits": 0},
    "rde": {"rates": [0.2, 0.5], "draws": 4, "eval_draws": 8, "max_steps": 3, "calibration_images": 2},
}


@pytest.fixture(scope="module")
def everything(store, trained, concepts, heads):
    """models:/everything/1 with an explainer of every kind, barely fitted."""
    mlflow.set_tracking_uri(store)
    mlflow.set_registry_uri(store)
    uri = log_subject(trained[0], "everything", experiment="tests")
    subject = load_subject(uri)
    few = open_data("sklearn:digits", limit=120)
    explainers = {"nmf": concepts, "xnn": heads}
    explainers |= {kind: fit(kind, subject, few, seed=0, **options) for kind, options in KINDS.items()}
    for kind, explainer in explainers.items():
        attach(explainer, uri, kind, subject=subject, attach_anyway=True)
    concepts.name = heads.name = ""
    return uri


class Served:
    """The service's application in this process, with the lifespan that BentoML gives it elsewhere."""

    def __init__(self, settings: Settings) -> None:
        self.worker = Worker(settings)
        self.app = Middleware(mounted(lambda: Routes(self.worker)))

    async def __call__(self, scope, receive, send):
        if scope["type"] != "lifespan":
            await self.app(scope, receive, send)
            return
        await receive()
        await self.worker.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.worker.stop()
        await send({"type": "lifespan.shutdown.complete"})


@pytest.fixture(scope="module")
def rest(everything):
    with TestClient(
        Served(
            Settings(model=everything, engine="torch", poll_s=3600, max_search_timeout_s=60.0, request_timeout_s=600.0)
        ),
        base_url="http://localhost",
    ) as http:
        assert http.get("/model").json()["engine"] == "torch"
        yield http


@pytest.fixture(scope="module")
def picture(trained):
    """The bytes of one image, and its pixels as the model takes them."""
    content = png_of(next(open_data("sklearn:digits").batches(trained[0], 4)).images[3])
    with Image.open(io.BytesIO(content)) as image:
        return content, torch.from_numpy(from_pil(image, trained[0].preprocessing))


def numbers(value, path="") -> dict[str, float | str | None]:
    """Every leaf of an answer by its path, without times and ids."""
    if isinstance(value, dict):
        parts = [(str(k), v) for k, v in value.items() if k not in ("timings", "request_id", "seconds")]
    elif isinstance(value, (list, tuple)):
        parts = [(str(i), v) for i, v in enumerate(value)]
    else:
        return {path: value}
    return {k: v for name, part in parts for k, v in numbers(part, f"{path}/{name}").items()}


def differences(one, other) -> list[str]:
    a, b = numbers(one), numbers(other)
    wrong = [f"{path}: only one way has it" for path in a.keys() ^ b.keys()]
    for path in a.keys() & b.keys():
        x, y = a[path], b[path]
        both = isinstance(x, (int, float)) and isinstance(y, (int, float))
        # a residual is what is left of a logit ten times and more its size, in float32
        rounding = 10 * TOLERANCE if path.endswith("/residual") else TOLERANCE
        if not (math.isclose(x, y, rel_tol=TOLERANCE, abs_tol=rounding) if both else x == y):
            wrong.append(f"{path}: {x} and {y}")
    return wrong


class InProcess(httpx.BaseTransport):
    """Sends the client's requests to the application in this process, whichever httpx its test client is built on."""

    def __init__(self, application: TestClient) -> None:
        self.application = application

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self.application.request(
            request.method, request.url.raw_path.decode(), content=request.read(), headers=dict(request.headers)
        )
        return httpx.Response(answer.status_code, headers=dict(answer.headers), content=answer.content)


class Reply(io.BytesIO):
    headers: dict[str, str] = {}  # noqa: RUF012


def answers_by_every_way(rest, cli, uri, explainers, picture, path, options, monkeypatch) -> dict[str, dict]:
    """The answer for one image by each way to it; lists of names go by commas where a way takes text."""
    content, x = picture
    path.write_bytes(content)
    encoded = base64.b64encode(content).decode()

    def posted(request, *_args, **_kwargs):
        response = rest.request(request.get_method(), "/" + request.full_url.split("/", 3)[3], content=request.data,
                                headers=dict(request.header_items()))  # fmt: skip
        assert response.status_code == 200, response.text
        return Reply(response.content)

    monkeypatch.setattr("urllib.request.urlopen", posted)
    form = {name: ",".join(value) if isinstance(value, list) else value for name, value in options.items()}
    flags = [part for name, value in form.items() for part in (f"--{name.replace('_', '-')}", value)]
    client = Client("http://localhost", transport=InProcess(rest))
    return {
        "REST": rest.post("/explain", json={"image": encoded, **options}).json(),
        "form": rest.post("/explain", files={"image": content}, data=form).json(),
        "raw": rest.post("/explain", content=content, params=form, headers={"content-type": "image/png"}).json(),
        "batch": rest.post("/explain_batch", json={"images": [encoded, encoded], **options}).json()["answers"][1],
        "KServe": rest.post(
            "/v1/models/everything:explain", json={"instances": [{"b64": encoded}], "parameters": options}
        ).json()["explanations"][0],
        "KServe, each": rest.post(
            "/v1/models/everything:explain", json={"instances": [{"b64": encoded, **options}]}
        ).json()["explanations"][0],
        "deployments": AuditorDeploymentClient("auditor://localhost:80").explain(
            "everything", [{"image": content, **options}]
        )[0],
        "client": client.explain(content, **options).model_dump(mode="json"),
        "terminal": cli.json("explain", uri, path, *flags),
        "Python, registry": explain_image(uri, path, **options),
        "Python, library": answer_images(load_subject(uri), explainers, x[None], **options)[0].to_json(),
    }


@pytest.fixture(scope="module")
def loaded(everything):
    subject = load_subject(everything)
    return subject, {name: load(everything, name, subject=subject) for name in sorted(["nmf", "xnn", *KINDS])}


@pytest.mark.parametrize("stability", ["off", "fast", pytest.param("full", marks=pytest.mark.slow)])
def test_every_way_gives_the_same_numbers(rest, cli, everything, loaded, picture, tmp_path, monkeypatch, stability):
    x, (subject, explainers) = picture[1], loaded
    options = {**OPTIONS, "stability": stability, "heatmaps": "array"}
    ways = answers_by_every_way(
        rest, cli, everything, explainers, picture, tmp_path / "image.png", options, monkeypatch
    )
    first = ways["REST"]
    assert {e["kind"] for e in first["explanations"]} == {"nmf", "xnn", *KINDS}
    assert all(e["concepts"] and not e["problem"] for e in first["explanations"])
    assert first["target"]["label"] == "3"
    assert (first["stability"] is None) == (stability == "off")
    for name, answer in ways.items():
        assert not differences(first, answer), name
    # in company a float32 sum may come in another order, which maps and differences of near equals show more
    pair = answer_images(subject, explainers, x[None].expand(2, -1, -1, -1), **options)
    apart = [d for d in differences(first, pair[1].to_json()) if "/heatmap/" not in d and "/extra/" not in d]
    assert not apart
    for e in first["explanations"]:  # what the audit and the evaluator measure
        sample = AuditImages(x[None], subject.logits(x[None]).detach(), torch.tensor([3]), ["x"])
        case = Case(subject, explainers[e["name"]], sample, None, Effort(options=_taken(explainers, e)))
        (audited,) = case.explain(subject, "as it is", sample, x[None], [3])
        wanted = {c["index"]: c["contribution"] for c in e["concepts"]}
        assert not differences(wanted, {c.index: c.contribution for c in audited.concepts}), e["name"]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"explainers": ["xnn", "nmf"], "top_k": 2, "seed": 1, "heatmaps": "array"}, [("xnn", 2), ("nmf", 2)]),
        ({"explainers": ["tree"], "target": 0, "top_k": 1, "heatmaps": "none", "radius": 0.3}, [("tree", 1)]),
        ({"explainers": ["rde"], "stability": "off", "heatmaps": "none", "top_k": 3, **SEARCH}, [("rde", 3)]),
    ],
)
def test_a_choice_is_the_same_by_every_way(
    rest, cli, everything, loaded, picture, tmp_path, monkeypatch, options, shown
):
    ways = answers_by_every_way(rest, cli, everything, loaded[1], picture, tmp_path / "image.png", options, monkeypatch)
    first = ways["REST"]
    assert [(e["name"], len(e["concepts"])) for e in first["explanations"]] == shown
    assert (first["stability"] is None) == ("stability" in options)
    for name, answer in ways.items():
        assert not differences(first, answer), name


def _taken(explainers, explanation):
    per_request = explainers[explanation["name"]].per_request
    return {name: value for name, value in SEARCH.items() if name in per_request}


def test_who_searches_answers_when_named(rest, cli, everything, picture, tmp_path):
    content, _ = picture
    quick = {"heatmaps": "none", "stability": "off"}
    default = rest.post("/explain", files={"image": content}, data=quick).json()
    assert "rde" not in {e["kind"] for e in default["explanations"]}
    assert len(default["explanations"]) == len(KINDS) + 1
    path = tmp_path / "image.png"
    path.write_bytes(content)
    names = [e["name"] for e in default["explanations"]]
    same = cli.json("explain", everything, path, "--explainers", ",".join(names), "--heatmaps", "none", "--stability",
                    "off")  # fmt: skip
    assert not differences(default, same)


def test_the_same_mistake_gets_the_same_sentence(rest, cli, everything, picture, tmp_path):
    content, _ = picture
    path = tmp_path / "image.png"
    path.write_bytes(content)
    for name, value in (("target", "dog"), ("target", "99"), ("explainers", "nosuch")):
        message = rest.post("/explain", files={"image": content}, data={name: value}).json()["error"]["message"]
        assert cli.fails("explain", everything, path, f"--{name}", value) == f"auditor: error: {message}"
    message = rest.post("/explain", files={"image": content}, data={"noise_samples": "65"}).json()["error"]["message"]
    assert cli.fails("explain", everything, path, "--noise-samples", "65") == f"auditor: error: explain: {message}"


def test_old_names_work_for_one_release_with_a_warning(rest, cli, everything, picture, tmp_path):
    content, _ = picture
    path = tmp_path / "image.png"
    path.write_bytes(content)
    new = {"heatmaps": "none", "explainers": "nmf", "noise_samples": "2"}
    old = {"heatmaps": "none", "explainers": "nmf", "samples": "2"}
    fresh, aged = (rest.post("/explain", files={"image": content}, data=data) for data in (new, old))
    assert not differences(fresh.json(), aged.json())
    assert "deprecation" not in fresh.headers
    assert aged.headers["deprecation"].startswith("@")
    assert "samples is called noise_samples now" in aged.headers["warning"]
    instances = {"instances": [{"b64": base64.b64encode(content).decode(), **old, "explainers": ["nmf"], "samples": 2}]}
    assert "noise_samples" in rest.post("/v1/models/everything:explain", json=instances).headers["warning"]
    result = cli("explain", everything, path, "--explainer", "nmf", "--samples", "2", "--heatmaps", "none", "--json")
    lines = result.stderr.strip().splitlines()
    assert (
        lines[0] == "auditor: warning: --explainer is called --explainers now; the old name goes with the next release."
    )
    assert lines[1].startswith("auditor: warning: --samples is called --noise-samples now")
    assert len(lines) == 2
    with pytest.warns(DeprecationWarning, match="samples is called noise_samples now"):
        by_name = explain_image(everything, path, explainers=["nmf"], samples=2, heatmaps="none")
    assert not differences(fresh.json(), by_name)
    with pytest.warns(DeprecationWarning, match="noise_samples"):
        by_client = Client("http://localhost", transport=InProcess(rest)).explain(
            content, explainers=["nmf"], samples=2, heatmaps="none"
        )
    assert not differences(fresh.json(), by_client.model_dump(mode="json"))
