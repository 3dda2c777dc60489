"""``auditor explain-all``: every image of a source by every explainer attached, as Parquet files."""

from __future__ import annotations

import click

from auditor.commands.answer_flags import answer_flags
from auditor.commands.cluster_option import CLUSTER, say_workers
from auditor.commands.device_option import DEVICE
from auditor.commands.group import JSON, LABELS, LIMIT, PICKLE, auditor, example, reports_errors
from auditor.explainers.answer_options import AnswerOptions


@auditor.command(
    "explain-all",
    epilog=example(
        "auditor explain-all models:/birds@champion --data s3://bucket/photos/ --out s3://bucket/explanations/",
        "auditor explain-all models:/digits/1 --data sklearn:digits --out explained --cluster local --stability off",
    ),
)
@click.argument("model")
@click.option("--data", required=True, help="Images to explain; see auditor --help.")
@LABELS
@click.option("--out", required=True, help="Folder or address (s3://, gs://, az://) for the Parquet files.")
@LIMIT
@click.option("--strict", is_flag=True, help="A broken image is an error, not a warning.")
@CLUSTER
@DEVICE
@PICKLE
@JSON
@reports_errors("finished files stay, and the same command goes on from there")
@answer_flags("explain-all", heatmaps="none")
def explain_all(
    model: str,
    data: str,
    labels: str | None,
    out: str,
    limit: int | None,
    strict: bool,
    cluster: str | None,
    options: AnswerOptions,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Explain every image of DATA by the explainers attached to MODEL, into Parquet files below --out.

    Predictions, contributions and stability; heatmaps where --heatmaps asks for them. The same command goes on where
    an interrupted one stopped.
    """
    import time

    from auditor.commands.terminal import Bar, as_text, say
    from auditor.data.source import open_data
    from auditor.plugins.registry.explain_all import explain_version
    from auditor.runners.cluster import on_cluster

    source = open_data(data, strict=strict, limit=limit, seed=options.seed, labels=labels)
    with on_cluster(cluster) as runner, Bar() as bar:
        began = time.monotonic()
        result = explain_version(model, source, out, options, allow_pickle=allow_pickle or None, progress=bar)
        work = runner.tally.to_json(time.monotonic() - began)
    if as_json:
        say(as_text({"out": out, **result.to_json(), "parts_before": result.parts_before, "work": work}))
        return
    before = f", {result.parts_before} of them finished before" if result.parts_before else ""
    say(f"{result.images} images explained into {result.parts} files{before}, in {out}")
    if result.skipped:
        say(f"{len(result.skipped)} images could not be read; _explanations.json names them")
    say_workers(work)
