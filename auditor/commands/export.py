"""``auditor export``: one ONNX graph of a version."""

from __future__ import annotations

import click

from auditor.commands.group import JSON, PICKLE, SIGN_KEY, auditor, example, reports_errors


@auditor.command(epilog=example("auditor export models:/digits@champion && auditor serve models:/digits@champion"))
@click.argument("model")
@PICKLE
@SIGN_KEY
@JSON
@reports_errors("no graph was stored")
def export(model: str, allow_pickle: bool, as_json: bool) -> None:
    """Export MODEL with what its explainers read to one ONNX graph, check it against torch, and store it."""
    from auditor.commands.terminal import as_text, say, waiting
    from auditor.plugins.registry.onnx_exports import export as export_version

    with waiting(f"exporting {model}"):
        graph = export_version(model, allow_pickle=allow_pickle or None)
    if as_json:
        say(as_text(graph.to_json()))
        return
    size = len(graph.content) / 1e6
    say(f"{graph.location}: {size:.1f} MB, within {graph.worst:.1e} of torch; auditor serve now uses it.")
