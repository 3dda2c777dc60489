"""``auditor xnn-table``: explanation heads beside their baselines, as in the table of [XNN]."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auditor.commands.group import JSON, LABELS, LIMIT, PICKLE, SEED, auditor, example, reports_errors

if TYPE_CHECKING:
    from auditor.data.source import Data
    from auditor.subject.preprocessing import Preprocessing


@auditor.command(
    "xnn-table",
    epilog=example("auditor xnn-table models:/digits/1 --data sklearn:digits --target 3"),
)
@click.argument("model")
@click.option("--data", required=True, help="Images to fit and measure on; see auditor --help.")
@LABELS
@click.option("--layer", help="Layer the heads attach to; default: the last below the logits.")
@click.option("--target", help="One class; default: all that have examples.")
@click.option("--methods", help="Comma-separated; default: srae,nn,sae,cae,lasso,z,1-heatmap.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="An option of kind xnn; may be repeated.")
@click.option("--test", "judge", help="Images to measure on, unseen by the heads; default: every fifth of --data.")
@click.option("--parts", help="CSV of part points of the images measured on: image,part,x,y; default: a 4 x 4 grid.")
@click.option("--masks", help="Folder of label images (PNG, one per image, as large as it): objects as parts.")
@click.option("--tune", "folds", default=0, help="Choose hyper-parameters by cross-validation with so many folds.")
@click.option("--lasso-alphas", default="", help="Comma-separated: a row of Lasso for each.")
@click.option("--masking", default="", help="Comma-separated pixels kept of the union of a method's heatmaps.")
@click.option("--layers", "deep", default="", help="Comma-separated: a row per layer, of heads on it.")
@click.option("--boxes", help="CSV of their bounding boxes: image,x,y,width,height; what is outside is one more part.")
@click.option("--figures", type=click.Path(path_type=Path), help="Folder for pictures: parts, cells, heat per part.")
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
    masks: str | None,
    folds: int,
    lasso_alphas: str,
    masking: str,
    deep: str,
    figures: Path | None,
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
    from auditor.commands.terminal import Bar, parse_settings, say, waiting
    from auditor.data.source import open_data
    from auditor.explainers.base import parse_config
    from auditor.explainers.xnn.explainer import XnnConfig, XnnExplainer
    from auditor.explainers.xnn.paper_table import TableOptions, layer_rows
    from auditor.explainers.xnn.paper_table import xnn_table as compare
    from auditor.explainers.xnn.table_methods import METHODS
    from auditor.plugins import load_subject

    options = {"layer": layer, "target": target, "seed": seed, **parse_settings(settings)}
    config = parse_config(XnnExplainer, {k: v for k, v in options.items() if v is not None})
    assert isinstance(config, XnnConfig)
    source = open_data(data, limit=limit, seed=seed, labels=labels)
    unseen = None if judge is None else open_data(judge, limit=limit, seed=seed, labels=labels)
    with waiting(f"loading {model}"):
        subject = load_subject(model, allow_pickle=allow_pickle or None)
    annotated = _annotated(unseen or source, subject.preprocessing, parts, boxes, masks)
    names = [m.strip() for m in methods.split(",")] if methods else list(METHODS)
    more = TableOptions(
        lasso_alphas=tuple(_numbers("--lasso-alphas", lasso_alphas)),
        folds=folds,
        masking=tuple(int(m) for m in _numbers("--masking", masking)),
        figures=figures,
        part_names=annotated.names if annotated is not None else (),
    )
    with Bar() as bar:
        if deep:
            comparison = layer_rows(subject, source, config, [n.strip() for n in deep.split(",")], bar)
        else:
            on = {"parts": annotated, "judged_on": unseen, "options": more}
            comparison = compare(subject, source, config, methods=names, progress=bar, **on)
    _show([row.to_json() for row in comparison], as_json)
    if annotated is None and not deep and not as_json:
        say("locality: entropy over a 4 x 4 grid (at most 2.77), since the data has no annotated parts")


def _annotated(images: Data, pre: Preprocessing, parts: str | None, boxes: str | None, masks: str | None) -> Any:
    """Return where the parts are in the images measured on, by points or by masks of objects; None without."""
    from auditor.errors import OptionError
    from auditor.metrics.locality import object_masks, part_masks

    if boxes is not None and parts is None:
        raise OptionError("xnn-table: --boxes needs --parts as well.")
    if parts is not None and masks is not None:
        raise OptionError("xnn-table: --parts and --masks both say what a part is; give one of them.")
    if masks is not None:
        return object_masks(images, pre, masks)
    return None if parts is None else part_masks(images, pre, parts, boxes)


def _show(rows: list[dict[str, Any]], as_json: bool) -> None:
    from auditor.commands.terminal import as_text, say, table

    if as_json:
        say(as_text([{k: v if v == v else None for k, v in row.items()} for row in rows]))
        return
    shown = [[f"{v:.3f}" if isinstance(v, float) and v == v else str(v) for v in row.values()] for row in rows]
    table(list(rows[0]), [["-" if v == "nan" else v for v in row] for row in shown])


def _numbers(option: str, text: str) -> list[float]:
    """Return the numbers above 0 of a comma-separated option."""
    from auditor.errors import OptionError

    try:
        numbers = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = [-1.0]
    if any(not n > 0 for n in numbers):
        raise OptionError(f"xnn-table: {option} wants comma-separated numbers above 0, got {text!r}.")
    return numbers
