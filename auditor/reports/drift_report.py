"""The comparison of two versions as one HTML page: where both look, and what their classes hang on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from auditor.auditing.pictures import data_url, with_box
from auditor.pages.templates import render
from auditor.release.drift import Drift
from auditor.release.version_changes import Changes, Regions
from auditor.reports.drawings import number

LEVEL = {"found": "bad", "look": "warn", "nothing": "good", "skipped": "warn"}


def write_drift_report(drift: Drift, changes: Changes, path: str | Path, names: tuple[str, str] = ("A", "B")) -> Path:
    """Write the page and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(drift_html(drift, changes, names), encoding="utf-8")
    return path


def drift_html(drift: Drift, changes: Changes, names: tuple[str, str]) -> str:
    """Return the page as one HTML document."""
    return render(
        "drift.html",
        title=f"{names[0]} and {names[1]} compared",
        names=names,
        reliance=_reliance(changes),
        regions=None if changes.regions is None else _regions(changes.regions, names),
        drift={"level": {True: "bad", False: "good", None: "warn"}[drift.drift], "words": drift.words()},
        matched=[
            {
                "first": i,
                "second": j,
                "similarity": number(s),
                "status": " ".join(["died"] * (i in drift.died) + ["born"] * (j in drift.born)),
            }
            for i, j, s in drift.matched
        ],
    )


def _reliance(changes: Changes) -> dict[str, Any]:
    if changes.not_measured:
        return {"level": "warn", "problem": changes.not_measured}
    worse = [c for c in changes.reliance if "found" in c.verdict[1:] and c.verdict[0] != "found"]
    return {
        "level": "bad" if any(c.verdict[1] == "found" for c in changes.reliance) else "good",
        "problem": "",
        "summary": f"{len(worse)} of {len(changes.reliance)} classes hang on one thing that did not before.",
        "rows": [
            {
                "name": c.name,
                "sentence": c.sentence,
                "sides": [
                    {"level": LEVEL[v], "text": f"{v} {number(s) if s == s else ''}".strip()}
                    for v, s in zip(c.verdict, c.score, strict=True)
                ],
            }
            for c in changes.reliance
        ],
    }


def _regions(regions: Regions, names: tuple[str, str]) -> dict[str, Any]:
    boxes = regions.a.to_json(), regions.b.to_json()
    pairs = [
        {
            "sides": [
                {"src": data_url(with_box(regions.images[i], side[i][:4])), "alt": f"{regions.ids[i]}, {name}"}
                for side, name in zip(boxes, names, strict=True)
            ],
            "caption": f"{regions.targets[i]}: {regions.ids[i]}, {float(regions.overlap[i]):.0%} in common",
        }
        for i in regions.shown
    ]
    return {"sentence": regions.sentence(), "pairs": pairs}
