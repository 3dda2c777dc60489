"""REST store: every question goes through the server's own interface, with the caller's headers and no others."""

import hashlib
import json
from urllib.parse import parse_qs, urlsplit

import flask
import pytest

from auditor.errors import TamperError
from auditor.plugins.audits_site import rest_store
from auditor.plugins.audits_site.rest_store import Refused, ServerStore, mlflow_link, quoted

HEADERS = {"Authorization": "Basic x", "Cookie": "c=1", "Host": "h:5000", "X-MLFLOW-WORKSPACE": "w", "X-Evil": "1"}


@pytest.fixture
def server():
    """A Flask application that answers from ``answers`` and remembers what it was asked."""
    app = flask.Flask("mlflow")
    app.answers, app.asked = {}, []

    @app.get("/<path:path>")
    def answer(path):
        request = flask.request
        app.asked.append((f"/{path}", request.args.to_dict(), dict(request.headers)))
        return app.answers.get(f"/{path}", flask.Response(json.dumps({"message": "no such thing"}), 404))

    return app


def test_only_the_headers_that_say_who_asks_are_passed_on(server):
    server.answers["/p/api/2.0/mlflow/registered-models/get"] = {"registered_model": {"name": "m"}}
    assert ServerStore(server, HEADERS, "/p").model("m") == {"name": "m"}
    ((_, arguments, headers),) = server.asked
    assert arguments == {"name": "m"}
    assert {headers[k] for k in ("Authorization", "Cookie", "Host")} == {"Basic x", "c=1", "h:5000"}
    assert "X-Evil" not in headers


def test_models_are_searched_by_a_part_of_their_name(server):
    server.answers["/api/2.0/mlflow/registered-models/search"] = {"registered_models": [1], "next_page_token": "t"}
    listing = ServerStore(server, {}).models("dig", "page", 7)
    assert (listing.entries, listing.next_token) == ([1], "t")
    assert server.asked[0][1] == {"max_results": "7", "page_token": "page", "filter": "name ILIKE '%dig%'"}
    ServerStore(server, {}).models()
    assert server.asked[1][1] == {"max_results": "20"}  # what is empty is not asked


def test_versions_come_newest_first_and_an_empty_answer_is_an_empty_list(server):
    server.answers["/api/2.0/mlflow/model-versions/search"] = {}
    listing = ServerStore(server, {}).versions("it's", limit=3)
    assert (listing.entries, listing.next_token) == ([], "")
    assert server.asked[0][1] == {"filter": 'name = "it\'s"', "max_results": "3", "order_by": "version_number DESC"}


@pytest.mark.parametrize(
    ("version", "path"),
    [("3", "model-versions/get"), ("champion", "registered-models/alias"), ("²", "registered-models/alias")],
)
def test_a_version_is_a_number_or_an_alias(server, version, path):
    server.answers[f"/api/2.0/mlflow/{path}"] = {"model_version": {"version": "3"}}
    assert ServerStore(server, {}).version("m", version) == {"version": "3"}
    assert version in server.asked[0][1].values()


def test_files_are_read_and_hashed_as_they_come(server):
    content = bytes(range(256)) * 1000
    server.answers["/model-versions/get-artifact"] = content
    store = ServerStore(server, {})
    assert store.read("m", "1", "a/b") == content
    assert store.sha256("m", "1", "a/b") == (hashlib.sha256(content).hexdigest(), len(content))
    assert server.asked[0][1] == {"name": "m", "version": "1", "path": "a/b"}


def test_a_file_that_is_too_large_is_refused(server, monkeypatch):
    monkeypatch.setattr(rest_store, "LARGEST_TEXT", 10)
    server.answers["/model-versions/get-artifact"] = b"x" * 10
    assert len(ServerStore(server, {}).read("m", "1", "a")) == 10
    server.answers["/model-versions/get-artifact"] = b"x" * 11
    with pytest.raises(Refused, match="larger than") as caught:
        ServerStore(server, {}).read("m", "1", "a")
    assert caught.value.status == 413


def test_a_path_out_of_the_folder_is_never_asked(server):
    with pytest.raises(TamperError, match="not below"):
        ServerStore(server, {}).read("m", "1", "../secret")
    assert not server.asked


@pytest.mark.parametrize(("status", "error"), [(401, Refused), (403, Refused), (404, TamperError), (500, TamperError)])
def test_a_missing_file_is_not_the_same_as_a_forbidden_one(server, status, error):
    server.answers["/model-versions/get-artifact"] = flask.Response("no", status)
    with pytest.raises(error):
        ServerStore(server, {}).read("m", "1", "a")


def test_refusals_keep_mlflows_status_sentence_and_challenge(server):
    path = "/api/2.0/mlflow/registered-models/get"
    with pytest.raises(Refused, match="no such thing") as caught:
        ServerStore(server, {}).model("m")
    assert (caught.value.status, caught.value.headers) == (404, {})
    server.answers[path] = flask.Response("please\n log in", 401, {"WWW-Authenticate": 'Basic realm="mlflow"'})
    with pytest.raises(Refused, match="please log in") as caught:
        ServerStore(server, {}).model("m")
    assert caught.value.headers == {"WWW-Authenticate": 'Basic realm="mlflow"'}
    server.answers[path] = flask.Response("Traceback: secret", 500)
    with pytest.raises(Refused, match=r"MLflow could not answer\.") as caught:
        ServerStore(server, {}).model("m")
    assert "secret" not in str(caught.value)
    server.answers[path] = flask.Response(json.dumps({"message": "x" * 500}), 400)
    with pytest.raises(Refused) as caught:
        ServerStore(server, {}).model("m")
    assert len(str(caught.value)) == 200


def test_quotes_cannot_be_left():
    assert quoted("a") == "'a'"
    assert quoted("a'b") == '"a\'b"'
    with pytest.raises(Refused, match="both kinds of quotes"):
        quoted("a'b\"c")


def test_links_lead_to_mlflows_pages():
    assert mlflow_link("/p", "a/b") == "/p/#/models/a%2Fb"
    link = mlflow_link("", "m", "3?x")
    assert link == "/#/models/m/versions/3%3Fx"
    assert parse_qs(urlsplit(link).query) == {}
