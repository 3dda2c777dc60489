"""``--config audit.toml``: what a command takes as options, written in a file; the command line goes before it.

::

    [audit]                              # a table per command, options as on the command line
    model = "models:/birds@champion"
    data = "photos/"
    checks = "performance,reliance"

    [fit]
    kind = "nmf"
    model = "models:/birds@champion"
    data = "photos/"
    set = { rank = 10, epochs = 5 }      # options of the kind
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from auditor.commands.group import stop

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST_BYTES = 1 << 20


def _read(ctx: click.Context, _parameter: click.Parameter, path: Path | None) -> None:
    """Make the file's table the defaults of the command; what the command does not know is an error."""
    if path is None:
        return
    name = str(ctx.info_name)
    try:
        if path.stat().st_size > MOST_BYTES:
            stop(f"error: --config {path}: larger than {MOST_BYTES >> 20} MB; that is no configuration.", 2)
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        stop(f"error: --config {path}: {error.strerror or error}.", 2)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        stop(f"error: --config {path}: not TOML ({' '.join(str(error).split())}).", 2)
    table = content.get(name)
    if not isinstance(table, dict):
        stop(f"error: --config {path}: wanted a table [{name}], it has {', '.join(content) or 'nothing'}.", 2)
    parameters = {p.opts[0].lstrip("-"): p for p in ctx.command.params if p.expose_value and p.name != "config"}
    values: dict[str, Any] = {}
    for key, value in table.items():
        parameter = parameters.get(key.replace("_", "-"), parameters.get(key))
        if parameter is None:
            stop(f"error: --config {path}: [{name}] has no option {key!r}; there are {', '.join(parameters)}.", 2)
        values[str(parameter.name)] = _value(path, f"[{name}] {key}", parameter, value)
    ctx.default_map = {**(ctx.default_map or {}), **values}


def _value(path: Path, where: str, parameter: click.Parameter, value: Any) -> Any:
    """Return a value as the option takes it: a list where it may be repeated, KEY=VALUE of a table, text."""
    if isinstance(value, dict) and parameter.name == "settings":
        return [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in value.items()]
    is_flag = isinstance(parameter, click.Option) and parameter.is_flag
    if is_flag != isinstance(value, bool) or isinstance(value, dict):
        stop(f"error: --config {path}: {where}: wanted {'true or false' if is_flag else 'a value'}, got {value!r}.", 2)
    if is_flag:
        return value
    if isinstance(parameter, click.Option) and parameter.multiple:
        return [str(v) for v in value] if isinstance(value, list) else [str(value)]
    if isinstance(value, list):
        return ",".join(str(v) for v in value)
    return str(value)


CONFIG = click.option(
    "--config",
    type=click.Path(path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=_read,
    help="TOML file with a table per command ([fit], [audit]); options given here go before it.",
)
