"""``--device``: where the models of a command run, for all commands that run them much."""

from __future__ import annotations

import click

from auditor.commands.group import stop
from auditor.errors import AuditError


def _choose(ctx: click.Context, _parameter: click.Parameter, name: str | None) -> None:
    """Load models to this device until the command ends; one that is not there stops it before any work."""
    if name is None or name == "cpu":
        return
    from auditor.subject.device import running_on

    try:
        ctx.with_resource(running_on(name))
    except AuditError as error:
        stop(f"error: {error}", 2)


DEVICE = click.option(
    "--device",
    envvar="AUDITOR_DEVICE",
    metavar="DEVICE",
    callback=_choose,
    expose_value=False,
    help="Where the model runs: cpu (the default), cuda, cuda:1, or auto, a GPU where there is one.  "
    "[env: AUDITOR_DEVICE]",
)
