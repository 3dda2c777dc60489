"""Write docs/results.md from what the benchmarks stored: ``python -m tests.benchmarks.results_page``, `make results`.

A file with the envelope of `envelope.py` is shown by its tables, with command, settings, seeds, commit and machine; any
other file by its numbers. The page is a function of the files alone, and a test holds it to them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.envelope import RESULTS, ROOT

PAGE = ROOT / "docs" / "results.md"
MOST_NUMBERS = 60  # of a file without tables
INTRODUCTION = """# Results

Written by `make results` from the JSON that the programs of `tests/benchmarks` stored in `tests/benchmarks/results`;
nothing here is typed by hand. *Published* is a figure of a paper, *reached* what the command gave here, *differs* what
is not as the paper has it; a verdict is given only where the setting is that of the paper.
"""


def page(folder: Path = RESULTS) -> str:
    """Return the page of all files of a folder, those with tables first."""
    contents = {path: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    ordered = sorted(contents, key=lambda path: not has_tables(contents[path]))
    return "\n".join([INTRODUCTION, *(section(path, contents[path]) for path in ordered)])


def has_tables(content: Any) -> bool:
    """Whether a file is in the common envelope."""
    return isinstance(content, dict) and "envelope" in content


def section(path: Path, content: Any) -> str:
    """Return what the page says of one file."""
    title = path.stem.replace("_", " ")
    if has_tables(content):
        return enveloped(path, content, title)
    numbers = numbers_of(content)
    rows = [{"figure": f"`{name}`", "value": shown(value)} for name, value in numbers[:MOST_NUMBERS]]
    left = f"\n{len(numbers) - MOST_NUMBERS} more are in the file.\n" if len(numbers) > MOST_NUMBERS else ""
    command = (
        f"by `tests/benchmarks/bench_{path.stem}.py`"
        if (ROOT / f"tests/benchmarks/bench_{path.stem}.py").exists()
        else ""
    )
    return "\n".join(
        [f"## {title}\n", f"`tests/benchmarks/results/{path.name}` {command}".rstrip() + "\n", table(rows), left]
    )


def enveloped(path: Path, content: Mapping[str, Any], title: str) -> str:
    """Return the section of a file in the envelope."""
    seeds = content["seeds"] if isinstance(content["seeds"], int) else ", ".join(map(str, content["seeds"]))
    settings = "; ".join(f"{name}: {shown(value)}" for name, value in content["settings"].items())
    parts = [
        f"## {title}\n",
        f"{content['experiment']}.\n",
        f"    {content['command']}\n",
        f"`tests/benchmarks/results/{path.name}`; {settings}; seeds {seeds}; commit {content['commit']}; "
        f"{content['machine']}.\n",
    ]
    for one in content["tables"]:
        parts += [f"### {one['title']}\n", table(one["rows"]), *([one["note"] + "\n"] if one["note"] else [])]
    return "\n".join(parts)


def numbers_of(content: Any, prefix: str = "") -> list[tuple[str, float]]:
    """Return the numbers of nested mappings by their path; rows of single cases are left to the file.

    >>> numbers_of({"a": {"b": 1, "c": [2, 3]}, "d": True, "e": 0.5})
    [('a / b', 1.0), ('e', 0.5)]
    """
    if isinstance(content, int | float) and not isinstance(content, bool):
        return [(prefix, float(content))]
    if not isinstance(content, dict):
        return []
    return [pair for k, v in content.items() for pair in numbers_of(v, f"{prefix} / {k}" if prefix else str(k))]


def shown(value: Any) -> str:
    """Return a cell: four figures at least, nothing for nothing."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    return str(value)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with every column that some row has, in their order."""
    names = list(dict.fromkeys(name for row in rows for name in row))

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"

    body = [line(shown(row.get(name)) for name in names) for row in rows]
    return "\n".join([line(names), "|" + "---|" * len(names), *body]) + "\n"


def main() -> int:
    """Write the page."""
    PAGE.write_text(page())
    print(f"{PAGE.relative_to(ROOT)}: {len(list(RESULTS.glob('*.json')))} files")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
