"""``auditor xnn-sheet``: images with their x-features, as in figure 3.8 of [Khorram2020]."""

from __future__ import annotations

from pathlib import Path

import click

from auditor.commands.group import JSON, PICKLE, auditor, example, reports_errors


@auditor.command("xnn-sheet", epilog=example("auditor xnn-sheet models:/digits/1 xnn --data sklearn:digits"))
@click.argument("model")
@click.argument("name")
@click.option("--data", required=True, help="Images to draw; see auditor --help.")
@click.option("--target", help="Class to explain; default: the one fitted for, else the prediction.")
@click.option("--images", "n", default=6, show_default=True, type=click.IntRange(min=1, max=64), help="Rows to draw.")
@click.option("--out", default="sheet.png", show_default=True, type=click.Path(path_type=Path), help="PNG to write.")
@PICKLE
@JSON
@reports_errors("the sheet is not finished")
def xnn_sheet(
    model: str, name: str, data: str, target: str | None, n: int, out: Path, allow_pickle: bool, as_json: bool
) -> None:
    """Draw image, 1-Heatmap and x-features with their contributions for images spread over the classes of DATA."""
    import torch

    from auditor.commands.terminal import as_text, say, waiting
    from auditor.data.source import open_data
    from auditor.errors import OptionError
    from auditor.explainers.xnn.explainer import XnnExplainer
    from auditor.explainers.xnn.paper_sheet import xnn_sheet as draw_sheet
    from auditor.plugins import load, load_subject
    from auditor.plugins.registry.location import resolve

    with waiting(f"loading {model}"):
        version = resolve(model, registered=True)
        subject = load_subject(version, allow_pickle=allow_pickle or None)
        explainer = load(version, name, subject=subject)
    if not isinstance(explainer, XnnExplainer):
        raise OptionError(f"xnn-sheet: {name!r} is of kind {explainer.kind}; name an explainer of kind xnn.")
    images = torch.cat([batch.images for batch in open_data(data, limit=n).batches(subject, n)])
    with waiting("explaining"):
        path = draw_sheet(
            subject, explainer, images, out, target=None if target is None else subject.class_index(target)
        )
    say(as_text({"name": name, "images": len(images), "sheet": str(path)}) if as_json else f"wrote {path}")
