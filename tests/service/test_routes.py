"""Routes: what is mounted, what the document has and what the pages name is one table."""

import asyncio
import re
from pathlib import Path

import pytest
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from auditor.service.handlers import Routes
from auditor.service.openapi import document
from auditor.service.problems import BY_STATUS, Problem
from auditor.service.routes import (
    PARAMETERS,
    STATUS_OF_LIMIT,
    TABLE,
    is_logged,
    label_of,
    mounted,
    needs_key,
)
from auditor.service.settings import Settings

ROOT = Path(__file__).parents[2]
OF_BENTOML = {entry.path for entry in TABLE if not entry.handler}


def test_what_is_mounted_is_the_table():
    routes = mounted(lambda: None).routes
    served = {(method, route.path) for route in routes if isinstance(route, Route) for method in route.methods}
    expected = {(entry.method, entry.path) for entry in TABLE if entry.handler}
    assert served - {(m, p) for m, p in served if m == "HEAD"} == expected
    assert [route.path for route in routes if isinstance(route, Mount)] == ["/ui"]
    assert len(TABLE) == len({(entry.method, entry.path) for entry in TABLE})


def test_bentoml_answers_what_is_left_to_it():
    from bentoml._internal.server.base_app import BaseAppFactory

    class Factory(BaseAppFactory):
        name = "test"
        is_main = True

    assert {route.path for route in Factory(timeout=1).get_system_routes()} >= OF_BENTOML


def test_every_handler_exists_and_is_reached():
    named = {entry.handler for entry in TABLE} - {"", "page"}
    assert named == {name for name in vars(Routes) if not name.startswith("_")}


def test_the_document_has_the_tables_routes_and_no_others():
    operations = {(m.upper(), path) for path, item in document()["paths"].items() for m in item}
    assert operations == {(entry.method, entry.path) for entry in TABLE if entry.in_document}
    for entry in TABLE:
        if not entry.in_document:
            continue
        operation = document()["paths"][entry.path][entry.method.lower()]
        assert operation["summary"] == entry.summary
        assert set(operation["responses"]) == {"200", *map(str, entry.errors)}
        assert [p["name"] for p in operation.get("parameters", [])] == entry.parameters
        assert ("requestBody" in operation) == (entry.request is not None)


def test_limits_are_settings_and_their_statuses_have_a_sentence():
    for name, status in STATUS_OF_LIMIT.items():
        assert name in Settings.model_fields
        assert str(status) in Settings.model_fields[name].description or name == "slow_queue"
        assert status in BY_STATUS
    for entry in TABLE:
        assert set(entry.errors) <= set(BY_STATUS)
        assert set(entry.parameters) <= set(PARAMETERS)


@pytest.mark.parametrize(
    ("path", "errors"),
    [
        ("/explain", (400, 401, 403, 408, 413, 415, 422, 429, 500, 503)),
        ("/v1/models/{name}:explain", (400, 401, 403, 404, 408, 413, 415, 422, 429, 500, 503)),
        ("/model", (401, 403, 429, 500, 503)),
        ("/gallery/{explainer}", (401, 403, 404, 429, 500, 503)),
        ("/openapi.json", (403, 500, 503)),
        ("/livez", ()),
        ("/readyz", (503,)),
    ],
)
def test_errors_follow_from_what_a_route_takes(path, errors):
    (entry,) = [entry for entry in TABLE if entry.path == path]
    assert entry.errors == errors


def test_the_service_page_lists_exactly_the_routes_of_the_document():
    text = (ROOT / "docs" / "service.md").read_text()
    rows = re.findall(r"^\| `(GET|POST) (\S+)` \| (.*) \|$", text, re.M)
    assert rows == [(entry.method, entry.path, entry.summary) for entry in TABLE if entry.in_document]


@pytest.mark.parametrize("page", ["README.md", "docs/service.md"])
def test_the_pages_name_only_addresses_that_exist(page):
    text = (ROOT / page).read_text()
    named = set(re.findall(r"`(?:GET |POST )?(/[a-z_0-9.:{}/-]+)`", text))
    named |= {m.rstrip("'") for m in re.findall(r"127\.0\.0\.1:3000(/[a-z_0-9./:]+)", text)}
    existing = {entry.path for entry in TABLE} | {"/auditor", "/v1/models/digits:explain"}
    assert {path for path in named if path.rstrip("/") or path == "/"} - existing == set()
    assert "/explain" in named


def test_labels_are_few_whatever_callers_type():
    for entry in TABLE:
        if entry.path != "/":
            assert label_of(re.sub(r"\{\w+\}", "x", entry.path)) == entry.label
    assert label_of("/v1/models/digits:explain") == "/v1/models" == label_of("/v1/models")
    assert label_of("/gallery/concepts") == "/gallery"
    assert label_of("/ui/app.js") == "/ui" == label_of("/ui")
    for path in ("/", "/wp-admin", "/explain/", "/explainx", "/galleryx", "/uix", "", "/gallery"):
        assert label_of(path) == "other"


def test_only_health_the_page_and_the_document_need_no_key():
    assert {entry.path for entry in TABLE if not needs_key(entry.path)} == {
        "/", "/ui", "/livez", "/readyz", "/healthz", "/openapi.json", "/docs.json",
        "/v2", "/v2/health/live", "/v2/health/ready",
    }  # fmt: skip
    assert not needs_key("/ui/app.js")
    for path in ("/uix", "/livezx", "/livez/x", "//", "/openapi.json/x", "", "/metrics"):
        assert needs_key(path)


def test_health_and_metrics_are_not_logged():
    assert [entry.path for entry in TABLE if not is_logged(entry.path)] == [
        *("/v2/health/live", "/v2/health/ready", "/metrics", "/livez", "/readyz", "/healthz")
    ]
    assert is_logged("/nosuch")


class Handlers:
    async def model(self, request):
        raise Problem(503, "not yet", retry_after_s=7)


def test_a_problem_becomes_its_response_and_is_marked_as_ours():
    scopes = []
    app = mounted(Handlers)

    async def outer(scope, receive, send):
        scope["auditor.note"] = {}
        scope["auditor.request_id"] = "abc"
        scopes.append(scope)
        await app(scope, receive, send)

    response = TestClient(outer).get("/model")
    assert response.status_code == 503
    assert response.headers["retry-after"] == "7"
    assert response.json() == {"error": {"code": "unavailable", "message": "not yet", "request_id": "abc"}}
    assert scopes[0]["auditor.note"] == {"code": "unavailable"}
    assert scopes[0]["auditor.is_problem"]


def test_the_page_has_a_strict_policy_and_is_found_from_the_root():
    client = TestClient(mounted(lambda: None), follow_redirects=False)
    for path in ("/", "/ui"):
        response = client.get(path, headers={"accept": "text/html,*/*"})
        assert (response.status_code, response.headers["location"]) == (307, "ui/")
    assert client.get("/").json() == {"status": "alive"}  # as KServe's V1 client asks
    page = client.get("/ui/")
    assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert page.headers["cache-control"] == "no-cache"
    assert client.get("/ui/../keys.py").status_code == 404
    assert asyncio.iscoroutinefunction(next(r.endpoint for r in mounted(lambda: None).routes if r.path == "/model"))
