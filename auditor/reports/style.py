"""How the page of an audit looks: one style sheet for light, dark and paper, and small drawings as inline SVG."""

from __future__ import annotations

import html
from collections.abc import Sequence

from auditor.metrics.measure import Measure

SAME = 1e-6  # numbers closer than this are drawn as one, so not at all

STYLE = """
:root{color-scheme:light dark;--ink:#1c2024;--pale:#667080;--paper:#fff;--card:#f5f7f9;--line:#d9dee4;--good:#1a7f4b;
--warn:#a86200;--bad:#c2261f;--accent:#2c6bd2;--pos:#d62728;--neg:#1f5ac8}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--pale:#98a3b0;--paper:#14171a;--card:#1e2327;--line:#343b43;
--good:#4cc38a;--warn:#f0a742;--bad:#ff6b62;--accent:#7aa7ff;--pos:#ff6b62;--neg:#7aa7ff}}
*{box-sizing:border-box}html{-webkit-text-size-adjust:100%}
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;color:var(--ink);
background:var(--paper);margin:0 auto;max-width:1040px;padding:28px 20px 60px}
h1{font-size:1.75em;line-height:1.2;margin:0 0 .1em}h2{font-size:1.3em;margin:2em 0 .3em;padding-top:.7em;
border-top:1px solid var(--line)}h3{font-size:1.06em;margin:1.5em 0 .3em}p{margin:.4em 0 .8em}
.pale,.lead{color:var(--pale)}.small{font-size:13px}code{font:13px ui-monospace,Menlo,Consolas,monospace;
overflow-wrap:anywhere}pre{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 14px;
white-space:pre-wrap;overflow-wrap:anywhere}
.verdict{border:1px solid var(--line);border-left:8px solid var(--mark);background:var(--card);border-radius:10px;
padding:14px 20px;margin:18px 0}.verdict h2{border:0;padding:0;margin:0 0 .3em;color:var(--mark);font-size:1.45em}
.good{--mark:var(--good)}.warn{--mark:var(--warn)}.bad{--mark:var(--bad)}
ul.finds{list-style:none;padding:0;margin:.4em 0}ul.finds li{padding:3px 0 3px 26px;position:relative}
ul.finds li::before{position:absolute;left:0;color:var(--mark);font-weight:700;content:"\\2713"}
ul.finds li.warn::before{content:"!";left:5px}ul.finds li.bad::before{content:"\\2717"}
section.verdict h2{font-size:1.25em}.finding{border-top:1px solid var(--line);padding:2px 0 8px}
.finding h3{color:var(--mark)}.spots{display:flex;flex-wrap:wrap;gap:10px}.spots figure{margin:0;width:144px}
.spots img{width:144px;border-radius:4px;display:block;background:#888}.spots img.spot{width:auto;max-width:100%;
height:52px;margin-top:4px;border:2px solid var(--pos);image-rendering:pixelated}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:14px}
th{font-weight:600;text-align:left;color:var(--pale);font-size:12.5px}
td,th{padding:6px 10px 6px 0;border-bottom:1px solid var(--line);vertical-align:top}
td.num,th.num{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}td.draw{width:150px}
.concept{display:grid;grid-template-columns:210px 1fr;gap:4px 16px;padding:10px 0;border-bottom:1px solid var(--line);
break-inside:avoid}.concept b{display:block}.shots img,.case img{border-radius:4px;image-rendering:pixelated;
width:72px;height:72px;object-fit:contain;margin:0 4px 2px 0;background:#888}
.case{display:flex;flex-wrap:wrap;gap:6px 14px;padding:10px 0;border-bottom:1px solid var(--line);break-inside:avoid}
.case figure{margin:0;width:112px;font-size:12px;line-height:1.3}.case figcaption{overflow-wrap:anywhere}
.pos{color:var(--pos)}.neg{color:var(--neg)}.tag{display:inline-block;border:1px solid var(--line);border-radius:99px;
padding:0 9px;font-size:12.5px;color:var(--pale);margin-left:6px;vertical-align:2px;font-weight:400}
dl{display:grid;grid-template-columns:minmax(130px,200px) 1fr;gap:5px 16px;margin:.5em 0}dt{color:var(--pale)}
dd{margin:0;overflow-wrap:anywhere}.missing{color:var(--warn)}svg{display:block;overflow:visible}
.bars{columns:2;column-gap:32px}.bars div{display:grid;grid-template-columns:7.5em 1fr 4em;gap:8px;font-size:13px;
break-inside:avoid}.bars span:first-child{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.bars i{align-self:center;height:10px;background:var(--accent);border-radius:3px}
@media(max-width:640px){.concept{grid-template-columns:1fr}.bars{columns:1}td.draw{display:none}th.draw{display:none}
dl{grid-template-columns:1fr}}
@page{margin:16mm 14mm}
@media print{:root{color-scheme:light;--ink:#1c2024;--pale:#555e6a;--paper:#fff;--card:#f5f7f9;--line:#cfd5db;
--good:#1a7f4b;--warn:#a86200;--bad:#c2261f;--accent:#2c6bd2;--pos:#d62728;--neg:#1f5ac8}
body{max-width:none;padding:0;font-size:12.5px;-webkit-print-color-adjust:exact;print-color-adjust:exact}
h2,h3,h2+p,h3+p{break-after:avoid}tr,.verdict{break-inside:avoid}.scroll{overflow:visible}
.finding{break-inside:avoid}.spots figure,.spots img{width:96px}
.shots img,.case img{width:58px;height:58px}.case figure{width:96px}table{font-size:11.5px}}
"""


def esc(text: object) -> str:
    """Return text for HTML."""
    return html.escape(str(text), quote=True)


def number(x: float | None) -> str:
    """Return a number as people read it.

    >>> number(0.99), number(12345.6), number(3e-17), number(None)
    ('0.99', '12346', '3.0e-17', '')
    """
    if x is None:
        return ""
    if x != x:
        return "none"
    if x == 0:
        return "0"
    size = abs(x)
    if size >= 1000:
        return f"{x:.0f}"
    return f"{x:.1e}" if size < 1e-3 else f"{x:.3g}"


def interval(m: Measure, width: int = 140) -> str:
    """Draw the interval as a bar, the value as a dot and the null as a dashed tick."""
    if m.low is None or m.high is None:
        return ""
    marks = [m.low, m.high, m.value, *([] if m.null is None else [m.null])]
    low, high = min(marks), max(marks)
    if not high - low > SAME * max(1.0, abs(high)):
        return ""
    pad = 7.0

    def x(v: float) -> float:
        return pad + (v - low) / (high - low) * (width - 2 * pad)

    null = ""
    if m.null is not None:
        at = x(m.null)
        null = (
            f"<line x1='{at:.1f}' x2='{at:.1f}' y1='1' y2='19' stroke='var(--pale)' stroke-width='1.5' "
            f"stroke-dasharray='3 2'/>"
        )
    text = f"{number(m.value)}, 95% interval {number(m.low)} to {number(m.high)}"
    return (
        f"<svg width='{width}' height='20' role='img' aria-label='{esc(text)}'>"
        f"<line x1='0' x2='{width}' y1='10' y2='10' stroke='var(--line)'/>{null}"
        f"<rect x='{x(m.low):.1f}' y='7' width='{max(1.5, x(m.high) - x(m.low)):.1f}' height='6' rx='3' "
        f"fill='var(--accent)' opacity='.45'/>"
        f"<circle cx='{x(m.value):.1f}' cy='10' r='4.5' fill='var(--accent)'/></svg>"
    )


def histogram(values: Sequence[float], width: int = 140, height: int = 34, bins: int = 20) -> str:
    """Draw how per-image values spread, with the smallest and the largest."""
    numbers = [v for v in values if v == v]
    if len(numbers) < 2:
        return ""
    low, high = min(numbers), max(numbers)
    if not high - low > SAME * max(1.0, abs(high)):
        return ""
    counts = [0] * bins
    for v in numbers:
        counts[min(bins - 1, int((v - low) / (high - low) * bins))] += 1
    return bars(counts, number(low), number(high), width, height)


def bars(counts: Sequence[float], low: str, high: str, width: int = 140, height: int = 34) -> str:
    """Draw counts side by side over an axis from ``low`` to ``high``."""
    step, top = width / len(counts), max(counts)
    if not top > 0:
        return ""
    drawn = "".join(
        f"<rect x='{i * step:.1f}' y='{height - n / top * height:.1f}' width='{max(0.5, step - 1):.1f}' "
        f"height='{n / top * height:.1f}' fill='var(--accent)' opacity='.7'/>"
        for i, n in enumerate(counts)
        if n
    )
    return (
        f"<svg width='{width}' height='{height + 13}' role='img' aria-label='histogram from {low} to {high}'>{drawn}"
        f"<line x1='0' x2='{width}' y1='{height}' y2='{height}' stroke='var(--line)'/>"
        f"<text x='0' y='{height + 11}' font-size='10' fill='var(--pale)'>{low}</text>"
        f"<text x='{width}' y='{height + 11}' font-size='10' fill='var(--pale)' text-anchor='end'>{high}</text></svg>"
    )
