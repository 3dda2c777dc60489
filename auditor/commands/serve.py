"""``auditor serve``: a version as a service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from auditor.commands.group import auditor, example, reports_errors
from auditor.service.settings import OLD_NAMES, options


def settings_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every setting of a server as an option, old names too; one that is not given is None."""
    for old in OLD_NAMES:
        command = click.option("--" + old.replace("_", "-"), old, hidden=True)(command)
    for option in reversed(options()):
        flag, kind = option.flag, click.Choice(option.choices) if option.choices else option.kind
        if option.kind is bool:
            flag = f"{option.flag}/--no-{option.flag[2:]}"
        shown = "" if option.default in (None, "") else f"  [default: {option.default}]"
        command = click.option(flag, option.name, type=kind, default=None, help=option.description + shown)(command)
    return command


@auditor.command(
    epilog=example(
        "auditor serve models:/digits@champion --port 3000",
        "curl -F image=@seven.png http://127.0.0.1:3000/explain",
    )
)
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=3000, show_default=True, type=click.IntRange(1, 65535), help="Port to listen on.")
@settings_flags
@click.option("--quiet", is_flag=True, help="No log line per request.")
@reports_errors("the server stopped")
def serve(model: str, host: str, port: int, quiet: bool, **settings: Any) -> None:
    """Serve MODEL with everything attached to it: REST, a page at /ui, metrics.

    Every option is also an environment variable: --max-batch is AUDITOR_MAX_BATCH.
    """
    from auditor.service.launch import run_server

    chosen = {k: v for k, v in settings.items() if v is not None}
    if quiet:
        chosen["log_requests"] = False
    run_server(model, host=host, port=port, **chosen)
