"""``auditor tcav``: does a class's logit rise with a concept that a person, or an explainer, gives in images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from auditor.commands.group import JSON, LABELS, LIMIT, PICKLE, SEED, auditor, example, reports_errors


@auditor.command(
    epilog=example(
        "auditor tcav models:/birds/1 --layer features.12 --concept stripes=stripes/ --random textures/ --data photos/",
        "auditor tcav models:/birds/1 --concept concepts:3 --concept concepts:5 --data photos/ --out tcav.png",
    )
)
@click.argument("model")
@click.option("--data", required=True, help="Images of the classes; see auditor --help.")
@click.option(
    "--concept",
    "given",
    multiple=True,
    required=True,
    metavar="NAME=DATA",
    help="Images that show a concept, or EXPLAINER:K for the top images in --data of concept K of an attached "
    "explainer; may be repeated.",
)
@click.option("--random", help="Pool of random images; default: images of --data that are not the concept's own.")
@click.option("--layer", help="Layer whose activations are read; default: the suggested one.")
@click.option("--target", "targets", multiple=True, metavar="CLASS", help="A class; default: all with 10 images.")
@click.option("--runs", default=20, show_default=True, type=click.IntRange(min=3), help="Random sets, one vector each.")
@click.option("--images", default=100, show_default=True, type=click.IntRange(min=10), help="Images per class at most.")
@click.option("--top", default=40, show_default=True, type=click.IntRange(min=10), help="Top images of EXPLAINER:K.")
@click.option("--out", type=click.Path(path_type=Path), help="Picture to write (.png): concepts x classes.")
@LABELS
@LIMIT
@SEED
@PICKLE
@JSON
@reports_errors("there are no scores")
def tcav(
    model: str,
    data: str,
    given: tuple[str, ...],
    random: str | None,
    layer: str | None,
    targets: tuple[str, ...],
    runs: int,
    images: int,
    top: int,
    out: Path | None,
    labels: str | None,
    limit: int | None,
    seed: int,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Measure for which classes of MODEL a concept counts, with concept activation vectors against random sets.

    A score is the share of a class's images whose logit rises with the concept. It is significant where it differs from
    that of random concepts by a t-test over the runs, corrected for the number of concepts and classes.
    """
    from auditor.commands.terminal import Bar, as_text, say, waiting
    from auditor.data.source import open_data
    from auditor.metrics.tcav import tcav as measure
    from auditor.plugins import load_subject
    from auditor.plugins.registry.location import resolve

    source = open_data(data, limit=limit, seed=seed, labels=labels)
    with waiting(f"loading {model}"):
        version = resolve(model)
        subject = load_subject(version, allow_pickle=allow_pickle or None)
    with Bar() as bar:
        concepts, others = _concepts(given, version, subject, source, top, bar)
        pool = others if random is None else open_data(random, seed=seed)
        result = measure(
            subject,
            layer or subject.default_layer(),
            concepts,
            pool,
            source,
            targets=list(targets) or None,
            runs=runs,
            images=images,
            seed=seed,
            progress=bar,
        )
    if out is not None:
        from auditor.reports.tcav_picture import tcav_picture

        tcav_picture(result, out)
    if as_json:
        say(as_text({"model": version.label, "data": data, "seed": seed, **result.to_json()}))
    else:
        _show(result)
        if out is not None:
            say(f"picture in {out}")


def _show(result: Any) -> None:
    from auditor.commands.terminal import say, table

    body = [
        [
            row.concept,
            row.label,
            f"{row.score:.2f} ± {row.spread:.2f}",
            f"{row.random_score:.2f}",
            f"{row.p_corrected:.3g}",
            "*" if row.is_significant else "",
        ]
        for row in result.rows
    ]
    table(["concept", "class", "score", "random", "p (corrected)", ""], body)
    say(f"layer {result.layer}, {result.runs} random sets of {result.set_size} images; * differs from random concepts")
    say(*result.remarks, *(f"class {k}: skipped, {why}" for k, why in result.skipped.items()))


def _concepts(
    given: tuple[str, ...], version: Any, subject: Any, source: Any, top: int, progress: Any
) -> tuple[dict[str, Any], Any]:
    """Return the images of every concept by name, and those of the data that show none of the explainers' concepts."""
    from auditor.data.source import open_data
    from auditor.errors import OptionError
    from auditor.explainers.top_images import top_images
    from auditor.plugins import load

    concepts: dict[str, Any] = {}
    shown: Any = None  # images of the data that show one of the explainers' concepts
    for text in given:
        name, sign, folder = text.partition("=")
        if sign and name and folder:
            concepts[name] = open_data(folder)
            continue
        name, sign, number = text.partition(":")
        if not sign or not number.isdecimal():
            raise OptionError(f"--concept wants NAME=DATA or EXPLAINER:K, got {text!r}; for example stripes=stripes/.")
        explainer = load(version, name, subject=subject)
        is_top = top_images(explainer, subject, source, int(number), top, progress)
        shown = is_top if shown is None else shown | is_top
        concepts[f"{name}:{number} {explainer.label(int(number))}"] = source.only(is_top)
    return concepts, source if shown is None else source.only(~shown)
