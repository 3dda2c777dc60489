"""The comparison of two versions."""

from __future__ import annotations

from pathlib import Path

import click

from auditor.commands.group import JSON, PICKLE, SEED, auditor, example, tells


@auditor.command(
    epilog=example("auditor compare models:/digits/1 models:/digits/2 --data sklearn:digits --out drift.png")
)
@click.argument("model_a", metavar="MODEL")
@click.argument("model_b", metavar="MODEL")
@click.option("--data", required=True, help="Images that both versions look at; see auditor --help.")
@click.option("--layer", help="Layer to compare; default: the one auditor layers suggests for the first version.")
@click.option("--rank", default=10, show_default=True, type=click.IntRange(min=1), help="Concepts per version.")
@click.option(
    "--refits", default=8, show_default=True, type=click.IntRange(min=5), help="Fits per version, for the null."
)
@click.option("--limit", type=click.IntRange(min=1), help="Use the first N images only.")
@click.option("--out", type=click.Path(path_type=Path), help="Draw the comparison to this PNG.")
@SEED
@PICKLE
@JSON
@tells
def compare(
    model_a: str,
    model_b: str,
    data: str,
    layer: str | None,
    rank: int,
    refits: int,
    limit: int | None,
    out: Path | None,
    seed: int,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Tell whether the concepts of two versions differ by more than re-fitting noise, and which ones."""
    from auditor.data.source import open_data
    from auditor.release.drift import check_comparable
    from auditor.release.drift import compare as compare_versions
    from auditor.reports.drift_picture import drift_picture
    from auditor.plugins import load_subject
    from auditor.commands.terminal import Bar, as_text, say, table, waiting

    source = open_data(data, limit=limit)
    with waiting(f"loading {model_a} and {model_b}"):
        a, b = (load_subject(uri, allow_pickle=allow_pickle or None) for uri in (model_a, model_b))
    check_comparable(a, b)
    with Bar() as bar:
        found = compare_versions(a, b, source, layer=layer, rank=rank, refits=refits, seed=seed, progress=bar)
    if out is not None:
        drift_picture(found, out, (model_a, model_b))
    if as_json:
        say(as_text(found.to_json()))
        return
    verdict = "DRIFT" if found.drift else "no drift"
    say(
        f"{verdict}: similarity {found.similarity:.3f}; re-fitting the same version explains down to "
        f"{found.null_low:.3f} (p = {found.p_value:.3f}, {found.n_images} images, layer {found.layers[0]})"
    )
    top = [found.classes[int(abs(row).argmax())] for row in found.change]
    body = [
        [
            str(i),
            str(j),
            f"{s:.3f}",
            " ".join(word for word, hit in (("died", i in found.died), ("born", j in found.born)) if hit),
            f"{change[abs(change).argmax()]:+.3f}",
            name,
        ]
        for (i, j, s), change, name in zip(found.matched, found.change, top, strict=True)
    ]
    table(["concept A", "concept B", "similarity", "", "largest change", "for class"], body)
    table(["layer", "CKA"], [[name, f"{value:.3f}"] for name, value in found.cka.items()])
    if out is not None:
        say(f"picture in {out}")
