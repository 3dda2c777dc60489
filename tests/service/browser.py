"""A real Chromium for tests, driven through chromedriver's own HTTP interface (W3C WebDriver); no further package."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.free_port import free_port

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--no-proxy-server",
]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {
    "Tab": "\ue004",
    "Enter": "\ue007",
    "Space": " ",
    "ArrowRight": "\ue014",
    "ArrowLeft": "\ue012",
    "End": "\ue010",
}
WAIT_S = 60.0  # for what the page does by itself; a loaded machine is slow


class Browser:
    """One window: open an address, run a script in the page, press keys, choose files, take pictures."""

    def __init__(self, address: str, session: str) -> None:
        self.session = f"{address}/session/{session}"

    def open(self, url: str) -> None:
        self._post("url", {"url": url})

    def script(self, body: str, *args: Any) -> Any:
        """Run the body of a function in the page and return what it returns."""
        return self._post("execute/sync", {"script": body, "args": list(args)})

    def wait(self, condition: str, *args: Any) -> Any:
        """Return the first truthy value of an expression in the page."""
        return eventually(lambda: self.script(f"return {condition}", *args), condition)

    def text(self, selector: str) -> str:
        return str(self.script("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def click(self, selector: str) -> None:
        element = self._post("element", {"using": "css selector", "value": selector})
        self._post(f"element/{element[ELEMENT]}/click", {})

    def choose_file(self, selector: str, path: Path) -> None:
        element = self._post("element", {"using": "css selector", "value": selector})
        self._post(f"element/{element[ELEMENT]}/value", {"text": str(path)})

    def type(self, selector: str, text: str) -> None:
        element = self._post("element", {"using": "css selector", "value": selector})
        self._post(f"element/{element[ELEMENT]}/value", {"text": text})

    def press(self, *keys: str) -> None:
        actions = []
        for key in keys:
            value = KEYS.get(key, key)
            actions += [{"type": "keyDown", "value": value}, {"type": "keyUp", "value": value}]
        self._post("actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def focused(self) -> str:
        """Return what has the focus, as tag, id and name."""
        return str(
            self.script(
                "const e = document.activeElement, name = e.getAttribute('aria-label') || e.innerText || e.value || '';"
                "return `${e.tagName.toLowerCase()}#${e.id} ${name}`.trim()"
            )
        )

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self._post("goog/cdp/execute", {"cmd": command, "params": parameters})

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the view and the system's colour scheme."""
        phone = width < 600
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.devtools("Emulation.setEmulatedMedia", features=scheme)

    def picture(self, path: Path, *, whole: bool = True) -> Path:
        """Take a picture of the page (``whole``: all of it, not only what the window shows)."""
        shot = self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def messages(self) -> list[str]:
        """Return what the page wrote to the console as an error since the last call (CSP refusals are such)."""
        element = self._post("se/log", {"type": "browser"})
        return [entry["message"] for entry in element if entry["level"] == "SEVERE"]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return _call("POST", f"{self.session}/{path}", body)


def eventually(look: Callable[[], Any], what: str) -> Any:
    """Return the first truthy value; the limit is far above what a slow machine needs."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        if result := look():
            return result
        time.sleep(0.05)
    raise AssertionError(f"did not come true in {WAIT_S:.0f} s: {what}")


def _call(method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, method=method, headers={"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        problem = json.load(error)["value"]
        raise AssertionError(f"{problem['error']}: {problem['message'].splitlines()[0]}") from None


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start chromedriver and a headless Chromium with an empty profile; skip where they are not installed."""
    driver, binary = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
    if driver is None or binary is None:
        pytest.skip("chromium and chromedriver are not installed (Debian: apt install chromium chromium-driver)")
    port = free_port()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        service = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        address = f"http://127.0.0.1:{port}"
        try:
            eventually(lambda: _up(f"{address}/status"), "chromedriver answers")
            options = {"binary": binary, "args": [*FLAGS, f"--user-data-dir={profile}"]}
            expected = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            session = _call("POST", f"{address}/session", {"capabilities": {"alwaysMatch": expected}})["sessionId"]
            try:
                yield Browser(address, session)
            finally:
                _call("DELETE", f"{address}/session/{session}")
        finally:
            service.terminate()
            service.wait(30)


def _up(url: str) -> bool:
    try:
        return bool(_call("GET", url)["ready"])
    except OSError:
        return False
