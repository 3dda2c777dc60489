"""Run ``auditor demo`` in a terminal of its own and keep what README and the pages show of it: ``make pictures``.

Writes docs/demo.svg (what the terminal showed), docs/demo.png (why the second version was stopped) and a sheet per
kind in docs/pictures.
"""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DOCS = Path(__file__).parent
COLUMNS, LINES = 118, 40
FONT = re.compile(r"@font-face \{.*?\}", re.S)  # a font from elsewhere; any with fixed width will do
BAR = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def recorded(line: list[str], folder: Path) -> list[tuple[float, str]]:
    """Run a command in a pseudo terminal and return what it wrote, with the seconds since its start."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": str(LINES), "TERM": "xterm-256color"}
    started = time.monotonic()
    with subprocess.Popen(line, cwd=folder, stdout=follower, stderr=follower, env=environment) as process:
        os.close(follower)
        events = []
        while True:
            try:
                content = os.read(leader, 4096)
            except OSError:  # the other end is closed
                break
            if not content:
                break
            events.append((time.monotonic() - started, content.decode(errors="replace")))
    if process.returncode:
        sys.exit(f"{' '.join(line)} ended with {process.returncode}")
    return events


def main() -> None:
    """Record the demo and keep its pictures."""
    from rich.console import Console
    from rich.text import Text

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        program = str(Path(sys.executable).with_name("auditor"))
        events = recorded([program, "demo", "--dir", "demo"], folder)
        events = [(at, text.replace(str(folder), "~")) for at, text in events]
        output = BAR.sub("", "".join(text for _, text in events)).replace("\r\n", "\n")
        output = "\n".join(line.rpartition("\r")[2] for line in output.splitlines())
        shown = output[output.index("Two versions of") :]
        with Path(os.devnull).open("w") as nowhere:
            console = Console(width=COLUMNS, record=True, file=nowhere)
            console.print(Text(f"$ auditor demo\n{shown}"))
        picture = console.export_svg(title="auditor demo", font_aspect_ratio=0.61)
        (DOCS / "demo.svg").write_text(FONT.sub("", picture), encoding="utf-8")
        result = json.loads((folder / "demo" / "demo.json").read_text())
        shutil.copy(folder / "demo" / "why.png", DOCS / "demo.png")
        for attached, entry in result["explainers"].items():
            shutil.copy(folder / "demo" / "explained" / f"{attached}.png", DOCS / "pictures" / f"{entry['kind']}.png")


if __name__ == "__main__":
    main()
