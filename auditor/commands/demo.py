"""``auditor demo``: the whole product on scikit-learn's digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from auditor.commands.group import JSON, SEED, auditor, example, now_holds, reports_errors


@auditor.command(epilog=example("auditor demo --dir demo", "auditor demo --dir demo --serve"))
@click.option(
    "--dir", "folder", default="demo", show_default=True, type=click.Path(path_type=Path), help="Where to work."
)
@click.option("--kind", "kinds", multiple=True, help="Fit only this kind of explainer; may be repeated.")
@click.option("--serve", is_flag=True, help="Then serve the model; the page is at http://127.0.0.1:3000/ui.")
@click.option("--port", default=3000, show_default=True, type=click.IntRange(1, 65535), help="Port for --serve.")
@SEED
@JSON
@reports_errors("the demo is not finished")
def demo(folder: Path, kinds: tuple[str, ...], serve: bool, port: int, seed: int, as_json: bool) -> None:
    """Train a small CNN on scikit-learn's digits, register it, explain it in every way, audit it and gate it."""
    from auditor.commands.terminal import Bar, as_text, say
    from auditor.plugins.demo import run_demo

    with Bar() as bar:
        result = run_demo(folder, seed=seed, progress=bar, kinds=kinds)
    if as_json:
        say(as_text(result))
    else:
        say(*_story(result))
    now_holds("the demo is finished" + (", the server stopped" if serve else ""))
    if serve:
        import os

        os.environ["MLFLOW_TRACKING_URI"] = result["tracking_uri"]
        from auditor.service.launch import run_server

        run_server(result["model"], host="127.0.0.1", port=port, sample_images="sklearn:digits?split=test")


def _story(result: dict[str, Any]) -> list[str]:
    model, gate = result["model"], result["gate"]
    fitted = ", ".join(f"{name} ({entry['kind']})" for name, entry in result["explainers"].items())
    first = next(iter(result["explainers"]))
    promoted = f"; the alias {gate['promoted']} now points to it" if gate["promoted"] else ""
    return [
        f"Trained a CNN on the digits: {result['accuracy']:.1%} of the test images right.",
        f"Registered it as {model} in {result['tracking_uri']}",
        f"Fitted and attached: {fitted}",
        f"Explained five test images: {result['sheet']}",
        f"Audited it, {result['n_metrics']} metrics: {result['report']}",
        f"Drafted a policy, {result['policy']}, and gated: {gate['verdict']}, {gate['checks']} checks{promoted}",
        "",
        "What to type next:",
        f"  export MLFLOW_TRACKING_URI={result['tracking_uri']}",
        f"  auditor list     {model}",
        f"  auditor explain  {model} {result['image']} --out explained",
        f"  auditor concepts {model} {first} --out concepts.html",
        f"  auditor gate     {model} --policy {result['policy']} --junit gate.xml",
        f"  auditor serve    {model} --sample-images sklearn:digits     # then open http://127.0.0.1:3000/ui",
        "  mlflow server --backend-store-uri $MLFLOW_TRACKING_URI --app-name auditor",
    ]
