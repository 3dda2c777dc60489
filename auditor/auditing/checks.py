"""Checks: what an audit consists of, by name, and which of it a caller asked for.

``performance`` needs nothing but the one pass over all images that every audit begins with, so it is always measured.
What is left out has the status *skipped* with the reason: a part of an audit never looks like a whole one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from auditor.errors import OptionError, UnknownExplainerError
from auditor.explainers.answer_options import EVERY

OF_MODEL = {
    "performance": "how often the model is right, and how sure it is",
    "layers": "weights and stability of the model, layer by layer",
    "reliance": "what each class hangs on",
}
OF_EXPLAINERS = {
    "faithfulness": "whether explanations say what the model says",
    "flipping": "whether the pixels they point to matter",
    "randomisation": "whether they depend on the model's weights",
    "noise": "whether they stay the same under a little noise",
    "heatmaps": "overlap and spread of the heatmaps",
    "basis": "whether another fit finds the same concepts",
    "groups": "what a class loses without its largest group of concepts",
    "grouping": "whether images can be grouped by class from what it shows",
}
CHECKS = {**OF_MODEL, **OF_EXPLAINERS}
ALWAYS = "performance"
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_checks(text: str) -> tuple[str, ...]:
    """Return the checks that a list with commas names, each once and in the order of ``CHECKS``.

    >>> parse_checks("reliance, faithfulness")
    ('reliance', 'faithfulness')
    """
    return checked(part.strip().lower() for part in text.split(",") if part.strip())


def checked(names: Iterable[str]) -> tuple[str, ...]:
    """Return names of checks in the order of ``CHECKS``; an unknown one, or none at all, is an error."""
    listed = list(names)
    unknown = [name for name in listed if name not in CHECKS]
    if unknown or not listed:
        got = repr(unknown[0]) if unknown else "none"
        raise OptionError(f"checks: want some of {', '.join(CHECKS)}, with commas between, got {got}.")
    return tuple(name for name in CHECKS if name in listed)


def asked_for(named: Sequence[str] | None, attached: Collection[str]) -> Collection[str]:
    """Return the explainers to check: those named, or all of them; one that is not attached is an error.

    >>> sorted(asked_for(None, {"a", "b"})), asked_for(["b"], {"a", "b"})
    (['a', 'b'], ['b'])
    """
    if named is None or EVERY in named:
        return attached
    for name in named:
        if name not in attached:
            names = ", ".join(sorted(attached)) or "none"
            raise UnknownExplainerError(f"explainers: there is no explainer {name!r}; attached are: {names}.")
    return named


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as ``5m``, ``90s``, ``1h30m`` or ``300``.

    >>> parse_duration("5m"), parse_duration("1h30m"), parse_duration("300")
    (300.0, 5400.0, 300.0)
    """
    whole = text.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", whole):
        whole += "s"
    if not re.fullmatch(r"(\d+(\.\d+)?h)?(\d+(\.\d+)?m)?(\d+(\.\d+)?s)?", whole) or not whole:
        raise OptionError(f"budget: want a duration such as 5m, 90s or 1h30m, got {text!r}.")
    seconds = sum(float(n) * UNITS[unit] for n, unit in re.findall(r"(\d+(?:\.\d+)?)([hms])", whole))
    if not seconds > 0:
        raise OptionError(f"budget: want a duration above zero, got {text!r}.")
    return seconds


def duration(seconds: float) -> str:
    """Return seconds as a person writes them.

    >>> duration(300), duration(95), duration(7), duration(0.4)
    ('5 min', '1 min 35 s', '7 s', '0.4 s')
    """
    if seconds < 10 and seconds != round(seconds):
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    parts = ([f"{minutes} min"] if minutes else []) + ([f"{rest} s"] if rest or not minutes else [])
    return " ".join(parts)
