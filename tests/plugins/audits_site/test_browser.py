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
from tests.plugins.browser import browser
from tests.plugins.server import mlflow_server
from tests.plugins.test_server import EVIL, metric, set_gate, store_audit

pytestmark = pytest.mark.slow

EVIL_NAME = "<img src=x onerror=document.title='pwned'>"
TAB, ENTER = "\ue004", "\ue007"


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
    with browser() as opened:
        yield opened


@pytest.fixture
def quiet(window):
    """The window; at the end of the test its pages must have complained about nothing."""
    window.log()
    window.emulate(prefers_color_scheme="light")
    window.size(1200, 900)
    yield window
    assert window.log() == []


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
    assert quiet.run("return [document.title, window.origin]") == ["", "null"]
    assert any("sandboxed" in line for line in quiet.log())  # the report's own script was blocked


def test_an_auditor_finds_her_way_by_keyboard(server, quiet):
    quiet.open(f"{server}/auditor")
    quiet.press(TAB)
    assert quiet.run("return document.activeElement.innerText") == "Skip to content"
    quiet.press(ENTER, TAB)
    assert quiet.run("return document.activeElement.id") == "q"
    quiet.type("#q", "digi" + ENTER)
    quiet.wait("new URLSearchParams(location.search).get('q') === 'digi'")
    for _ in range(12):
        quiet.press(TAB)
        if quiet.run("return document.activeElement.innerText") == "digits":
            break
    assert quiet.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    quiet.press(ENTER)
    quiet.wait("document.title.startsWith('digits')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_overflows_and_all_text_can_be_read(server, quiet, scheme, width, tmp_path):
    quiet.emulate(prefers_color_scheme=scheme)
    quiet.size(width, 800)
    both = urlencode({"left": "digits", "left_version": 1, "right": "digits", "right_version": 2})
    for path in ("", "/model?name=digits", "/version?name=digits&version=2", f"/compare?{both}"):
        quiet.open(f"{server}/auditor{path}")
        loaded(quiet)
        assert quiet.run("return document.documentElement.scrollWidth") <= width, path
        contrast = quiet.run(LOWEST_CONTRAST)
        assert contrast >= 4.5, (path, contrast)
        quiet.picture(tmp_path / "page.png")


# The lowest contrast (WCAG 2) of any text against the nearest background that is painted behind it.
LOWEST_CONTRAST = """
const parse = c => c.match(/[\\d.]+/g).map(Number);
const linear = v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
const light = c => 0.2126 * linear(c[0]) + 0.7152 * linear(c[1]) + 0.0722 * linear(c[2]);
const behind = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
  if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
let lowest = 21;
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const e = walk.currentNode.parentElement;
  if (!walk.currentNode.data.trim() || ["SCRIPT", "NOSCRIPT"].includes(e.tagName)) continue;
  const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
  lowest = Math.min(lowest, (a + 0.05) / (b + 0.05));
}
return lowest;
"""


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
        assert "pwned" not in quiet.run("return document.title").replace(EVIL_NAME, "")
        assert quiet.run("return document.images.length") == 0
        assert quiet.run("return document.scripts.length") == 1


def test_the_page_says_so_when_the_server_has_gone(server, quiet):
    quiet.open(f"{server}/auditor/version?name=digits&version=1")
    loaded(quiet)
    quiet.devtools("Network.enable", {})
    quiet.devtools("Network.setBlockedURLs", {"urls": ["*/version/audit*"]})
    try:
        quiet.open(f"{server}/auditor/version?name=digits&version=1")
        quiet.wait("document.querySelector('[data-load] p.warn')")
        assert "could not be loaded" in quiet.text()
    finally:
        quiet.devtools("Network.setBlockedURLs", {"urls": []})
    quiet.log()  # the browser may or may not report what was blocked


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
        assert window.run("return document.styleSheets.length") == 1
        window.click("a[href='/team/auditor/compare']")
        window.wait("document.title.startsWith('Compare')")
