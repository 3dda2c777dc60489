"""The results of a study as one self-contained HTML page: box plots, comparisons, effects, definitions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from markupsafe import escape as esc

from auditor.metrics.measure import Measure
from auditor.pages.templates import stylesheet
from auditor.reports.drawings import number
from auditor.study.comparisons import Comparison
from auditor.study.design import CONFIDENCE, RATING
from auditor.study.orders import NONE
from auditor.study.results import Asked, Results, by_person

HEIGHT, WIDTH, LEFT, BOTTOM = 210, 96, 92, 34
TITLES = {
    "purity": "purity",
    "purity_of_labels": "purity of labels",
    "confidence": "confidence",
    "rating": "rating",
    "seconds": "seconds per batch",
    "gain": "purity less that with none",
}


def study_page(results: Results, *, with_comments: bool = True) -> str:
    """Return the page as one HTML document.

    Comments are what single people wrote: the page that is stored with a version leaves them out, so that erasing a
    participant leaves nothing of theirs there.
    """
    study = results.study
    title = f"Study {study.name}"
    names = ["", *([d.name for d in study.data] if len(study.data) > 1 else [])]
    sections = [
        f"<h1>{esc(title)}</h1><p class='pale'>{esc(', '.join(study.models))}; {results.began} people began, "
        f"{results.finished} finished; {esc(results.to_json()['orders'])}</p>",
        _headline(results),
        "<h2>How well did people group?</h2><p class='pale'>Purity: the share of images that are in a group with a "
        "majority of their predicted class. The dashed line is chance, the dotted one the most that can be had. A box "
        "holds the middle half of people, the line in it is the median, the dot the mean, whiskers reach the last "
        "person within 1.5 boxes.</p>",
        _side_by_side([_purity(results, name) for name in names]),
        "<h2>How sure were they, and what do they think of the assistants?</h2>",
        "<h3>Confidence</h3>",
        _side_by_side([_confidence(results, name) for name in names]),
        _ratings(results),
        "<h2>Differences between conditions</h2>",
        _comparisons(results.comparisons),
        "<h2>Order and data sets</h2>",
        _effects(results),
        "<h2>All figures</h2>",
        _metrics(results.metrics),
        _questions(results.questions),
        _comments(results.comments) if with_comments else "",
    ]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><meta name='viewport' "
        f"content='width=device-width,initial-scale=1'><title>{esc(title)}</title><style>{stylesheet()}</style></head>"
        "<body><main>\n" + "\n".join(s for s in sections if s) + "\n</main></body></html>\n"
    )


def _side_by_side(plots: Sequence[str]) -> str:
    """Return plots beside each other as far as there is room, as in figures 3.3 and 3.4 of [Khorram2020]."""
    boxed = "".join(f"<div style='min-width:0'>{plot}</div>" for plot in plots if plot)
    return f"<div style='display:flex;flex-wrap:wrap;gap:0 2rem'>{boxed}</div>"


def _headline(results: Results) -> str:
    main = [c for c in results.comparisons if c.what == "purity" and not c.data]
    rows = []
    for c in main:
        higher, lower = (c.a, c.b) if c.difference >= 0 else (c.b, c.a)
        size = f"{abs(c.difference):.3f}, p = {number(c.p_permutation_holm)}, n = {c.n}"
        if c.is_significant:
            mark = "bad" if higher == NONE else "good"
            rows.append(
                f"<li class='{mark}'>People group better with {esc(higher)} than with {esc(lower)}: {size}.</li>"
            )
        else:
            rows.append(f"<li class='warn'>No difference was found between {esc(c.a)} and {esc(c.b)}: {size}.</li>")
    against_none = [
        (c.difference if c.b == NONE else -c.difference) for c in main if c.is_significant and NONE in (c.a, c.b)
    ]
    level = "bad" if any(d < 0 for d in against_none) else "good" if against_none else "warn"
    none = "<li class='warn'>Nobody has answered under two conditions yet.</li>"
    return (
        f"<div class='verdict {level}'><h2>Does it help?</h2><ul class='finds'>{''.join(rows) or none}</ul>"
        "<p class='pale small'>Permutation tests within people, corrected by Holm's method for all pairs.</p></div>"
    )


def _purity(results: Results, data: str) -> str:
    rows = [s for s in results.scores if not data or s.data == data]
    if not rows:
        return ""
    values = {
        c: list(by_person([s for s in rows if s.condition == c], lambda s: s.purity).values())
        for c in results.study.config.conditions
    }
    marks = {"chance": float(np.mean([s.chance for s in rows])), "ceiling": float(np.mean([s.ceiling for s in rows]))}
    axis = [(x / 5, f"{x / 5:.1f}") for x in range(6)]
    name = data or "all data sets"
    return f"<h3>{esc(data or 'All data sets')}</h3>{boxes(values, axis, f'purity, {name}', marks)}"


def _confidence(results: Results, data: str) -> str:
    rows = [s for s in results.scores if not data or s.data == data]
    if not rows:
        return ""
    values = {
        c: list(by_person([s for s in rows if s.condition == c], lambda s: s.confidence).values())
        for c in results.study.config.conditions
    }
    axis = [(i / (len(CONFIDENCE) - 1), word) for i, word in enumerate(CONFIDENCE)]
    name = data or "all data sets"
    return f"<h4>{esc(data or 'All data sets')}</h4>{boxes(values, axis, f'confidence, {name}', {})}"


def _ratings(results: Results) -> str:
    values: dict[str, list[float]] = {}
    for r in results.ratings:
        values.setdefault(r.condition, []).append(r.rating)
    axis = [(i / (len(RATING) - 1), word) for i, word in enumerate(RATING)]
    return f"<h3>Rating of the assistants</h3>{boxes(values, axis, 'rating', {})}" if values else ""


def boxes(
    values: Mapping[str, Sequence[float]], axis: Sequence[tuple[float, str]], what: str, marks: Mapping[str, float]
) -> str:
    """Draw a box plot per name on an axis from 0 to 1, with horizontal marks."""
    width = LEFT + WIDTH * len(values) + 8

    def y(v: float) -> float:
        return 12 + (1 - v) * (HEIGHT - 24)

    parts = []
    for at, word in axis:
        parts.append(
            f"<line x1='{LEFT}' x2='{width}' y1='{y(at):.1f}' y2='{y(at):.1f}' stroke='var(--line)'/>"
            f"<text x='{LEFT - 8}' y='{y(at) + 4:.1f}' font-size='11' text-anchor='end' fill='var(--pale)'>{esc(word)}"
            "</text>"
        )
    dashes = {"chance": "6 4", "ceiling": "1 4"}
    for name, at in marks.items():
        parts.append(
            f"<line x1='{LEFT}' x2='{width}' y1='{y(at):.1f}' y2='{y(at):.1f}' stroke='var(--ink)' stroke-width='1.5' "
            f"stroke-dasharray='{dashes.get(name, '6 4')}'><title>{esc(name)} {number(at)}</title></line>"
        )
    said = []
    for k, (name, xs) in enumerate(values.items()):
        middle = LEFT + WIDTH * (k + 0.5)
        parts.append(
            f"<text x='{middle}' y='{HEIGHT + 16}' font-size='12' text-anchor='middle' fill='var(--ink)'>"
            f"{esc(name[:14])}</text><text x='{middle}' y='{HEIGHT + 30}' font-size='11' text-anchor='middle' "
            f"fill='var(--pale)'>n = {len(xs)}</text>"
        )
        if xs:
            parts.append(_box(xs, middle, y))
            said.append(f"{name} mean {np.mean(xs):.2f}, median {np.median(xs):.2f}")
    label = f"box plot of {what}: {'; '.join(said)}"
    return (
        f"<div class='wide' tabindex='0' role='region' aria-label='{esc(what)}'><svg width='{width}' "
        f"height='{HEIGHT + BOTTOM}' role='img' aria-label='{esc(label)}'>{''.join(parts)}</svg></div>"
    )


def _box(xs: Sequence[float], middle: float, at: Callable[[float], float]) -> str:
    q1, q2, q3 = (float(q) for q in np.quantile(xs, [0.25, 0.5, 0.75]))
    reach = 1.5 * (q3 - q1)
    low, high = min(x for x in xs if x >= q1 - reach), max(x for x in xs if x <= q3 + reach)
    left, right = middle - 24, middle + 24
    stroke = "stroke='var(--link)' stroke-width='1.6'"
    dots = "".join(
        f"<circle cx='{middle:.1f}' cy='{at(x):.1f}' r='3' fill='none' stroke='var(--pale)'/>"
        for x in sorted(set(xs))
        if x < low or x > high
    )
    return (
        f"<line x1='{middle}' x2='{middle}' y1='{at(low):.1f}' y2='{at(q1):.1f}' {stroke}/>"
        f"<line x1='{middle}' x2='{middle}' y1='{at(q3):.1f}' y2='{at(high):.1f}' {stroke}/>"
        f"<line x1='{middle - 12}' x2='{middle + 12}' y1='{at(low):.1f}' y2='{at(low):.1f}' {stroke}/>"
        f"<line x1='{middle - 12}' x2='{middle + 12}' y1='{at(high):.1f}' y2='{at(high):.1f}' {stroke}/>"
        f"<rect x='{left}' y='{at(q3):.1f}' width='48' height='{max(1.0, at(q1) - at(q3)):.1f}' fill='var(--link)' "
        f"fill-opacity='.18' {stroke}/><line x1='{left}' x2='{right}' y1='{at(q2):.1f}' y2='{at(q2):.1f}' "
        f"stroke='var(--link)' stroke-width='3'/><circle cx='{middle}' cy='{at(float(np.mean(xs))):.1f}' r='3.5' "
        f"fill='var(--ink)'/>{dots}"
    )


def _comparisons(comparisons: Sequence[Comparison]) -> str:
    if not comparisons:
        return "<p class='pale'>No two conditions have been answered by the same people yet.</p>"
    head = ("of", "pair", "n", "difference", "d<sub>z</sub>", "rank-biserial", "p, Wilcoxon", "p, permutation")
    body = [
        (
            f"{esc(c.what)}{': ' + esc(c.data) if c.data else ''}",
            f"<b>{esc(c.a)}</b> less {esc(c.b)}",
            str(c.n),
            _two(f"<b>{c.difference:+.3f}</b>", _span(c.low, c.high)),
            _two(_value(c.d_z), _span(c.d_z_low, c.d_z_high)),
            _two(_value(c.rank_biserial), _span(c.rank_biserial_low, c.rank_biserial_high)),
            _two(number(c.p_wilcoxon), number(c.p_wilcoxon_holm)),
            _two(_bold(number(c.p_permutation), c.is_significant), number(c.p_permutation_holm)),
        )
        for c in comparisons
    ]
    why = "<p class='pale'>Second lines: 95% intervals, and p values corrected by Holm's method.</p>"
    return why + _grid("Comparisons", head, body)


def _effects(results: Results) -> str:
    body = [
        (
            esc(e.name),
            str(e.n),
            "" if e.reason else number(e.size),
            esc(e.reason) or number(e.p),
            esc(", ".join(f"{k}: {v:.2f}" for k, v in e.means.items())),
        )
        for e in results.effects
    ]
    why = "Does it matter when something was seen, or on which images? Permutation tests; not corrected."
    return f"<p class='pale'>{why}</p>" + _grid("Effects", ("effect", "n", "size", "p", "mean purity"), body)


def _metrics(metrics: Mapping[str, Measure]) -> str:
    body = []
    for name, m in metrics.items():
        _, _, metric, condition = name.split("/")
        title = f"{esc(TITLES.get(metric, metric))}, {esc(condition)}<br><code>{esc(name)}</code>"
        body.append((title, _two(f"<b>{number(m.value)}</b>", _span(m.low, m.high)), number(m.null), str(m.n)))
    return _grid("All figures", ("metric", "mean", "chance", "people"), body)


def _grid(label: str, head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a table that scrolls sideways where the window is narrow, by keyboard too."""
    top = "".join(f"<th scope='col'>{cell}</th>" for cell in head)
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in body)
    return (
        f"<div class='wide' tabindex='0' role='region' aria-label='{esc(label)}'><table><thead><tr>{top}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _two(first: str, second: str) -> str:
    return f"{first}<br><span class='pale small'>{second}</span>"


def _bold(text: str, is_bold: bool) -> str:
    return f"<b>{text}</b>" if is_bold else text


def _questions(questions: Sequence[Asked]) -> str:
    body = [
        (esc(asked.text), "<br>".join(esc(choice) for choice in asked.counts),
         "<br>".join(f"{n} ({n / sum(asked.counts.values()):.0%})" for n in asked.counts.values()))
        for asked in questions
    ]  # fmt: skip
    return f"<h2>Who took part</h2>{_grid('Who took part', ('question', 'answer', 'people'), body)}" if body else ""


def _comments(comments: Sequence[str]) -> str:
    listed = "".join(f"<li>{esc(text)}</li>" for text in comments)
    return f"<h2>What people said</h2><ul>{listed}</ul>" if comments else ""


def _value(x: float | None) -> str:
    return "" if x is None else f"{x:+.2f}"


def _span(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{number(low)} to {number(high)}"
