"""``auditor compare``: whether the concepts of two versions differ, where they look, and what their classes hang on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auditor.commands.cluster_option import CLUSTER
from auditor.commands.device_option import DEVICE
from auditor.commands.group import (
    HONEST_HELP,
    JSON,
    LABELS,
    LIMIT,
    PICKLE,
    SEED,
    WithHonest,
    auditor,
    example,
    now_holds,
    reports_errors,
)

if TYPE_CHECKING:
    from auditor.release.drift import Drift
    from auditor.release.version_changes import Changes


@auditor.command(
    cls=WithHonest,
    epilog=example(
        "auditor compare models:/digits/1 models:/digits/2 --data sklearn:digits --out drift.png --report drift.html",
        "auditor compare models:/m/5 models:/m/6 --data photos/ --honest models:/m/3 models:/m/4",
    ),
)
@click.argument("model_a", metavar="MODEL")
@click.argument("model_b", metavar="MODEL")
@click.option("--data", required=True, help="Images that both versions look at; see auditor --help.")
@LABELS
@click.option("--layer", help="Layer to compare; default: the one auditor layers suggests for the first version.")
@click.option("--rank", default=10, show_default=True, type=click.IntRange(min=1), help="Concepts per version.")
@click.option(
    "--refits", default=8, show_default=True, type=click.IntRange(min=5), help="Fits per version, for the null."
)
@LIMIT
@click.option("--honest", multiple=True, metavar="MODEL", help=HONEST_HELP)
@click.option("--no-reliance", is_flag=True, help="Do not measure what the classes of both versions hang on.")
@click.option("--report", type=click.Path(path_type=Path), help="Write the comparison as a page (HTML) here.")
@click.option("--out", type=click.Path(path_type=Path), help="Draw the comparison to this PNG.")
@SEED
@CLUSTER
@DEVICE
@PICKLE
@JSON
@reports_errors("there is no comparison")
def compare(
    model_a: str,
    model_b: str,
    data: str,
    labels: str | None,
    layer: str | None,
    rank: int,
    refits: int,
    limit: int | None,
    honest: tuple[str, ...],
    no_reliance: bool,
    report: Path | None,
    out: Path | None,
    seed: int,
    cluster: str | None,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Say what changed between two versions: concepts, deciding regions, and what their classes hang on."""
    from auditor.commands.terminal import Bar, as_text, say, waiting
    from auditor.data.source import open_data
    from auditor.plugins import load_subject
    from auditor.plugins.registry.honest_versions import honest_subjects, passed_before
    from auditor.plugins.registry.location import resolve
    from auditor.release.drift import compare as compare_versions
    from auditor.release.same_task import check_comparable
    from auditor.release.version_changes import version_changes
    from auditor.reports.drift_picture import drift_picture
    from auditor.reports.drift_report import write_drift_report
    from auditor.runners.cluster import counted_work

    source = open_data(data, limit=limit, seed=seed, labels=labels)
    with waiting(f"loading {model_a} and {model_b}"):
        versions = [resolve(uri) for uri in (model_a, model_b)]
        a, b = (load_subject(v, allow_pickle=allow_pickle or None) for v in versions)
        check_comparable(a, b)
        source.check_labels(a)
        earlier = passed_before(versions[1], versions[0], source.digest)
        others = honest_subjects(a, honest, earlier, allow_pickle=allow_pickle or None)
    options: dict[str, Any] = {"layer": layer, "rank": rank, "refits": refits, "seed": seed}
    with counted_work(cluster) as work, Bar() as bar:
        drift = compare_versions(a, b, source, honest=others, progress=bar, **options)
        changes = version_changes(a, b, source, seed=seed, reliance=not no_reliance, progress=bar)
    now_holds("the picture is not finished")
    names = (model_a, model_b)
    if out is not None:
        drift_picture(drift, out, names, changes.regions)
    if report is not None:
        write_drift_report(drift, changes, report, names)
    if as_json:
        about = {"changes": changes.to_json(), "images": source.sample.words, "words": drift.words()}
        say(as_text({**drift.to_json(), **about, **work}))
        return
    _show(drift, changes, source.sample.words)
    for what, path in (("picture", out), ("page", report)):
        if path is not None:
            say(f"{what} in {path}")


def _show(drift: Drift, changes: Changes, sample_words: str) -> None:
    from auditor.commands.terminal import say, table

    say(f"{drift.words()}; {sample_words}")
    top = [drift.classes[int(abs(row).argmax())] for row in drift.change]
    body = [
        [
            str(i),
            str(j),
            f"{s:.3f}",
            " ".join(word for word, hit in (("died", i in drift.died), ("born", j in drift.born)) if hit),
            f"{change[abs(change).argmax()]:+.3f}",
            name,
        ]
        for (i, j, s), change, name in zip(drift.matched, drift.change, top, strict=True)
    ]
    table(["concept A", "concept B", "similarity", "", "largest change", "for class"], body)
    table(["layer", "CKA"], [[name, f"{value:.3f}"] for name, value in drift.cka.items()])
    if changes.regions is not None:
        say(changes.regions.sentence())
    if changes.not_measured:
        say(f"what classes hang on was not compared: {changes.not_measured}")
    else:
        rows = [[c.name, f"{c.score[0]:.2f}", f"{c.score[1]:.2f}", *c.verdict, c.sentence] for c in changes.reliance]
        table(["class", "hangs on one thing, A", "B", "verdict A", "B", ""], rows)
