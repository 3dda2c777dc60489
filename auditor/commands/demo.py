"""The demo."""

from __future__ import annotations

from pathlib import Path

import click

from auditor.commands.group import JSON, SEED, auditor, example, tells


@auditor.command(epilog=example("auditor demo --dir demo"))
@click.option(
    "--dir", "folder", default="demo", show_default=True, type=click.Path(path_type=Path), help="Where to work."
)
@SEED
@JSON
@tells
def demo(folder: Path, seed: int, as_json: bool) -> None:
    """Train a small CNN on scikit-learn's digits, register it, explain it, and show what to type next."""
    from auditor.plugins.demo import run_demo
    from auditor.terminal import Bar, as_text, say

    with Bar() as bar:
        result = run_demo(folder, seed=seed, progress=bar)
    if as_json:
        say(as_text(result))
        return
    metrics = result["metrics"]
    say(
        f"Trained a CNN on the digits: {result['accuracy']:.1%} of the test images right.",
        f"Registered it as {result['model']} in {result['tracking_uri']}",
        f"Fitted and attached the concepts ({metrics['rank']:.0f} of layer {result['layer']}): the prediction from the "
        f"concepts alone agrees on {metrics['f_cls']:.1%} of held-out images.",
        f"Explained five test images: {result['sheet']}",
        "",
        "What to type next:",
        f"  export MLFLOW_TRACKING_URI={result['tracking_uri']}",
        f"  auditor layers  {result['model']}",
        f"  auditor list    {result['model']}",
        f"  auditor explain {result['model']} {result['image']} --out explained",
        f"  auditor concepts {result['model']} concepts --out concepts.html",
        f"  auditor fit tree {result['model']} --data sklearn:digits",
        f"  auditor verify  {result['model']}",
    )
