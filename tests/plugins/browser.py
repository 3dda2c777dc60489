"""A real Chromium, driven by chromedriver over plain HTTP (the WebDriver protocol), for tests marked slow."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from tests.free_port import free_port

FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """One window. ``log`` holds what the page complained about: script errors and breaches of its policy."""

    def __init__(self, driver: str, session: str) -> None:
        self.root = f"{driver}/session/{session}"

    def call(self, method: str, path: str, body: dict | None = None):
        return ask(method, f"{self.root}{path}", body)

    def open(self, address: str) -> None:
        self.call("POST", "/url", {"url": address})

    def run(self, script: str, *args):
        return self.call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def text(self) -> str:
        return self.run("return document.body.innerText")

    def wait(self, script: str, seconds: float = 60):
        """Wait until a script returns something true, and return it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = self.run(f"return {script}")
            if value:
                return value
            time.sleep(0.1)
        raise AssertionError(f"never true: {script}\n{self.text()[:2000]}")

    def find(self, selector: str) -> str:
        return self.call("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]

    def click(self, selector: str) -> None:
        self.call("POST", f"/element/{self.find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        self.call("POST", f"/element/{self.find(selector)}/value", {"text": text})

    def press(self, *keys: str) -> None:
        presses = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": presses}]})

    def emulate(self, **features: str) -> None:
        """Set media features, such as ``prefers_color_scheme="dark"``."""
        listed = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.devtools("Emulation.setEmulatedMedia", {"features": listed})

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.devtools("Emulation.setDeviceMetricsOverride", metrics)

    def devtools(self, command: str, parameters: dict):
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def log(self) -> list[str]:
        return [entry["message"] for entry in self.call("POST", "/se/log", {"type": "browser"})]

    def picture(self, path: Path) -> Path:
        path.write_bytes(base64.b64decode(self.call("GET", "/screenshot")))
        return path


def ask(method: str, address: str, body: dict | None = None):
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, content, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()[:600]) from None


@contextmanager
def browser():
    """Start chromedriver and one headless window; stop both at the end."""
    program, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    assert program, "chromedriver is not installed"
    assert chromium, "chromium is not installed"
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    driver = subprocess.Popen([program, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    session = None
    profile = tempfile.mkdtemp(prefix="auditor-browser-")
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{address}/status", timeout=5).read()
                break
            except OSError:
                assert driver.poll() is None
                time.sleep(0.25)
        options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        expected = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = ask("POST", f"{address}/session", {"capabilities": {"alwaysMatch": expected}})
        session = Browser(address, made["sessionId"])
        yield session
    finally:
        if session is not None:
            session.call("DELETE", "")
        driver.terminate()
        driver.wait(30)
        shutil.rmtree(profile, ignore_errors=True)
