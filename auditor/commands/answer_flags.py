"""Flags of the options of an answer, made from ``AnswerOptions``: ``noise_samples`` is ``--noise-samples``."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from functools import wraps
from typing import Any

import click
from pydantic.fields import FieldInfo

from auditor.explainers.answer_options import OLD_NAMES, AnswerOptions, deprecation, options_of

Command = Callable[..., Any]


def answer_flags(where: str, **defaults: Any) -> Callable[[Command], Command]:
    """Give a command every option of an answer as a flag; it is called with them checked, as ``options``.

    ``defaults`` replace those of ``AnswerOptions``. Flags of an earlier release work, with a line on standard error.
    """

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(**values: Any) -> Any:
            values_by_name = {name: values.pop(name) for name in AnswerOptions.model_fields}
            for old, new in OLD_NAMES.items():
                value = values.pop(_old(old))
                if value in (None, ()):
                    continue
                from auditor.commands.terminal import note

                note(f"auditor: warning: {deprecation(_flag(old), _flag(new))}")
                values_by_name[new] = value if values_by_name[new] in (None, ()) else values_by_name[new]
            chosen = {name: listed(value) for name, value in values_by_name.items() if value not in (None, ())}
            return command(options=options_of(where, {**defaults, **chosen}), **values)

        for old, new in reversed(list(OLD_NAMES.items())):
            kind, several, _ = _type_of(AnswerOptions.model_fields[new])
            run = click.option(_flag(old), _old(old), type=kind, multiple=several, hidden=True)(run)
        for name, field in reversed(AnswerOptions.model_fields.items()):
            kind, several, shown = _type_of(field)
            default = defaults.get(name, field.default)
            default = ",".join(default) if isinstance(default, list) else default
            text = (field.description or "").replace("`", "").replace("data URL", "data URL in the JSON")
            text += f"  [default: {default}]" if default is not None else ""
            text += "  May be repeated, or hold commas." if several else ""
            run = click.option(_flag(name), name, type=kind, multiple=several, metavar=shown, help=text)(run)
        return run

    return decorate


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _old(name: str) -> str:
    return f"old_{name}"


def listed(value: Any) -> Any:
    """Return a repeated flag as one list; ``a,b`` counts as two."""
    if not isinstance(value, tuple):
        return value
    return [part.strip() for text in value for part in text.split(",") if part.strip()]


def _type_of(field: FieldInfo) -> tuple[Any, bool, str | None]:
    """Return click's type of a field, whether its flag may be repeated, and what help shows for the value."""
    kind = field.annotation
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        (kind, *_) = (part for part in typing.get_args(kind) if part is not types.NoneType)
    if typing.get_origin(kind) is typing.Literal:
        return click.Choice(list(typing.get_args(kind))), False, None
    if typing.get_origin(kind) is list:
        return str, True, "NAMES"
    return (kind, False, None) if kind in (int, float) else (str, False, "CLASS")
