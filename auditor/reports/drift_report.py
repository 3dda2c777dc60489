"""The comparison of two versions as one HTML page: where both look, and what their classes hang on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from auditor.auditing.pictures import data_url, with_box
from auditor.release.drift import Drift
from auditor.release.version_changes import Changes, ClassChange, Regions
from auditor.reports.style import STYLE, esc, number

LEVEL = {"found": "bad", "look": "warn", "nothing": "good", "skipped": "warn"}


def write_drift_report(drift: Drift, changes: Changes, path: str | Path, names: tuple[str, str] = ("A", "B")) -> Path:
    """Write the page and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(drift_html(drift, changes, names), encoding="utf-8")
    return path


def drift_html(drift: Drift, changes: Changes, names: tuple[str, str]) -> str:
    """Return the page as one HTML document."""
    title = f"{names[0]} and {names[1]} compared"
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>{esc(title)}</title><style>{STYLE}</style></head><body>\n<h1>{esc(title)}</h1>"
        + "\n".join(_sections(drift, changes, names))
        + "\n</body></html>\n"
    )


def _sections(drift: Drift, changes: Changes, names: tuple[str, str]) -> Iterator[str]:
    yield _reliance(changes, names)
    if changes.regions is not None:
        yield _regions(changes.regions, names)
    level = {True: "bad", False: "good", None: "warn"}[drift.drift]
    yield f"<section class='verdict {level}'><h2>Did the concepts change?</h2><p>{esc(drift.words())}.</p></section>"
    rows = "".join(
        f"<tr><td class='num'>{i}</td><td class='num'>{j}</td><td class='num'>{number(s)}</td>"
        f"<td>{'died ' if i in drift.died else ''}{'born' if j in drift.born else ''}</td></tr>"
        for i, j, s in drift.matched
    )
    yield (
        "<h2>Concepts, matched</h2><table><thead><tr><th class='num'>of the first</th>"
        f"<th class='num'>of the second</th><th class='num'>similarity</th><th></th></tr></thead>"
        f"<tbody>{rows}</tbody></table>"
    )


def _reliance(changes: Changes, names: tuple[str, str]) -> str:
    title = "<h2>Do the classes hang on other things now?</h2>"
    if changes.not_measured:
        return f"<section class='verdict warn'>{title}<p>Not compared: {esc(changes.not_measured)}.</p></section>"
    worse = [c for c in changes.reliance if "found" in c.verdict[1:] and c.verdict[0] != "found"]
    level = "bad" if any(c.verdict[1] == "found" for c in changes.reliance) else "good"
    summary = f"<p><b>{len(worse)} of {len(changes.reliance)} classes hang on one thing that did not before.</b></p>"
    head = f"<th>class</th><th>{esc(names[0])}</th><th>{esc(names[1])}</th><th></th>"
    body = "".join(_row(c) for c in changes.reliance)
    table = f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    return f"<section class='verdict {level}'>{title}{summary}{table}</section>"


def _row(c: ClassChange) -> str:
    cells = "".join(
        f"<td class='{LEVEL[v]}' style='color:var(--mark)'>{v} {number(s) if s == s else ''}</td>"
        for v, s in zip(c.verdict, c.score, strict=True)
    )
    return f"<tr><td>{esc(c.name)}</td>{cells}<td>{esc(c.sentence)}</td></tr>"


def _regions(regions: Regions, names: tuple[str, str]) -> str:
    boxes = regions.a.to_json(), regions.b.to_json()
    shown = "".join(
        "<figure style='width:auto'><div style='display:flex;gap:3px'>"
        + "".join(
            f"<img src='{data_url(with_box(regions.images[i], side[i][:4]))}' alt='{esc(regions.ids[i])}, {esc(name)}'>"
            for side, name in zip(boxes, names, strict=True)
        )
        + f"</div><figcaption class='small'>{esc(regions.targets[i])}: {esc(regions.ids[i])}, "
        f"{float(regions.overlap[i]):.0%} in common</figcaption></figure>"
        for i in regions.shown
    )
    return (
        f"<h2>Where both look</h2><p>{esc(regions.sentence())} Left {esc(names[0])}, right {esc(names[1])}; the box "
        f"holds what decides for the image's class.</p><div class='spots'>{shown}</div>"
    )
