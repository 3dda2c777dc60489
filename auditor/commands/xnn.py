"""Commands about explanation heads: the table of the paper, and the sheet of its figure 3.8."""

from __future__ import annotations

from pathlib import Path

import click

from auditor.commands.group import JSON, PICKLE, SEED, auditor, example, tells


@auditor.command(
    "xnn-table",
    epilog=example("auditor xnn-table models:/digits/1 --data sklearn:digits --target 3"),
)
@click.argument("model")
@click.option("--data", required=True, help="Images to fit and measure on; see auditor --help.")
@click.option("--layer", help="Vector layer the heads attach to; default: the last below the logits.")
@click.option("--target", help="One class; default: all that have examples.")
@click.option("--methods", help="Comma-separated; default: srae,nn,sae,cae,lasso,1-heatmap.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="An option of kind xnn; may be repeated.")
@click.option("--judge", help="Images to measure on, unseen by the heads; default: every fifth of --data.")
@click.option("--parts", help="CSV of part points of the images measured on: image,part,x,y; default: a 4 x 4 grid.")
@click.option("--boxes", help="CSV of their bounding boxes: image,x,y,width,height; what is outside is one more part.")
@click.option("--limit", type=click.IntRange(min=1), help="Use the first N images only.")
@SEED
@PICKLE
@JSON
@tells
def xnn_table(
    model: str,
    data: str,
    judge: str | None,
    parts: str | None,
    boxes: str | None,
    layer: str | None,
    target: str | None,
    methods: str | None,
    settings: tuple[str, ...],
    limit: int | None,
    seed: int,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Compare explanation heads with their baselines on MODEL: faithfulness, orthogonality, locality."""
    from dataclasses import asdict

    from auditor.data.source import open_data
    from auditor.errors import OptionError
    from auditor.explainers.base import parse_config
    from auditor.part_points import part_masks
    from auditor.plugins import load_subject
    from auditor.commands.terminal import Bar, as_text, parse_settings, say, table, waiting
    from auditor.explainers.xnn.explainer import XnnExplainer
    from auditor.explainers.xnn.paper_table import METHODS
    from auditor.explainers.xnn.paper_table import xnn_table as compare

    options = {"layer": layer, "target": target, "seed": seed, **parse_settings(settings)}
    config = parse_config(XnnExplainer, {k: v for k, v in options.items() if v is not None})
    source = open_data(data, limit=limit)
    unseen = None if judge is None else open_data(judge, limit=limit)
    with waiting(f"loading {model}"):
        subject = load_subject(model, allow_pickle=allow_pickle or None)
    if boxes is not None and parts is None:
        raise OptionError("xnn-table: --boxes needs --parts as well.")
    masks = None if parts is None else part_masks(unseen or source, subject.preprocessing, parts, boxes)
    wanted = [m.strip() for m in methods.split(",")] if methods else list(METHODS)
    with Bar() as bar:
        found = compare(
            subject,
            source,
            config,  # type: ignore[arg-type]
            methods=wanted,
            parts=masks,
            judged_on=unseen,
            progress=bar,
        )
    rows = [asdict(row) for row in found]
    if as_json:
        say(as_text([{k: v if v == v else None for k, v in row.items()} for row in rows]))
        return
    shown = [[f"{v:.3f}" if isinstance(v, float) and v == v else str(v) for v in row.values()] for row in rows]
    table(list(rows[0]), [["-" if v == "nan" else v for v in row] for row in shown])
    if parts is None:
        say("locality: entropy over a 4 x 4 grid (at most 2.77), since the data has no annotated parts")


@auditor.command("xnn-sheet", epilog=example("auditor xnn-sheet models:/digits/1 xnn --data sklearn:digits"))
@click.argument("model")
@click.argument("name")
@click.option("--data", required=True, help="Images to draw; see auditor --help.")
@click.option("--target", help="Class to explain; default: the one fitted for, else the prediction.")
@click.option("--images", "n", default=6, show_default=True, type=click.IntRange(min=1, max=64), help="Rows to draw.")
@click.option("--out", default="sheet.png", show_default=True, type=click.Path(path_type=Path), help="PNG to write.")
@PICKLE
@tells
def xnn_sheet(model: str, name: str, data: str, target: str | None, n: int, out: Path, allow_pickle: bool) -> None:
    """Draw image, 1-Heatmap and x-features with their contributions for the first images of DATA."""
    import torch

    from auditor.data.source import open_data
    from auditor.errors import OptionError
    from auditor.plugins import load, load_subject
    from auditor.commands.terminal import say, waiting
    from auditor.explainers.xnn.explainer import XnnExplainer
    from auditor.explainers.xnn.paper_sheet import xnn_sheet as draw_sheet

    with waiting(f"loading {model}"):
        subject = load_subject(model, allow_pickle=allow_pickle or None)
        explainer = load(model, name, subject=subject)
    if not isinstance(explainer, XnnExplainer):
        raise OptionError(f"xnn-sheet: {name!r} is of kind {explainer.kind}; name an explainer of kind xnn.")
    images = torch.cat([batch.images for batch in open_data(data, limit=n).batches(subject, n)])
    with waiting("explaining"):
        path = draw_sheet(
            subject, explainer, images, out, target=None if target is None else subject.class_index(target)
        )
    say(f"wrote {path}")
