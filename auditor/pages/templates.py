"""Templates: pages in which every value is escaped and a name that was not given is an error; one style sheet for all.

A page that stands alone has the style sheet inside; the Audits page of MLflow's server loads it as a file.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "templates"
STYLESHEET = "style.css"


def environment(*further: Path) -> Any:
    """Return the templates of this room and of further folders; the further ones go first."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader([*further, FOLDER]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(signed=signed)
    return made


def render(template: str, **values: Any) -> str:
    """Return a page that stands alone: no script, font or picture from elsewhere.

    >>> "<title>a&amp;b</title>" in render("document.html", title="a&b")
    True
    """
    return str(_environment().get_template(template).render(stylesheet=stylesheet(), **values))


@functools.cache
def stylesheet() -> Any:
    """Return the style sheet, as text that is not escaped."""
    from markupsafe import Markup

    return Markup((FOLDER / STYLESHEET).read_text(encoding="utf-8"))


def signed(value: float) -> str:
    """Return a contribution with its sign; what is nothing has none of its own.

    >>> signed(0.25), signed(-2), signed(-0.001)
    ('+0.25', '−2.00', '+0.00')
    """  # noqa: RUF002
    value = 0.0 if abs(value) < 0.005 else value
    return f"{'+' if value >= 0 else '−'}{abs(value):.2f}"  # noqa: RUF001


@functools.cache
def _environment() -> Any:
    return environment()
