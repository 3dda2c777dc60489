"""The tables of docs/scale.md from results/cluster.json: what was measured, and what follows for a thousand workers.

python tests/benchmarks/scale_page.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "scale.md"
RESULTS = Path(__file__).resolve().parent / "results" / "cluster.json"
BEGIN, END = "<!-- made by tests/benchmarks/scale_page.py -->", "<!-- end -->"
IMAGES, WORKERS, SHARD = 10**9, 1000, 256


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def amount(n_bytes: float) -> str:
    """Return bytes in the unit that fits.

    >>> amount(251), amount(50.3e9)
    ('251 B', '50 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}" if n_bytes < 100 else f"{n_bytes:.0f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.3g} TB"


def time_of(seconds: float) -> str:
    """Return seconds in the unit that fits.

    >>> time_of(0.00042), time_of(90), time_of(200_000)
    ('0.42 ms', '90 s', '56 h')
    """
    for limit, size, unit in ((1, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min"), (4 * 86400, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.2g} {unit}" if seconds / size < 10 else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def tables(stored: Mapping[str, Any]) -> str:
    """Return both tables."""
    rows = {table["title"]: table["rows"] for table in stored["tables"]}
    shard, reduced, shards = rows["shards"][0], rows["reductions"], IMAGES / SHARD
    measured = [[r["what"], amount(r["bytes_per_shard"]), time_of(r["driver_s_per_shard"])] for r in reduced]
    opening = shard["open_seconds_per_million_images"] * IMAGES / 1e6
    source = shard["source_bytes_per_image"] * IMAGES
    tree = shard["tree_seconds_per_million_shards"] * shards / 1e6
    follows = [
        ["list and name the images, in the driver", time_of(opening), f"{amount(source)} of names and places"],
        ["digest: the tree over the shards, in the driver", time_of(tree), amount(64 * shards)],
    ]
    if "explain" in rows:
        rate = rows["explain"][0]["explain_all"]
        follows.insert(
            0,
            [
                f"explain-all by {WORKERS:,} workers, {rate} images per second each",
                time_of(IMAGES / WORKERS / rate),
                "",
            ],
        )
    for r in reduced:
        follows.append(
            [
                f"{r['what']}: take in {shards / 1e6:.1f} million shards, in the driver",
                time_of(r["driver_s_per_shard"] * shards),
                amount(r["bytes_per_shard"] * shards),
            ]
        )
    return "\n\n".join(
        [
            "Measured, per shard of 256 images:",
            markdown(["pass", "bytes to the driver", "seconds of the driver"], measured),
            f"Computed from that, for {IMAGES:,} images and {WORKERS:,} workers of one processor:",
            markdown(["step", "time", "bytes"], follows),
        ]
    )


def page_with(text: str, stored: Mapping[str, Any]) -> str:
    """Return the page with its tables."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables(stored)}\n{END}{after}"


def main() -> int:
    """Write the tables into the page."""
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), json.loads(RESULTS.read_text())), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
