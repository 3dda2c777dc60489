"""The common envelope of what benchmarks store: what was measured, how to repeat it, and tables that a page can show.

    write("admm_like_with_like", experiment="…", command="…", settings={…}, seeds=[0, 1], tables=[table("…", rows)])

A row is a flat mapping; its keys are the columns, in order. Where there is a paper: ``published``, ``reached`` and
``differs``, what is not as the paper has it. ``details`` are kept in the file and not shown. `make results` writes
docs/results.md from all files of the folder ``results``.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
VERSION = 1
HEADER = ("experiment", "command", "settings", "seeds", "commit", "machine")


def write(
    name: str,
    *,
    experiment: str,
    command: str,
    settings: Mapping[str, Any],
    seeds: Sequence[int] | int,
    tables: Sequence[Mapping[str, Any]],
    details: Any = None,
    folder: Path = RESULTS,
) -> Path:
    """Write ``NAME.json`` whole and return its path; commit and machine are added."""
    content = {
        "envelope": VERSION,
        "experiment": experiment,
        "command": command,
        "settings": dict(settings),
        "seeds": seeds if isinstance(seeds, int) else list(seeds),
        "commit": commit(),
        "machine": machine(),
        "tables": list(tables),
        **({} if details is None else {"details": details}),
    }
    return replace(folder / f"{name}.json", content)


def table(title: str, rows: Sequence[Mapping[str, Any]], note: str = "") -> dict[str, Any]:
    """Return a table as the envelope has it."""
    return {"title": title, "note": note, "rows": [dict(row) for row in rows]}


def replace(path: Path, content: Any) -> Path:
    """Write JSON in one step, so that a reader never meets half a file."""
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)
    return path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock beside a file, so that two runs of a benchmark add their results one after the other."""
    with path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def commit() -> str:
    """Return the commit that stands, with a plus where code differs from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "auditor", "kernels", "plugins", "service")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def machine() -> str:
    """Return what the figures were made on."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{os.cpu_count()} cores ({platform.machine()}), {device}, torch {torch.__version__}"
