"""``auditor train``: a registered model or a small network, trained by any of the optimizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auditor.commands.group import JSON, LIMIT, PICKLE, SEED, auditor, example, now_holds, reports_errors

if TYPE_CHECKING:
    from torch import nn

    from auditor.subject.subject import Subject
    from auditor.training.training_runs import Arrays


@auditor.command(
    epilog=example(
        "auditor train mlp:128,128 --data sklearn:digits --seeds 3 --register --name digits-admm",
        "auditor train mlp:64,64 --data sklearn:digits --optimizer dladmm --constraint orthonormal-rows",
        "auditor train models:/digits/1 --data sklearn:digits --cuts features --optimizer block-admm --register",
        "auditor train cnn --data 'torchvision:MNIST?root=data' --optimizer adam --set lr=0.001",
    )
)
@click.argument("model")
@click.option("--data", required=True, help="Images to train on; see auditor --help.")
@click.option("--test", help="Images to measure on; default: the set's test split, else a fifth of the data.")
@click.option("--optimizer", default="block-admm", show_default=True, help="See auditor curves --help for all.")
@click.option("--constraint", help="Of every weight matrix but the last, by dladmm: orthonormal-rows, unit-rows, …")
@click.option("--cuts", help="Layers at which a registered model is cut; default: the one it is explained at.")
@click.option("--epochs", default=20, show_default=True, type=click.IntRange(min=1), help="Passes over the samples.")
@click.option("--seeds", default=1, show_default=True, type=click.IntRange(1, 100), help="Runs, from --seed on.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="An option of the optimizer.")
@click.option("--size", type=click.IntRange(min=1), help="Side of the images of a small network.")
@click.option("--register", is_flag=True, help="Register the first seed's network, with its lineage and curves.")
@click.option("--name", help="Name to register a small network under; default: the architecture's.")
@click.option(
    "--out", default="train.png", show_default=True, type=click.Path(path_type=Path), help="PNG of the curves."
)
@LIMIT
@SEED
@PICKLE
@JSON
@reports_errors("nothing was registered")
def train(
    model: str,
    data: str,
    test: str | None,
    optimizer: str,
    constraint: str | None,
    cuts: str | None,
    epochs: int,
    seeds: int,
    settings: tuple[str, ...],
    size: int | None,
    register: bool,
    name: str | None,
    out: Path,
    limit: int | None,
    seed: int,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Train MODEL, a registered model or mlp:WIDTHS, cnn or resnet20, and register what comes out.

    Curves are those of the test images: the mean of all seeds with a band of one standard deviation.
    """
    from auditor.commands.terminal import Bar, as_text, note, parse_settings, say, waiting
    from auditor.training.learning_curves import band, band_picture
    from auditor.training.training_runs import train_seeds, training_settings

    options = training_settings(optimizer, parse_settings(settings), constraint, 10**6)
    opened = _registered if model.startswith(("models:/", "runs:/")) else _small
    make, finish, arrays, held, source = opened(model, data, test, cuts, limit, size, allow_pickle)
    options = training_settings(optimizer, parse_settings(settings), constraint, len(arrays[1]))
    runs = range(seed, seed + seeds)
    with Bar() as bar:
        blocks, curves = train_seeds(make, arrays, held, optimizer, epochs, runs, options, bar)
    for curve in curves:
        if curve.stopped:
            note(curve.stopped)
    words = f"trained by {optimizer}" + (f" with {constraint} weights" if constraint else "")
    words += f" on {data}, {len(arrays[1])} images, {epochs} epochs, seeds {runs[0]} to {runs[-1]}"
    band_picture(curves, out, f"{model}, {words}")
    registered = None
    if register:
        with waiting("registering the network"):
            registered = finish(blocks, source, name, words, [c.accuracy for c in curves], out)
        now_holds(f"the network is registered as {registered}")
    mean, spread = band(curves)
    if as_json:
        result = {"accuracy": mean[-1:], "deviation": spread[-1:], "registered": registered, "picture": str(out)}
        say(as_text({**result, "settings": options, "curves": [c.to_json() for c in curves]}))
        return
    last = f"{100 * mean[-1]:.2f}% +- {100 * spread[-1]:.2f}" if mean else "no epoch was finished"
    say(f"{model} {words}: {last} on {len(held[1])} test images")
    if registered:
        say(f"registered as {registered}")
    say(f"picture in {out}")


Make = Callable[[int], "list[nn.Module]"]
Opened = tuple[Make, Callable[..., str], "Arrays", "Arrays", "Subject | None"]


def _small(
    spec: str, data: str, test: str | None, cuts: str | None, limit: int | None, size: int | None, _pickle: bool
) -> Opened:
    """Return what trains a small architecture, and what registers it."""
    from auditor.errors import OptionError
    from auditor.subject.preprocessing import Preprocessing
    from auditor.training.architectures import architecture
    from auditor.training.training_runs import open_pixels

    arch = architecture(spec)
    if cuts is not None:
        raise OptionError(f"--cuts are of a registered model; {spec} has its own blocks.")
    side = size or (8 if data.startswith("sklearn:digits") else arch.side)
    shape = (arch.channels, side, side)
    arrays, held, names = open_pixels(data, test, limit, Preprocessing.of(shape, None, None, "stretch"))

    def finish(blocks: list[Any], _source: Any, name: str | None, words: str, curves: list[Any], out: Path) -> str:
        from torch import nn

        from auditor import Subject
        from auditor.plugins.registry.lineage import register_trained

        made = Subject(nn.Sequential(*blocks).eval(), input_shape=shape, class_names=names, resize="stretch")
        title = name or spec.replace(":", "-").replace(",", "-")
        return register_trained(
            made, None, title, source_digest="", change=f"{spec} {words}", curves=curves, picture=out
        )

    return (lambda seed: arch.make(shape, len(names), seed)), finish, arrays, held, None


def _registered(
    uri: str, data: str, test: str | None, cuts: str | None, limit: int | None, size: int | None, allow_pickle: bool
) -> Opened:
    """Return what trains a registered model in blocks, and what registers it as the next version."""
    from auditor.commands.terminal import waiting
    from auditor.errors import OptionError
    from auditor.network.network_blocks import split
    from auditor.plugins import load_subject
    from auditor.plugins.registry.location import resolve
    from auditor.training.training_runs import open_pixels

    if size is not None:
        raise OptionError("--size is of a small network; a registered model takes its images as it does.")
    version = resolve(uri, registered=True)
    with waiting(f"loading {uri}"):
        subject = load_subject(version, allow_pickle=allow_pickle or None)
    names = [text.strip() for text in cuts.split(",")] if cuts else [subject.default_layer()]
    split(subject, names)  # refused now, not after reading the images
    pre, digest = subject.preprocessing, subject.digest  # before other weights stand in the module
    arrays, held, _ = open_pixels(data, test, limit, pre, lambda source: source.check_labels(subject))

    def finish(blocks: list[Any], source: Any, name: str | None, words: str, curves: list[Any], out: Path) -> str:
        from auditor.network.trained_twin import trained_weights, with_weights
        from auditor.plugins.registry.lineage import register_trained

        with with_weights(source, trained_weights(blocks)) as made:
            return register_trained(
                made, version, version.name, source_digest=digest, change=f"cut at {', '.join(names)}, {words}",
                curves=curves, picture=out,
            )  # fmt: skip

    return (lambda _seed: split(subject, names)), finish, arrays, held, subject
