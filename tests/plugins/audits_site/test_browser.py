"""The Audits page of a real ``mlflow server --app-name auditor``, in a real Chromium."""

import json
import re
import urllib.request
from urllib.error import HTTPError
from urllib.parse import urlencode

import mlflow
import pytest

from auditor import plugins
from auditor.plugins.registry.location import resolve
from tests.browser import chromium
from tests.plugins.server import mlflow_server
from tests.plugins.test_server import EVIL, metric, set_gate, store_audit

pytestmark = pytest.mark.slow

EVIL_NAME = "<img src=x onerror=document.title='pwned'>"
TAB, ENTER = "Tab", "Enter"


@pytest.fixture(scope="module")
def server(tmp_path_factory, trained, concepts):
    """A server over HTTP with proxied artifacts, two audited versions and one hostile model."""
    folder = tmp_path_factory.mktemp("audits-server")
    with mlflow_server(folder, "--app-name", "auditor") as address:
        mlflow.set_tracking_uri(address)
        mlflow.set_registry_uri(address)
        for n in (1, 2):
            uri = plugins.log_subject(trained[0], "digits")
            plugins.attach(concepts, uri, "concepts")
            metrics = {f"model/layer{k}/a-rather-long-metric-name": metric(0.5 + 0.1 * n * k) for k in range(6)}
            store_audit(
                uri, metrics, folder / f"audit{n}", report=f"<h1>Report {n}</h1><script>document.title='pwned'</script>"
            )
            set_gate(uri, verdict="pass" if n == 1 else "fail", failed=[] if n == 1 else ["model/layer1", EVIL])
        client = mlflow.MlflowClient()
        client.create_registered_model(EVIL_NAME, description=EVIL)
        source = resolve("models:/digits/1").model_id
        client.create_model_version(EVIL_NAME, f"models:/{source}", model_id=source, description=EVIL)
        tag = {"location": EVIL, "kind": EVIL, "digest": "0" * 64, "time": EVIL}
        client.set_model_version_tag(EVIL_NAME, "1", "auditor.explainer.x", json.dumps(tag))
        yield address


@pytest.fixture(scope="module")
def window():
    with chromium() as opened:
        yield opened


@pytest.fixture
def quiet(window):
    """The window; at the end of the test its pages must have complained about nothing."""
    window.messages()
    window.look(1200, 900)
    yield window
    assert window.messages() == []


def loaded(window) -> None:
    window.wait("!document.querySelector('[data-load]:not([data-done])')")


def test_an_auditor_finds_her_way_by_mouse(server, quiet):
    quiet.open(f"{server}/auditor")
    quiet.click("a[href='/auditor/model?name=digits']")
    quiet.wait("document.title.startsWith('digits')")
    quiet.click("button")
    quiet.wait("document.title.startsWith('Compare')")
    assert re.search(r"\+0\.2000\s+▲ better", quiet.text().replace("\t", " "))
    quiet.click("a[href='/auditor/version?name=digits&version=2']")
    loaded(quiet)
    text = quiet.text()
    assert "✗ failed" in text
    assert "✓ verified" in text
    assert EVIL in text  # as text
    quiet.click("a.button")
    quiet.wait("document.body.innerText.includes('Report 2')")
    assert quiet.script("return [document.title, window.origin]") == ["", "null"]
    assert any("sandboxed" in line for line in quiet.messages())  # the report's own script was blocked


def test_an_auditor_finds_her_way_by_keyboard(server, quiet):
    quiet.open(f"{server}/auditor")
    quiet.press(TAB)
    assert quiet.script("return document.activeElement.innerText") == "Skip to content"
    quiet.press(ENTER, TAB)
    assert quiet.script("return document.activeElement.id") == "q"
    quiet.type("#q", "digi")
    quiet.press(ENTER)
    quiet.wait("new URLSearchParams(location.search).get('q') === 'digi'")
    for _ in range(12):
        quiet.press(TAB)
        if quiet.script("return document.activeElement.innerText") == "digits":
            break
    assert quiet.script("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    quiet.press(ENTER)
    quiet.wait("document.title.startsWith('digits')")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_overflows_and_axe_finds_nothing(server, quiet, dark, width):
    quiet.look(width, 800, dark=dark)
    both = urlencode({"left": "digits", "left_version": 1, "right": "digits", "right_version": 2})
    paths = ["", "?q=nothing-like-it", "/model?name=digits", "/version?name=digits&version=2", "/version?name=digits"]
    for path in (*paths, f"/compare?{both}", "/compare", "/report?name=digits&version=1"):
        quiet.open(f"{server}/auditor{path}")
        loaded(quiet)
        assert quiet.script("return document.documentElement.scrollWidth") <= width, path
        if not path.startswith("/report"):  # what this test stored there is no report
            assert quiet.violations() == [], path
    quiet.messages()


def test_hostile_text_runs_nowhere(server, quiet):
    where = urlencode({"name": EVIL_NAME, "version": "1"})
    for path in (
        "",
        f"/model?{where}",
        f"/version?{where}",
        f"/compare?{urlencode({'left': EVIL, 'right': EVIL_NAME})}",
    ):
        quiet.open(f"{server}/auditor{path}")
        loaded(quiet)
        assert "pwned" not in quiet.script("return document.title").replace(EVIL_NAME, "")
        assert quiet.script("return document.images.length") == 0
        assert quiet.script("return document.scripts.length") == 1


def test_the_page_says_so_when_the_server_has_gone(server, quiet):
    quiet.open(f"{server}/auditor/version?name=digits&version=1")
    loaded(quiet)
    quiet.devtools("Network.enable")
    quiet.devtools("Network.setBlockedURLs", urls=["*/version/audit*"])
    try:
        quiet.open(f"{server}/auditor/version?name=digits&version=1")
        quiet.wait("document.querySelector('[data-load] p.warn')")
        assert "could not be loaded" in quiet.text()
    finally:
        quiet.devtools("Network.setBlockedURLs", urls=[])
    quiet.messages()  # the browser may or may not report what was blocked


def status(address: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=60) as answer:
            return answer.status
    except HTTPError as error:
        return error.code


def test_the_real_server_holds_hosts_and_still_is_mlflow(server):
    assert status(f"{server}/auditor") == 200
    assert status(f"{server}/auditor", Host="evil.example") == 403
    assert status(f"{server}/") == 200
    assert status(f"{server}/auditor/report?name=digits&version=9") == 404


def test_below_a_prefix(tmp_path, window):
    with mlflow_server(tmp_path, "--app-name", "auditor", "--static-prefix", "/team", health="/team/health") as address:
        window.open(f"{address}/team/auditor")
        assert "No model is registered here yet" in window.text()
        assert window.script("return document.styleSheets.length") == 1
        window.click("a[href='/team/auditor/compare']")
        window.wait("document.title.startsWith('Compare')")
