"""``auditor layers``: the layers that can be explained."""

from __future__ import annotations

import click

from auditor.commands.group import JSON, PICKLE, auditor, example, reports_errors


@auditor.command(epilog=example("auditor layers models:/digits/1", "auditor layers models:/digits/1 --all"))
@click.argument("model")
@click.option("--all", "show_all", is_flag=True, help="Also the layers that cannot be explained, and why.")
@PICKLE
@JSON
@reports_errors("nothing was changed")
def layers(model: str, show_all: bool, allow_pickle: bool, as_json: bool) -> None:
    """List the layers of MODEL that can be explained, with shapes; the suggested one is marked."""
    from auditor.commands.terminal import as_text, say, table, waiting
    from auditor.plugins import load_subject

    with waiting(f"loading {model}"):
        subject = load_subject(model, allow_pickle=allow_pickle or None)
        every, best = subject.layers(), subject.default_layer()
    if as_json:
        keys = ("name", "type", "shape", "nonnegative", "explainable", "reason")
        rows = [{**{k: getattr(x, k) for k in keys}, "suggested": x.name == best} for x in every]
        say(as_text(rows if show_all else [r for r in rows if r["explainable"]]))
        return
    body = []
    for x in every:
        if x.explainable or show_all:
            mark = "* suggested" if x.name == best else ("" if x.explainable else x.reason)
            grid = f"{x.layout.grid[0]} x {x.layout.grid[1]}" if x.layout else ""
            channels = str(x.layout.channels) if x.layout else ""
            body.append([x.name, x.type, channels, grid, "non-negative" if x.nonnegative else "signed", mark])
    table(["layer", "type", "channels", "positions", "sign", ""], body)
