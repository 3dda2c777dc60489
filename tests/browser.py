"""A real Chromium for tests, by Playwright, and axe-core on what it shows; skipped where they are not installed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = ["--no-sandbox", "--disable-quic", "--disable-background-networking", "--disable-component-update"]
WAIT_S = 60.0  # for what the page does by itself; a loaded machine is slow
RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")


class Browser:
    """One window: open an address, run a script in the page, press keys, choose files, take pictures."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self._messages: list[str] = []
        page.on("console", lambda m: self._messages.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: self._messages.append(str(error)))
        page.set_default_timeout(WAIT_S * 1000)
        self._devtools = page.context.new_cdp_session(page)

    def open(self, url: str) -> None:
        self.page.goto(url, wait_until="load")

    def script(self, body: str, *args: Any) -> Any:
        """Run the body of a function in the page and return what it returns."""
        return self.page.evaluate(f"args => (function () {{ {body} }}).apply(null, args)", list(args))

    def wait(self, condition: str, *args: Any) -> Any:
        """Return the first truthy value of an expression in the page, across loads of other pages."""
        return eventually(lambda: self._settled(f"return {condition}", *args), condition)

    def _settled(self, body: str, *args: Any) -> Any:
        from playwright.sync_api import Error

        try:
            return self.script(body, *args)
        except Error as error:
            if "Execution context was destroyed" in str(error) or "navigat" in str(error):
                return None
            raise

    def text(self, selector: str = "body") -> str:
        return str(self.script("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def click(self, selector: str) -> None:
        self.page.locator(selector).first.click()

    def choose_file(self, selector: str, path: Path) -> None:
        self.page.locator(selector).set_input_files(path)

    def type(self, selector: str, text: str) -> None:
        self.page.locator(selector).press_sequentially(text)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def focused(self) -> str:
        """Return what has the focus, as tag, id and name."""
        return str(
            self.script(
                "const e = document.activeElement, name = e.getAttribute('aria-label') || e.innerText || e.value || '';"
                "return `${e.tagName.toLowerCase()}#${e.id} ${name}`.trim()"
            )
        )

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self._devtools.send(command, parameters)

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the view and the system's colour scheme."""
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(color_scheme="dark" if dark else "light")

    def picture(self, path: Path, *, whole: bool = True) -> Path:
        """Take a picture of the page (``whole``: all of it, not only what the window shows)."""
        self.page.screenshot(path=path, full_page=whole)
        return path

    def messages(self) -> list[str]:
        """Return what the page wrote to the console as an error since the last call (CSP refusals are such)."""
        self.page.wait_for_timeout(50)
        messages, self._messages = self._messages, []
        return messages

    def violations(self) -> list[str]:
        """Return what axe-core finds wrong with the page as it is now: rule, impact, and the first element."""
        axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core is not installed")
        found = axe.Axe().run(self.page, options={"runOnly": {"type": "tag", "values": list(RULES)}}).response
        return [
            f"{v['id']} ({v['impact']}): {v['help']}: {v['nodes'][0]['html'][:160]} | "
            f"{v['nodes'][0].get('failureSummary', '')[:300]}"
            for v in found["violations"]
        ]


def eventually(look: Callable[[], Any], what: str) -> Any:
    """Return the first truthy value; the limit is far above what a slow machine needs."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        if result := look():
            return result
        time.sleep(0.05)
    raise AssertionError(f"did not come true in {WAIT_S:.0f} s: {what}")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a headless Chromium with an empty profile; skip where it or Playwright is not installed."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if binary is None:
        pytest.skip("chromium is not installed (Debian: apt install chromium)")
    with playwright.sync_playwright() as engine:
        program = engine.chromium.launch(executable_path=binary, args=FLAGS)
        try:
            yield Browser(program.new_context().new_page())
        finally:
            program.close()
