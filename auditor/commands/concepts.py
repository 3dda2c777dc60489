"""``auditor concepts``: the concepts of an explainer as a page."""

from __future__ import annotations

from pathlib import Path

import click

from auditor.commands.group import JSON, PICKLE, auditor, example, reports_errors


@auditor.command(epilog=example("auditor concepts models:/digits/1 concepts --out concepts.html"))
@click.argument("model")
@click.argument("name")
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="Page to write: .html or .png; for a tree .html or .svg.",
)
@PICKLE
@JSON
@reports_errors("the page is not finished")
def concepts(model: str, name: str, out: Path, allow_pickle: bool, as_json: bool) -> None:
    """Draw the concepts of the explainer NAME: top images, heatmaps, classes, and the latent space if it has one."""
    from auditor.commands.terminal import as_text, say, waiting
    from auditor.plugins import load, load_subject
    from auditor.plugins.registry.location import resolve

    with waiting(f"drawing {name}"):
        version = resolve(model, registered=True)
        subject = load_subject(version, allow_pickle=allow_pickle or None)
        path = load(version, name, subject=subject).write_page(subject, out)
    say(as_text({"name": name, "page": str(path)}) if as_json else f"page in {path}")
