"""``auditor compare-maps``: one image by the methods people know, beside the explainers attached to the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auditor.commands.group import JSON, PICKLE, SEED, auditor, example, reports_errors

if TYPE_CHECKING:
    from auditor.auditing.map_comparison import MapComparison


@auditor.command(
    name="compare-maps",
    epilog=example(
        "auditor compare-maps models:/birds/1 finch.jpg --out maps.html",
        "auditor compare-maps models:/birds/1 finch.jpg --method Grad-CAM --method captum:DeepLift --target finch",
    ),
)
@click.argument("model")
@click.argument("image", type=click.Path(path_type=Path))
@click.option(
    "--method",
    "methods",
    multiple=True,
    metavar="NAME",
    help="A method; may be repeated. Default: LIME, SHAP, Grad-CAM, Grad-CAM++, guided backprop, integrated gradients, "
    "SmoothGrad, LRP-alpha-beta, deep Taylor, occlusion. Also captum:CLASS and zennit:COMPOSITE.",
)
@click.option("--explainers", multiple=True, metavar="NAME", help="Attached explainers; default: all; none for none.")
@click.option("--target", metavar="CLASS", help="Class to explain; default: the prediction.")
@click.option("--timeout-s", type=click.FloatRange(0, 600, min_open=True), help="Seconds for explainers that search.")
@click.option("--out", type=click.Path(path_type=Path), help="Page to write (.html).")
@SEED
@PICKLE
@JSON
@reports_errors("the maps are not finished")
def compare_maps(
    model: str,
    image: Path,
    methods: tuple[str, ...],
    explainers: tuple[str, ...],
    target: str | None,
    timeout_s: float | None,
    out: Path | None,
    seed: int,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Show relevance maps of one IMAGE side by side: LIME, SHAP, Grad-CAM, LRP and others beside MODEL's explainers.

    Each comes with its time and its pixel-flip area, the mean change of the class's probability while the least
    relevant cells turn to noise first; "gain" is by how much that is less than for random maps on this image.
    """
    from auditor.auditing.map_comparison import DEFAULT_METHODS
    from auditor.auditing.map_comparison import compare_maps as compare
    from auditor.commands.terminal import Bar, as_text, say, waiting
    from auditor.errors import DataError, OptionError
    from auditor.plugins import load_subject
    from auditor.plugins.registry.attachments import load, names
    from auditor.plugins.registry.location import resolve
    from auditor.subject.preprocessing import read_image

    if not image.is_file():
        raise DataError(f"image {image}: no such file; give the path of a PNG, JPEG or other image.")
    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise OptionError(f"--out {out}: the page is written as HTML; give a name that ends in .html.")
    with waiting(f"loading {model}"):
        import torch

        version = resolve(model, registered=True)
        subject = load_subject(version, allow_pickle=allow_pickle or None)
        pixels = torch.from_numpy(read_image(image, subject.preprocessing))
        loaded = {n: load(version, n, subject=subject) for n in _asked_for(explainers, names(version), version.label)}
    with Bar() as bar:
        options = {} if timeout_s is None else {"timeout_s": timeout_s}
        compared = compare(
            subject,
            pixels,
            loaded,
            methods=methods or DEFAULT_METHODS,
            target=target,
            options=options,
            seed=seed,
            progress=bar,
        )
    if out is not None:
        from auditor.reports.maps_page import write_maps_page

        write_maps_page(compared, subject, out, f"{image.name} by {len(compared.maps)} methods, {version.label}")
    if as_json:
        head = {"model": version.label, "image": str(image), "seed": seed}
        say(as_text({**head, **_document(compared, subject.class_names)}))
        return
    _show(compared, subject.class_names[compared.target])
    say(f"page in {out}" if out is not None else "the maps themselves: --out maps.html")


def _asked_for(explainers: tuple[str, ...], attached: Sequence[str], label: str) -> list[str]:
    """Return which of the attached explainers take part: all when none is named."""
    from auditor.errors import OptionError

    unknown = [n for n in explainers if n not in attached and n != "none"]
    if unknown:
        has = ", ".join(attached) or "nothing"
        raise OptionError(f"--explainers {unknown[0]}: {label} has {has} attached; none leaves all out.")
    return [n for n in attached if n in explainers or not explainers]


def _document(compared: MapComparison, class_names: Sequence[str]) -> dict[str, Any]:
    return {
        "random_area": compared.random_area,
        "prediction": class_names[compared.prediction],
        "target": class_names[compared.target],
        "probability": compared.probability,
        "maps": [m.to_json() for m in compared.maps],
    }


def _show(compared: MapComparison, target: str) -> None:
    from auditor.commands.terminal import say, table

    order = sorted(compared.maps, key=lambda m: (m.heat is None, m.flip_area if m.heat is not None else 0.0))
    body = [
        [m.name + (f" ({m.kind})" if m.kind else ""), f"{m.flip_area:.4f}", f"{m.flip_gain:+.4f}", f"{m.seconds:.2f}"]
        for m in order
        if m.heat is not None
    ]
    table(["map", "pixel-flip area", "gain over random", "seconds"], body)
    say(*(f"{m.name}: {m.problem}" for m in order if m.heat is None))
    say(f"class {target}, probability {compared.probability:.1%}; random maps leave {compared.random_area:.4f}")
