"""Small drawings for pages, as inline SVG: an interval, how values spread, counts; and numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup, escape

from auditor.metrics.measure import Measure

SAME = 1e-6  # numbers closer than this are drawn as one, so not at all
NOTHING = Markup("")


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


def interval(m: Measure, width: int = 140) -> Markup:
    """Draw the interval as a bar, the value as a dot and the null as a dashed tick."""
    if m.low is None or m.high is None:
        return NOTHING
    marks = [m.low, m.high, m.value, *([] if m.null is None else [m.null])]
    low, high = min(marks), max(marks)
    if not high - low > SAME * max(1.0, abs(high)):
        return NOTHING
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
    return Markup(
        f"<svg class='drawing' width='{width}' height='20' role='img' aria-label='{escape(text)}'>"
        f"<line x1='0' x2='{width}' y1='10' y2='10' stroke='var(--line)'/>{null}"
        f"<rect x='{x(m.low):.1f}' y='7' width='{max(1.5, x(m.high) - x(m.low)):.1f}' height='6' rx='3' "
        f"fill='var(--link)' opacity='.45'/>"
        f"<circle cx='{x(m.value):.1f}' cy='10' r='4.5' fill='var(--link)'/></svg>"
    )


def histogram(values: Sequence[float], width: int = 140, height: int = 34, bins: int = 20) -> Markup:
    """Draw how per-image values spread, with the smallest and the largest."""
    numbers = [v for v in values if v == v]
    if len(numbers) < 2:
        return NOTHING
    low, high = min(numbers), max(numbers)
    if not high - low > SAME * max(1.0, abs(high)):
        return NOTHING
    counts = [0] * bins
    for v in numbers:
        counts[min(bins - 1, int((v - low) / (high - low) * bins))] += 1
    return bars(counts, number(low), number(high), width, height)


def bars(counts: Sequence[float], low: str, high: str, width: int = 140, height: int = 34) -> Markup:
    """Draw counts side by side over an axis from ``low`` to ``high``."""
    step, top = width / len(counts), max(counts)
    if not top > 0:
        return NOTHING
    drawn = "".join(
        f"<rect x='{i * step:.1f}' y='{height - n / top * height:.1f}' width='{max(0.5, step - 1):.1f}' "
        f"height='{n / top * height:.1f}' fill='var(--link)' opacity='.7'/>"
        for i, n in enumerate(counts)
        if n
    )
    name, axis = f"histogram from {escape(low)} to {escape(high)}", height + 11
    return Markup(
        f"<svg class='drawing' width='{width}' height='{height + 13}' role='img' aria-label='{name}'>{drawn}"
        f"<line x1='0' x2='{width}' y1='{height}' y2='{height}' stroke='var(--line)'/>"
        f"<g font-size='10' fill='var(--pale)'><text x='0' y='{axis}'>{escape(low)}</text>"
        f"<text x='{width}' y='{axis}' text-anchor='end'>{escape(high)}</text></g></svg>"
    )
