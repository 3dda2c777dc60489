"""Commands about the model itself: its layers, and what others need to use it."""

from __future__ import annotations

from pathlib import Path

import click

from auditor.commands.group import JSON, PICKLE, auditor, example, tells


@auditor.command(epilog=example("auditor layers models:/digits/1", "auditor layers models:/digits/1 --all"))
@click.argument("model")
@click.option("--all", "show_all", is_flag=True, help="Also the layers that cannot be explained, and why.")
@PICKLE
@JSON
@tells
def layers(model: str, show_all: bool, allow_pickle: bool, as_json: bool) -> None:
    """List the layers of MODEL that can be explained, with shapes; the suggested one is marked."""
    from auditor.plugins import load_subject
    from auditor.commands.terminal import as_text, say, table, waiting

    with waiting(f"loading {model}"):
        subject = load_subject(model, allow_pickle=allow_pickle or None)
        found, best = subject.layers(), subject.default_layer()
    if as_json:
        keys = ("name", "type", "shape", "nonnegative", "explainable", "reason")
        rows = [{**{k: getattr(x, k) for k in keys}, "suggested": x.name == best} for x in found]
        say(as_text(rows if show_all else [r for r in rows if r["explainable"]]))
        return
    body = []
    for x in found:
        if x.explainable or show_all:
            mark = "* suggested" if x.name == best else ("" if x.explainable else x.reason)
            grid = f"{x.layout.grid[0]} x {x.layout.grid[1]}" if x.layout else ""
            channels = str(x.layout.channels) if x.layout else ""
            body.append([x.name, x.type, channels, grid, "non-negative" if x.nonnegative else "signed", mark])
    table(["layer", "type", "channels", "positions", "sign", ""], body)


@auditor.command(
    epilog=example("auditor describe models:/m/1 --classes names.txt --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225")
)
@click.argument("model")
@click.option("--classes", type=click.Path(path_type=Path), help="File with one class name per line.")
@click.option("--mean", help="Mean of pixels in [0, 1], one number or one per channel, with commas.")
@click.option("--std", help="Standard deviation, likewise.")
@click.option("--size", help="Input size in pixels: HEIGHT,WIDTH or one number.")
@click.option("--resize", type=click.Choice(["stretch", "crop"]), help="How images of other sizes are brought to size.")
@PICKLE
@JSON
@tells
def describe(
    model: str,
    classes: Path | None,
    mean: str | None,
    std: str | None,
    size: str | None,
    resize: str | None,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Record class names, input size, mean and std with a version, so that nobody has to repeat them."""
    from auditor.plugins import describe as describe_version
    from auditor.commands.terminal import as_text, numbers, read_names, say, waiting

    with waiting(f"describing {model}"):
        notes = describe_version(
            model,
            class_names=read_names(classes) if classes else None,
            mean=numbers("--mean", mean),
            std=numbers("--std", std),
            size=[int(n) for n in numbers("--size", size) or []] or None,
            resize=resize,
            allow_pickle=allow_pickle or None,
        )
    say(as_text(notes) if as_json else f"{model} now carries: {as_text(notes)}")
