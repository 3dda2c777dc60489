"""``auditor xnn-table``: explanation heads beside their baselines, as in the table of [XNN]."""

from __future__ import annotations

import click

from auditor.commands.group import JSON, LABELS, LIMIT, PICKLE, SEED, auditor, example, reports_errors


@auditor.command(
    "xnn-table",
    epilog=example("auditor xnn-table models:/digits/1 --data sklearn:digits --target 3"),
)
@click.argument("model")
@click.option("--data", required=True, help="Images to fit and measure on; see auditor --help.")
@LABELS
@click.option("--layer", help="Vector layer the heads attach to; default: the last below the logits.")
@click.option("--target", help="One class; default: all that have examples.")
@click.option("--methods", help="Comma-separated; default: srae,nn,sae,cae,lasso,1-heatmap.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="An option of kind xnn; may be repeated.")
@click.option("--test", "judge", help="Images to measure on, unseen by the heads; default: every fifth of --data.")
@click.option("--parts", help="CSV of part points of the images measured on: image,part,x,y; default: a 4 x 4 grid.")
@click.option("--boxes", help="CSV of their bounding boxes: image,x,y,width,height; what is outside is one more part.")
@LIMIT
@SEED
@PICKLE
@JSON
@reports_errors("there is no table")
def xnn_table(
    model: str,
    data: str,
    labels: str | None,
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

    from auditor.commands.terminal import Bar, as_text, parse_settings, say, table, waiting
    from auditor.data.source import open_data
    from auditor.errors import OptionError
    from auditor.explainers.base import parse_config
    from auditor.explainers.xnn.explainer import XnnExplainer
    from auditor.explainers.xnn.paper_table import METHODS
    from auditor.explainers.xnn.paper_table import xnn_table as compare
    from auditor.metrics.locality import part_masks
    from auditor.plugins import load_subject

    options = {"layer": layer, "target": target, "seed": seed, **parse_settings(settings)}
    config = parse_config(XnnExplainer, {k: v for k, v in options.items() if v is not None})
    source = open_data(data, limit=limit, seed=seed, labels=labels)
    unseen = None if judge is None else open_data(judge, limit=limit, seed=seed, labels=labels)
    with waiting(f"loading {model}"):
        subject = load_subject(model, allow_pickle=allow_pickle or None)
    if boxes is not None and parts is None:
        raise OptionError("xnn-table: --boxes needs --parts as well.")
    masks = None if parts is None else part_masks(unseen or source, subject.preprocessing, parts, boxes)
    names = [m.strip() for m in methods.split(",")] if methods else list(METHODS)
    with Bar() as bar:
        comparison = compare(
            subject,
            source,
            config,  # type: ignore[arg-type]
            methods=names,
            parts=masks,
            judged_on=unseen,
            progress=bar,
        )
    rows = [asdict(row) for row in comparison]
    if as_json:
        say(as_text([{k: v if v == v else None for k, v in row.items()} for row in rows]))
        return
    shown = [[f"{v:.3f}" if isinstance(v, float) and v == v else str(v) for v in row.values()] for row in rows]
    table(list(rows[0]), [["-" if v == "nan" else v for v in row] for row in shown])
    if parts is None:
        say("locality: entropy over a 4 x 4 grid (at most 2.77), since the data has no annotated parts")
