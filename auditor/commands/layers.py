"""``auditor layers``: the layers that can be explained, and figures of those worth explaining."""

from __future__ import annotations

from typing import Any

import click

from auditor.commands.group import JSON, PICKLE, auditor, example, reports_errors


@auditor.command(
    epilog=example(
        "auditor layers models:/digits/1",
        "auditor layers models:/birds@champion --data photos/",
        "auditor layers models:/digits/1 --all",
    )
)
@click.argument("model")
@click.option("--data", help="Images on which candidates are measured; default: random images, which show cost only.")
@click.option("--all", "show_all", is_flag=True, help="Also the layers that cannot be explained, and why.")
@PICKLE
@JSON
@reports_errors("nothing was changed")
def layers(model: str, data: str | None, show_all: bool, allow_pickle: bool, as_json: bool) -> None:
    """List the layers of MODEL that can be explained, with shapes; candidates are measured and one is suggested."""
    from auditor.commands.terminal import as_text, say, table, waiting
    from auditor.data.source import open_data
    from auditor.plugins import load_subject

    source = None if data is None else open_data(data)
    with waiting(f"loading {model}"):
        subject = load_subject(model, allow_pickle=allow_pickle or None)
        every, measured = subject.layers(), _measured(subject, source)
    best = _suggested(subject, measured, source is not None)
    figures = {m.layer.name: m for m in measured}
    shown = [x for x in every if x.explainable or show_all]
    if as_json:
        say(as_text([{**_about(x), "suggested": x.name == best, **_figures(figures.get(x.name))} for x in shown]))
        return
    body = [[*_cells(x), *_words(figures.get(x.name)), _mark(x, best)] for x in shown]
    table(["layer", "type", "channels", "positions", "sign", "class kept", "locality", "cost", ""], body)
    on = "random images, which say nothing of faithfulness: give --data" if source is None else f"images of {data}"
    say(f"measured on {on}; cost: share of the network above the layer, per point of a path integral")


def _measured(subject: Any, source: Any) -> list[Any]:
    from auditor.explainers.layer_choice import measure_layers, random_images, some_images

    return measure_layers(subject, random_images(subject) if source is None else some_images(subject, source))


def _suggested(subject: Any, measured: list[Any], on_data: bool) -> str:
    """Return the layer a fit takes by default: the best on the data; by its form where there is none."""
    from auditor.explainers.layer_choice import best_layer

    by_form: str = subject.default_layer()
    return by_form if subject.names_its_layer or not on_data else best_layer(measured) or by_form


def _about(layer: Any) -> dict[str, Any]:
    return {k: getattr(layer, k) for k in ("name", "type", "shape", "nonnegative", "explainable", "reason")}


def _figures(measured: Any) -> dict[str, Any]:
    """Return the figures of a candidate for --json; nothing of other layers."""
    if measured is None:
        return {}
    if measured.reason:
        return {"measured": None, "problem": measured.reason}
    return {"measured": {k: getattr(measured, k) for k in ("faithfulness", "locality", "cost", "score")}}


def _words(measured: Any) -> list[str]:
    if measured is None or measured.reason:
        return ["", "", ""]
    return [f"{measured.faithfulness:.0%}", f"{measured.locality:.2f}", f"{measured.cost:.1%}"]


def _cells(layer: Any) -> list[str]:
    grid = f"{layer.layout.grid[0]} x {layer.layout.grid[1]}" if layer.layout else ""
    channels = str(layer.layout.channels) if layer.layout else ""
    return [layer.name, layer.type, channels, grid, "non-negative" if layer.nonnegative else "signed"]


def _mark(layer: Any, best: str) -> str:
    return "* suggested" if layer.name == best else ("" if layer.explainable else layer.reason)
