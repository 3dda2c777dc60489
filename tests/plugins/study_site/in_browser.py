"""People in real Chromium windows, by Playwright: they drag, tap and type through a served study."""

import shutil
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

import pytest

from tests.free_port import free_port

KEY = "owner-of-the-tests"
FULL = "document.images.length && [...document.images].every(i => i.complete)"


@contextmanager
def served(folder, answers, *options, port=None):
    """Serve a study by its own command in a process of its own; gives its address and the process."""
    port = port or free_port()
    program = [sys.executable, "-c", "from auditor.cli import main; main()", "study", "serve", str(folder)]
    flags = ["--answers", str(answers), "--port", str(port), "--key", KEY, "--open", "open-code", *options]
    process = subprocess.Popen([*program, *flags], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{address}/healthz", timeout=5).read()
                break
            except OSError:
                assert process.poll() is None, "the server ended"
                time.sleep(0.1)
        yield address, process
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()


@contextmanager
def chromium():
    """Start a headless Chromium; skip where it is not installed."""
    from playwright.sync_api import sync_playwright

    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if binary is None:
        pytest.skip("chromium is not installed (Debian: apt install chromium)")
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=binary, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()


def window(browser, width=1280, height=900, **options):
    """Open a window whose page's complaints are kept in ``page.complaints``."""
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.complaints = []
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("console", lambda m: page.complaints.append(m.text) if m.type == "error" else None)
    return page


def until(page, expression, arg=None, seconds=60):
    """Wait until an expression is true; the page's own policy forbids Playwright's way, which is to evaluate text."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression, arg):
        assert time.monotonic() < end, f"never true: {expression}"
        time.sleep(0.05)


def begin(page, address, code="open-code"):
    """Begin, and return what the page was sent."""
    page.goto(address)
    page.wait_for_selector("#agree")
    if page.query_selector("input#code"):
        page.fill("input#code", code)
    page.check("#agree")
    with page.expect_response(lambda reply: reply.url.endswith("/api/begin")) as sent:
        page.click("#next")
    page.wait_for_selector(".card, fieldset")
    return sent.value.json()


def kind(page):
    if page.query_selector("p.code"):
        return "end"
    return page.evaluate("document.getElementById('main').dataset.kind")


def step(page):
    return page.evaluate("document.getElementById('main').dataset.step")


def ungrouped(page):
    return page.evaluate("[...document.querySelectorAll('.zone[data-group=\"0\"] .card')].map(c => c.dataset.id)")


def placed(page):
    """Group of every image, as the page shows it."""
    return page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('.zone')].flatMap(z => "
        "[...z.querySelectorAll('.card')].map(c => [c.dataset.id, Number(z.dataset.group)])))"
    )


def by_key(page, key, group):
    page.evaluate("i => document.querySelector(`.card[data-id='${i}'] .pick`).focus()", key)
    page.keyboard.press(str(group))


def middle(page, selector):
    box = page.locator(selector).bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + min(box["height"] / 2, 60)


def by_mouse(page, key, group):
    x, y = middle(page, f".card[data-id='{key}']")
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + 20, y + 10)
    page.mouse.move(*middle(page, f".zone[data-group='{group}']"), steps=4)
    page.mouse.up()


def by_touch(page, key, group):
    """Hold a finger on an image, then drag it into a group."""
    client = page.context.new_cdp_session(page)
    x, y = middle(page, f".card[data-id='{key}']")
    client.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]})
    page.wait_for_timeout(400)
    tx, ty = middle(page, f".zone[data-group='{group}']")
    for part in (0.3, 0.7, 1.0):
        at = {"x": x + (tx - x) * part, "y": y + (ty - y) * part}
        client.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": [at]})
    client.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


def by_tap(page, key, group):
    page.tap(f".card[data-id='{key}'] .pick")
    page.tap(f".move [data-to='{group}']")


def answer(page, place=by_key, groups=None):
    """Answer the step that is shown, all but the last click."""
    what = kind(page)
    if what in ("practice", "group"):
        until(page, FULL)
        for n, key in enumerate(ungrouped(page)):
            place(page, key, groups[key] if groups and key in groups else 1 + n % 4)
    elif what in ("questions", "confidence", "rating"):
        for box in page.query_selector_all("fieldset"):
            inputs = box.query_selector_all("input")
            inputs[min(4, len(inputs) - 1)].check()


def go_on(page):
    """Continue, wait for the next step, and return what the page was sent of it."""
    index = step(page)
    with page.expect_response(lambda reply: reply.url.endswith("/api/answer")) as sent:
        page.click("#next")
    until(page, "i => document.getElementById('main').dataset.step !== i || !!document.querySelector('p.code')", index)
    return sent.value.json()


def violations(page):
    """Return what axe-core finds wrong with the page as it is."""
    from pathlib import Path

    import axe_playwright_python

    page.evaluate((Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    return page.evaluate(
        "async () => (await axe.run(document, {resultTypes: ['violations']})).violations"
        ".map(v => `${v.id}: ${v.nodes.slice(0, 3).map(n => n.html.slice(0, 100)).join(' | ')}`)"
    )


def overflows(page):
    return page.evaluate("document.documentElement.scrollWidth > innerWidth")
