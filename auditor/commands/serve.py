"""The command that serves a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from auditor.commands.group import JSON, PICKLE, auditor, example, tells


@auditor.command(
    epilog=example(
        "auditor serve models:/digits@champion --port 3000",
        "curl -F image=@seven.png http://127.0.0.1:3000/explain",
    )
)
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=3000, show_default=True, type=click.IntRange(1, 65535), help="Port to listen on.")
@click.option("--engine", type=click.Choice(["auto", "torch", "onnx"]), help="What runs the model.  [default: auto]")
@click.option("--device", help="cpu, cuda or cuda:N.  [default: a GPU when there is one]")
@click.option("--precision", type=click.Choice(["float32", "bfloat16", "float16"]), help="Of the torch engine.")
@click.option("--workers", type=int, help="Processes, each with a copy of the model.  [default: 1]")
@click.option("--threads", type=int, help="Threads per worker inside torch and ONNX Runtime.  [default: 1]")
@click.option("--max-batch", type=int, help="Images per forward pass.  [default: 16]")
@click.option("--queue", type=int, help="Images that may wait before callers get 429.  [default: 256]")
@click.option("--max-body-mb", type=float, help="Larger requests get 413.  [default: 16]")
@click.option("--max-pixels", type=int, help="Larger images get 413.  [default: 40000000]")
@click.option("--request-timeout-s", type=float, help="Unanswered requests get 503.  [default: 30]")
@click.option("--upload-timeout-s", type=float, help="Bodies that take longer get 408.  [default: 20]")
@click.option("--search-timeout-s", type=float, help="Budget of kinds that search per image (rde).  [default: 1]")
@click.option("--poll-s", type=float, help="How often each worker asks whether the alias moved.  [default: 5]")
@click.option("--api-keys", type=click.Path(path_type=Path), help="File with one key per line; read when it changes.")
@click.option("--samples", help="Data source of the sample images on the page, e.g. sklearn:digits.")
@click.option("--otlp-endpoint", help="Send OpenTelemetry traces here, e.g. http://collector:4318/v1/traces.")
@click.option("--trace-rate", type=float, help="Share of the requests that are traced.  [default: 1]")
@click.option("--allow-pickle", is_flag=True, default=None, help="Load models stored as pickles.")
@click.option("--quiet", is_flag=True, help="No log line per request.")
@tells
def serve(model: str, host: str, port: int, quiet: bool, **options: Any) -> None:
    """Serve MODEL with everything attached to it: REST, a page at /ui, metrics.

    Every option is also an environment variable: --max-batch is AUDITOR_MAX_BATCH.
    """
    from auditor.service.launch import run_server

    given = {k: v for k, v in options.items() if v is not None}
    if quiet:
        given["log_requests"] = False
    run_server(model, host=host, port=port, **given)


@auditor.command(epilog=example("auditor export models:/digits@champion && auditor serve models:/digits@champion"))
@click.argument("model")
@PICKLE
@JSON
@tells
def export(model: str, allow_pickle: bool, as_json: bool) -> None:
    """Export MODEL with what its explainers read to one ONNX graph, check it against torch, and store it."""
    from auditor.plugins.registry.onnx_exports import export as export_version
    from auditor.commands.terminal import as_text, say, waiting

    with waiting(f"exporting {model}"):
        found = export_version(model, allow_pickle=allow_pickle or None)
    if as_json:
        say(as_text(found.to_json()))
        return
    size = len(found.content) / 1e6
    say(f"{found.location}: {size:.1f} MB, within {found.worst:.1e} of torch; auditor serve now uses it.")
