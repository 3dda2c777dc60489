"""The Audits page inside MLflow's own application, in this process: what it shows, refuses, escapes and checks."""

import base64
import hashlib
import json
import os
import re
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlencode

import mlflow
import pytest

from auditor import plugins
from auditor.explainers.manifest import seal, sha256
from auditor.plugins.registry.location import resolve, set_tag
from tests.plugins.server import mlflow_server

EVIL = "<script>alert(1)</script>"
EVIL_NAME = "<img src=x onerror=alert(1)> it's & co"


@pytest.fixture(scope="module")
def own_store(tmp_path_factory, trained):
    """An embedded store of this module's own with models:/digits/1, since hostile names go into it."""
    folder = tmp_path_factory.mktemp("pages")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    mlflow.MlflowClient().create_experiment("tests", artifact_location=(folder / "artifacts").as_uri())
    plugins.log_subject(trained[0], "digits", experiment="tests")
    return uri


@pytest.fixture(scope="module")
def app(own_store):
    """MLflow's application with the page, on that store."""
    from mlflow.server import handlers

    os.environ["_MLFLOW_SERVER_FILE_STORE"] = own_store
    handlers._tracking_store = handlers._model_registry_store = None
    from auditor.plugins.server import create_app

    yield create_app()
    handlers._tracking_store = handlers._model_registry_store = None
    del os.environ["_MLFLOW_SERVER_FILE_STORE"]


@pytest.fixture
def page(app, own_store):
    from starlette.testclient import TestClient

    mlflow.set_tracking_uri(own_store)
    mlflow.set_registry_uri(own_store)
    return TestClient(app, base_url="http://localhost")


def metric(value, direction="up", half=0.05, status="passed", reason=""):
    return {
        "value": value,
        "low": None if value is None else value - half,
        "high": None if value is None else value + half,
        "n": 30,
        "null": 0.1,
        "direction": direction,
        "status": status,
        "reason": reason,
    }


def store_audit(
    uri: str, metrics: dict, folder: Path, *, report: str = "<h1>Report</h1>", data="a" * 64, picture: bytes = b""
) -> Path:
    """Store an audit as `plugins/registry/audits.py` does, files first, then the tag; return where the files are."""
    version = resolve(uri)
    audit = json.dumps({"metrics": metrics}).encode()
    digest = hashlib.sha256(audit).hexdigest()
    folder.mkdir()
    (folder / "audit.json").write_bytes(audit)
    (folder / "report.html").write_text(report)
    if picture:
        (folder / "findings.png").write_bytes(picture)
    version.repository().log_artifacts(str(folder), f"audits/{digest[:12]}")
    explainers = {
        k.removeprefix("auditor.explainer."): json.loads(v)["digest"]
        for k, v in version.tags.items()
        if "explainer" in k
    }
    value = {
        "location": f"audits/{digest[:12]}",
        "digest": digest,
        "time": "2026-11-16T17:00:00+00:00",
        "data": "sklearn:digits?split=test",
        "data_digest": data,
        "seed": 0,
        "n_metrics": len(metrics),
        "explainers": explainers,
        "files": {"report.html": hashlib.sha256(report.encode()).hexdigest()}
        | ({"findings.png": hashlib.sha256(picture).hexdigest()} if picture else {}),
    }
    set_tag(version, "auditor.audit", json.dumps(value))
    return Path(version.root.removeprefix("file://")) / "audits" / digest[:12]


def set_gate(uri: str, *, file: bool = True, checks: list | None = None, **changed) -> None:
    """Store a verdict as `plugins/registry/verdicts.py` does; without its file it is a tag that somebody wrote."""
    version = resolve(uri)
    audit = json.loads(version.tags.get("auditor.audit", "{}")).get("digest", "")
    value = {
        "verdict": "pass",
        "time": "2026-11-16T17:05:00+00:00",
        "policy": "policy.toml",
        "policy_digest": "",
        "baseline": "",
        "checks": 3,
        "failed": [],
        "audit_digest": audit,
    } | changed
    if file:
        content = seal(
            {"model": uri, "verdict": value["verdict"], "audit_digest": value["audit_digest"]}
            | {"checks": checks or []}
        )
        value |= {"digest": sha256(content), "location": f"auditor/verdicts/{sha256(content)[:12]}"}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "verdict.json").write_bytes(content)
            version.repository().log_artifacts(folder, value["location"])
    set_tag(version, "auditor.gate", json.dumps(value))


@pytest.fixture(scope="module")
def shown(own_store, concepts, tmp_path_factory):
    """``models:/shown``: version 1 audited and passed, version 2 audited and failed, version 3 bare."""
    mlflow.set_tracking_uri(own_store)
    mlflow.set_registry_uri(own_store)
    client = mlflow.MlflowClient()
    client.create_registered_model("shown", description="Three versions")
    source = resolve("models:/digits/1")
    for _ in range(3):
        client.create_model_version("shown", f"models:/{source.model_id}", model_id=source.model_id)
    client.set_registered_model_alias("shown", "champion", "1")
    plugins.attach(concepts, "models:/shown/1", "concepts")
    plugins.attach(concepts, "models:/shown/2", "concepts")
    folder = tmp_path_factory.mktemp("audits")
    first = {"model/accuracy": metric(0.9), "model/loss": metric(0.5, "down"), "model/norm": metric(1.0, "none")}
    second = {"model/accuracy": metric(0.7), "model/loss": metric(0.52, "down"), "model/norm": metric(1.5, "none")}
    second["model/new"] = metric(None, status="skipped", reason=f"no labels {EVIL}")
    store_audit("models:/shown/1", first, folder / "1", report=f"<h1>First</h1>{EVIL}")
    store_audit("models:/shown/2", second, folder / "2")
    set_gate("models:/shown/1")
    set_gate("models:/shown/2", verdict="fail", failed=["model/accuracy"])
    return "shown"


def text_of(answer) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", answer.text))


def test_home_lists_models_with_their_newest_version(page, shown):
    answer = page.get("/auditor")
    assert answer.status_code == 200
    assert "shown @champion is 1" in text_of(answer)
    assert page.get("/auditor/").text == answer.text
    only = page.get("/auditor?q=SHOW")
    assert "/auditor/model?name=shown" in only.text
    assert "/auditor/model?name=digits" not in only.text
    assert "No registered model has" in page.get("/auditor?q=nothing-like-it").text


def test_model_page_shows_verdicts_and_offers_a_comparison(page, shown):
    text = text_of(page.get("/auditor/model?name=shown"))
    assert re.search(r"3 20\d\d-\d\d-\d\d none not audited no gate yet", text)
    assert re.search(r"2 20\d\d-\d\d-\d\d concepts nmf Report 2026-11-16 17:00 UTC ✗ failed", text)
    assert re.search(r"1 @champion 20\d\d-\d\d-\d\d concepts nmf Report 2026-11-16 17:00 UTC ✓ passed", text)


def test_version_page_comes_at_once_and_its_parts_follow(page, shown):
    whole = page.get("/auditor/version?name=shown&version=2")
    assert "Checking 1 explainer" in whole.text
    assert "<li><code>model/accuracy</code></li>" in whole.text
    for part in re.findall(r'data-load="([^"]+)"', whole.text):
        answer = page.get(part.replace("&amp;", "&"))
        assert answer.headers["x-auditor-part"] == "1"
        assert "<html" not in answer.text
    explainers = text_of(page.get("/auditor/version/explainers?name=shown&version=2"))
    assert "concepts" in explainers
    assert "✓ verified" in explainers
    audit = text_of(page.get("/auditor/version/audit?name=shown&version=2"))
    assert "model/accuracy 0.7000 0.6500 to 0.7500 0.1000 higher" in audit
    assert "model/new skipped: no labels &lt;script&gt;" in audit
    full = text_of(page.get("/auditor/version?name=shown&version=champion&full=1"))
    assert "✓ verified" in full
    assert "model/accuracy 0.9000" in full
    bare = text_of(page.get("/auditor/version?name=shown&version=3&full=1"))
    assert "Nothing is attached" in bare
    assert "has not been audited" in bare
    assert "No policy has been applied" in bare


def test_failed_checks_come_with_value_limit_reason_and_picture(page, own_store, shown, tmp_path):
    client = mlflow.MlflowClient()
    client.create_registered_model("stopped")
    source = resolve("models:/digits/1").model_id
    version = client.create_model_version("stopped", f"models:/{source}", model_id=source).version
    uri, where = f"models:/stopped/{version}", urlencode({"name": "stopped", "version": version})
    stored = store_audit(uri, {"model/accuracy": metric(0.98)}, tmp_path / "a", picture=b"the picture")
    found = {"metric": "model/reliance/found", "value": 1.0, "limit": "at most 0", "verdict": "fail"}
    checks = [found | {"reason": f"1 is not at most 0. Class hawk hangs on one small spot {EVIL}"}]
    checks += [{"metric": "model/accuracy", "value": 0.98, "limit": "at least 0.95", "verdict": "pass"}, "odd", {}]
    set_gate(uri, verdict="fail", failed=["model/reliance/found"], checks=checks)
    answer = page.get(f"/auditor/version?{where}")
    assert "model/reliance/found 1 at most 0 1 is not at most 0. Class hawk hangs on one small spot" in text_of(answer)
    assert "<script>alert" not in answer.text
    assert "at least 0.95" not in answer.text
    (address,) = re.findall(r'<img src="([^"]+)" alt="Pictures of what', answer.text)
    shown_picture = page.get(address.replace("&amp;", "&"))
    assert (shown_picture.content, shown_picture.headers["content-type"]) == (b"the picture", "image/png")
    assert shown_picture.headers["content-security-policy"].startswith("sandbox;")
    (stored / "findings.png").write_bytes(b"another picture")
    assert page.get(f"/auditor/picture?{where}").status_code == 409
    assert page.get("/auditor/picture?name=shown&version=1").status_code == 404


def test_comparison_says_better_and_worse_only_where_it_means_something(page, shown):
    query = {"left": "shown", "left_version": "champion", "right": "shown", "right_version": "2"}
    text = text_of(page.get(f"/auditor/compare?{urlencode(query)}"))
    assert "model/accuracy 0.9000 0.8500 to 0.9500 0.7000 0.6500 to 0.7500 −0.2000 ▼ worse" in text  # noqa: RUF001
    assert "+0.0200 within the intervals" in text
    assert "+0.5000 changed" in text
    assert "not measured" in text
    text = text_of(page.get(f"/auditor/compare?{urlencode({**query, 'right_version': '3'})}"))
    assert " models:/shown/3 has not been audited." in text
    assert "▼" not in text
    text = text_of(page.get(f"/auditor/compare?{urlencode({**query, 'right_version': '99'})}"))
    assert "not found" in text
    assert "Compare two versions" in text_of(page.get("/auditor/compare"))


def test_the_report_is_served_in_a_sandbox_without_scripts(page, shown):
    answer = page.get("/auditor/report?name=shown&version=1")
    assert answer.text == f"<h1>First</h1>{EVIL}"
    policy = answer.headers["content-security-policy"]
    assert re.match(r"sandbox; default-src 'none';", policy)
    assert "script-src" not in policy
    assert "allow-scripts" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert page.get("/auditor/report?name=shown&version=3").status_code == 404


def test_tampered_reports_audits_and_explainers_are_named_and_never_shown(page, shown, concepts, app, tmp_path):
    client = mlflow.MlflowClient()
    version = client.create_model_version("shown", f"models:/{resolve('models:/digits/1').model_id}").version
    uri = f"models:/shown/{version}"
    plugins.attach(concepts, uri, "edited")
    stored = store_audit(uri, {"model/edited": metric(0.123)}, tmp_path / "a", report="<p>as written</p>")
    where = urlencode({"name": "shown", "version": version})
    (stored / "report.html").write_text("<p>as edited</p>")
    answer = page.get(f"/auditor/report?{where}")
    assert answer.status_code == 409
    assert "as edited" not in answer.text
    assert f"report.html of {uri} is not what was stored" in text_of(answer)
    (stored / "audit.json").write_text((stored / "audit.json").read_text().replace("0.123", "0.999"))
    audit = page.get(f"/auditor/version/audit?{where}").text
    assert "✗ not verified" in audit
    assert "0.999" not in audit
    root = Path(resolve(uri).root.removeprefix("file://"))
    entry = json.loads(resolve(uri).tags["auditor.explainer.edited"])
    tensors = root / entry["location"] / "tensors.safetensors"
    content = tensors.read_bytes()
    tensors.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    explainers = text_of(page.get(f"/auditor/version/explainers?{where}"))
    assert f"✗ not verified tensors.safetensors in artifact {Path(entry['location']).name} is not what" in explainers
    tensors.write_bytes(content)
    set_tag(resolve(uri), "auditor.audit", "[1]")
    assert "not what an audit writes" in text_of(page.get(f"/auditor/report?{where}"))
    old = json.dumps({"location": "audits/x", "digest": "0" * 64})
    set_tag(resolve(uri), "auditor.audit", old)
    assert "holds no digest of its report" in text_of(page.get(f"/auditor/report?{where}"))


def test_what_changed_after_the_audit_is_said(page, shown, concepts, tmp_path):
    client = mlflow.MlflowClient()
    version = client.create_model_version("shown", f"models:/{resolve('models:/digits/1').model_id}").version
    uri = f"models:/shown/{version}"
    plugins.attach(concepts, uri, "old")
    store_audit(uri, {"model/a": metric(0.5)}, tmp_path / "a")
    set_gate(uri, audit_digest="f" * 64)
    plugins.attach(concepts, uri, "fresh")
    plugins.detach(uri, "old")
    text = text_of(page.get(f"/auditor/version?name=shown&version={version}"))
    assert "fresh was attached after the audit." in text
    assert "old was detached after the audit." in text
    assert "about an earlier audit" in text


def test_hostile_names_and_tags_are_harmless(page):
    client = mlflow.MlflowClient()
    client.create_registered_model(EVIL_NAME, description=EVIL)
    source = resolve("models:/digits/1").model_id
    client.create_model_version(EVIL_NAME, f"models:/{source}", description=EVIL)
    tags = {
        "auditor.explainer.up": {"location": "../../../etc", "kind": EVIL, "digest": "0" * 64, "time": EVIL},
        "auditor.explainer.odd": [EVIL],
        "auditor.audit": {"location": EVIL, "digest": "0" * 64, "data": EVIL, "time": EVIL, "explainers": {EVIL: EVIL}},
        "auditor.gate": {"verdict": "fail", "policy": EVIL, "failed": [EVIL, {}, None], "checks": EVIL, "time": 7},
    }
    for key, value in tags.items():
        client.set_model_version_tag(EVIL_NAME, "1", key, json.dumps(value))
    where = urlencode({"name": EVIL_NAME, "version": "1"})
    both = urlencode({"left": EVIL_NAME, "left_version": "1", "right": EVIL_NAME, "right_version": EVIL})
    paths = [
        "",
        f"?{urlencode({'q': EVIL})}",
        f"?{urlencode({'q': 'onerror'})}",
        f"/model?{where}",
        f"/version?{where}",
    ]
    paths += [f"/version?{where}&full=1", f"/version/explainers?{where}", f"/version/audit?{where}", f"/report?{where}"]
    paths += [f"/compare?{both}", f"/model?{urlencode({'name': EVIL})}", "/version?name=a&version=<script>"]
    for path in paths:
        answer = page.get(f"/auditor{path}")
        assert answer.status_code in (200, 400, 404, 409), (path, answer.status_code)
        tag = '<script src="/auditor/static/audits.js" defer></script>'
        assert "<script" not in answer.text.replace(tag, ""), path
        assert "<img" not in answer.text, path
        assert answer.headers["content-security-policy"].startswith("default-src 'none';"), path
    assert "not below the model" in text_of(page.get(f"/auditor/version/explainers?{where}"))


def test_long_lists_are_paged(page):
    client = mlflow.MlflowClient()
    client.create_registered_model("long")
    source = resolve("models:/digits/1").model_id
    for _ in range(60):
        client.create_model_version("long", f"models:/{source}")
    names, address = [], "/auditor/model?name=long"
    while address:
        answer = page.get(address)
        names.append(re.findall(r'/auditor/version\?name=long&amp;version=(\d+)"', answer.text))
        further = re.search(r'href="([^"]+)" rel="next"', answer.text)
        address = further[1].replace("&amp;", "&") if further else ""
    assert [len(numbers) for numbers in names] == [25, 25, 10]
    assert [int(n) for numbers in names for n in numbers] == list(range(60, 0, -1))


def test_hosts_origins_and_methods_are_held_as_by_mlflow(page, app, shown):
    from starlette.testclient import TestClient

    assert page.get("/auditor", headers={"host": "evil.example"}).status_code == 403
    assert TestClient(app, base_url="http://evil.example").get("/auditor/static/audits.js").status_code == 403
    answer = page.get("/auditor", headers={"origin": "http://evil.example"})
    assert "access-control-allow-origin" not in answer.headers
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert answer.headers["cache-control"] == "no-store"
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert page.request(method, "/auditor/version?name=shown&version=1").status_code in (404, 405)
    assert page.get("/health").text == "OK"  # MLflow itself is still there
    assert page.get("/api/2.0/mlflow/registered-models/get?name=shown").json()["registered_model"]["name"] == "shown"


def test_the_callers_own_rights_decide(app, shown, monkeypatch):
    """A refusal by MLflow, such as a missing login, reaches the browser as it is."""
    from flask import Response, request
    from mlflow.server import app as flask_app
    from starlette.testclient import TestClient

    def refuse():
        if request.headers.get("Authorization") != "Basic YTpi":
            return Response("You are not authenticated.", 401, {"WWW-Authenticate": 'Basic realm="mlflow"'})
        return None

    monkeypatch.setitem(flask_app.before_request_funcs, None, [refuse, *flask_app.before_request_funcs[None]])
    page = TestClient(app, base_url="http://localhost")
    for path in (
        "",
        "/version?name=shown&version=1",
        "/report?name=shown&version=1",
        "/version/audit?name=shown&version=1",
    ):
        answer = page.get(f"/auditor{path}")
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == 'Basic realm="mlflow"'
        assert "champion" not in answer.text
        assert page.get(f"/auditor{path}", headers={"authorization": "Basic YTpi"}).status_code == 200


def test_only_mlflows_default_server_can_serve_the_page(monkeypatch):
    from auditor.plugins.server import create_app

    monkeypatch.setenv("_MLFLOW_SGI_NAME", "gunicorn")
    with pytest.raises(mlflow.exceptions.MlflowException, match="needs uvicorn"):
        create_app()


@pytest.fixture
def asked(monkeypatch):
    """Which application was made: with MLflow's login, or without."""
    from auditor.plugins import server

    for name in ("AUDITOR_SERVER_AUTH", *server.LOGIN_SETTINGS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(server, "add_page", lambda app, flask_app: app)
    monkeypatch.setattr(server, "_with_login", lambda: "login")
    return server


@pytest.mark.parametrize(
    ("variables", "has_login", "sentence"),
    [
        ({}, False, "OPEN: no login is asked for"),
        ({"AUDITOR_SERVER_AUTH": "basic-auth"}, True, ""),
        ({"MLFLOW_AUTH_CONFIG_PATH": "auth.ini"}, True, "MLFLOW_AUTH_CONFIG_PATH is set, so MLflow's login is used"),
        ({"MLFLOW_FLASK_SERVER_SECRET_KEY": "s"}, True, "so MLflow's login is used"),
        ({"MLFLOW_AUTH_ADMIN_PASSWORD": "s", "AUDITOR_SERVER_AUTH": "none"}, False, "OPEN: no login is asked for"),
    ],
)
def test_settings_of_a_login_ask_for_it(asked, monkeypatch, caplog, variables, has_login, sentence):
    """Old code served everybody when AUDITOR_SERVER_AUTH was forgotten, without a word."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level("WARNING"):
        assert (asked.create_app() == "login") is has_login
    assert sentence in caplog.text
    assert bool(caplog.text) == bool(sentence)


def test_a_login_of_another_kind_is_refused(asked, monkeypatch):
    monkeypatch.setenv("AUDITOR_SERVER_AUTH", "ldap")
    with pytest.raises(mlflow.exceptions.MlflowException, match="want basic-auth or none, got 'ldap'"):
        asked.create_app()


def test_a_login_that_lacks_its_package_names_the_extra(monkeypatch):
    from auditor.plugins import server

    monkeypatch.setitem(sys.modules, "mlflow.server.auth", None)
    with pytest.raises(mlflow.exceptions.MlflowException, match=r"mlflow-auditor\[auth\]"):
        server._with_login()


def test_a_hand_made_verdict_is_never_shown_as_passed(page, shown):
    """The hole: one tag was enough for a green badge."""
    uri = "models:/shown/3"
    version = resolve(uri)
    try:
        set_gate(uri, file=False)
        for address in ("/auditor/model?name=shown", "/auditor/version?name=shown&version=3"):
            text = text_of(page.get(address))
            assert "! unverified" in text
        assert "the tag names no verdict file" in text_of(page.get("/auditor/version?name=shown&version=3")).lower()
        assert "✓ passed" not in text_of(page.get("/auditor/version?name=shown&version=3"))
        set_gate(uri, audit_digest="0" * 64)
        tag = json.loads(resolve(uri).tags["auditor.gate"])
        set_tag(version, "auditor.gate", json.dumps({**tag, "audit_digest": "1" * 64}))
        text = text_of(page.get("/auditor/version?name=shown&version=3"))
        assert "! unverified" in text
        assert "has audit_digest" in text
        set_gate(uri, verdict="fail", failed=["model/accuracy"])
        tag = json.loads(resolve(uri).tags["auditor.gate"])
        set_tag(version, "auditor.gate", json.dumps({**tag, "verdict": "pass", "failed": []}))
        assert "✓ passed" not in text_of(page.get("/auditor/version?name=shown&version=3"))
    finally:
        mlflow.MlflowClient().delete_model_version_tag("shown", "3", "auditor.gate")


def test_keys_that_can_no_longer_be_read_leave_no_verdict_verified(page, shown, monkeypatch, tmp_path):
    """Keys are read again at every page: one that was revoked since the server started no longer counts."""
    uri = "models:/shown/3"
    set_gate(uri)
    try:
        assert "✓ passed" in text_of(page.get("/auditor/version?name=shown&version=3"))
        monkeypatch.setenv("AUDITOR_TRUSTED", str(tmp_path / "gone"))
        text = text_of(page.get("/auditor/version?name=shown&version=3"))
        assert "✓ passed" not in text
        assert "no such folder" in text
    finally:
        mlflow.MlflowClient().delete_model_version_tag("shown", "3", "auditor.gate")


@pytest.mark.slow
def test_a_real_server_with_settings_of_a_login_lets_nobody_in_without_it(tmp_path):
    """Old code served this server's models to everybody, to read and to write."""
    pytest.importorskip("flask_wtf")
    variables = {
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "a-secret-of-this-test",
        "MLFLOW_AUTH_ADMIN_PASSWORD": "a-long-password",
    }
    config = tmp_path / "auth.ini"
    config.write_text(
        "[mlflow]\ndefault_permission = READ\n"
        f"database_uri = sqlite:///{tmp_path}/auth.db\nadmin_username = admin\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    variables["MLFLOW_AUTH_CONFIG_PATH"] = str(config)
    with mlflow_server(tmp_path, "--app-name", "auditor", **variables) as address:
        for path in ("/auditor", "/api/2.0/mlflow/registered-models/search"):
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(address + path, timeout=60)
            assert caught.value.code == 401
        login = base64.b64encode(b"admin:a-long-password").decode()
        request = urllib.request.Request(f"{address}/auditor", headers={"Authorization": f"Basic {login}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200
