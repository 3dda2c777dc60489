"""``auditor fidelity``: do single units of a layer stand for attributes that the model was never trained on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from auditor.commands.group import JSON, LABELS, LIMIT, PICKLE, SEED, auditor, example, reports_errors

if TYPE_CHECKING:
    from auditor.explainers.tree.layer_fidelity import LayerFidelity


@auditor.command(
    epilog=example(
        "auditor fidelity models:/birds/1 --layer features.12 --data photos/ --attributes a.csv --out units.html",
    )
)
@click.argument("model")
@click.option("--data", required=True, help="Images to measure on; see auditor --help.")
@click.option(
    "--attributes",
    required=True,
    type=click.Path(path_type=Path),
    help="CSV: image or class name first, then one number per attribute; above --threshold means yes.",
)
@click.option("--layer", help="Layer whose units are quantised; default: the suggested one.")
@click.option("--bits", default=4, show_default=True, type=click.IntRange(1, 8), help="Bits of a unit's codes.")
@click.option("--threshold", default=50.0, show_default=True, help="Numbers above it mean that an attribute is there.")
@click.option("--out", type=click.Path(path_type=Path), help="Page with pictures to write (.html).")
@LABELS
@LIMIT
@SEED
@PICKLE
@JSON
@reports_errors("nothing was measured")
def fidelity(
    model: str,
    data: str,
    attributes: Path,
    layer: str | None,
    bits: int,
    threshold: float,
    out: Path | None,
    labels: str | None,
    limit: int | None,
    seed: int,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Measure how well single units of a layer of MODEL predict attributes: d_D with F1, accuracy and distance.

    The best unit and code is chosen on the images it is scored on, as in the paper; "honest" chooses on one half of the
    images and scores on the other. The floor is what a constant unit reaches: a score near it says nothing.
    """
    from auditor.commands.terminal import Bar, as_text, say, waiting
    from auditor.data.source import open_data
    from auditor.errors import OptionError
    from auditor.explainers.tree.fidelity_page import write_fidelity_page
    from auditor.explainers.tree.layer_fidelity import layer_fidelity
    from auditor.plugins import load_subject
    from auditor.plugins.registry.location import resolve

    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise OptionError(f"--out {out}: the page is written as HTML; give a name that ends in .html.")
    source = open_data(data, limit=limit, seed=seed, labels=labels)
    with waiting(f"loading {model}"):
        version = resolve(model)
        subject = load_subject(version, allow_pickle=allow_pickle or None)
    with Bar() as bar:
        result = layer_fidelity(
            subject,
            source,
            layer or subject.default_layer(),
            attributes,
            bits=bits,
            threshold=threshold,
            seed=seed,
            progress=bar,
        )
    if out is not None:
        write_fidelity_page(result, subject, source, out, version.label)
    if as_json:
        say(as_text({"model": version.label, "data": data, "seed": seed, **result.to_json()}))
        return
    _show(result)
    say(f"page in {out}" if out is not None else "with pictures: --out units.html")


def _show(result: LayerFidelity) -> None:
    from auditor.commands.terminal import say, table

    order = sorted(range(len(result.names)), key=lambda i: -result.by_f1.per_attribute[i])
    body = [
        [result.names[i], f"{result.frequency[i]:.2f}", f"{result.by_f1.per_attribute[i]:.3f}", result.unit_words(i)]
        for i in order
    ]
    table(["attribute", "frequency", "F1", "stands for it"], body)
    for name, f in (("F1", result.by_f1), ("accuracy", result.by_accuracy), ("distance", result.by_distance)):
        say(
            f"d_D by {name}: {f.score:.3f} (floor {f.floor:.3f}); chosen on one half, scored on the other: "
            f"{f.honest:.3f} (floor {f.honest_floor:.3f})"
        )
    say(f"layer {result.layer}: {result.units} units of {result.bits} bits on {result.images} images")
    if result.by_f1.n_constant:
        say(f"{result.by_f1.n_constant} attributes do not vary on these images and are left out")
