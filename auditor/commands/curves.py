"""``auditor curves``: one network by every optimizer, accuracy against epochs and wall clock."""

from __future__ import annotations

from pathlib import Path

import click

from auditor.commands.group import JSON, SEED, auditor, example, reports_errors


@auditor.command(
    epilog=example(
        "auditor curves",
        "auditor curves --data 'torchvision:MNIST?root=data' --hidden 128,128 --epochs 20 --out mnist.png",
    )
)
@click.option("--data", default="sklearn:digits", show_default=True, help="Images to train on; see auditor --help.")
@click.option("--test", help="Images to measure on; default: the set's test split, else the last fifth.")
@click.option(
    "--methods",
    help="Comma-separated; default: all of block-admm,block-admm-printed,gotmare,full-admm,taylor,bcd,dladmm,sgd,adam.",
)
@click.option("--hidden", default="64,64", show_default=True, help="Widths of the hidden layers.")
@click.option("--epochs", default=20, show_default=True, type=click.IntRange(min=1), help="Passes over the samples.")
@click.option("--loss", default="squared", show_default=True, type=click.Choice(["squared", "cross_entropy"]))
@click.option("--limit", type=click.IntRange(min=2), help="Train on N images, spread over the classes.")
@click.option("--size", type=click.IntRange(min=1), help="Side of the images; default: 8 for digits, else 28.")
@click.option("--out", default="curves.png", show_default=True, type=click.Path(path_type=Path), help="PNG to write.")
@SEED
@JSON
@reports_errors("no picture was written")
def curves(
    data: str,
    test: str | None,
    methods: str | None,
    hidden: str,
    epochs: int,
    loss: str,
    limit: int | None,
    size: int | None,
    out: Path,
    seed: int,
    as_json: bool,
) -> None:
    """Train one network by every optimizer and draw accuracy and residuals, by epoch and by wall clock, as a PNG."""
    from auditor.commands.terminal import Bar, as_text, note, numbers, say, table
    from auditor.errors import OptionError
    from auditor.training.learning_curves import curves_picture, learning_curves, open_arrays
    from auditor.training.optimizers import METHODS

    widths = [int(w) for w in numbers("--hidden", hidden) or []]
    if any(w < 1 for w in widths):
        raise OptionError(f"--hidden wants widths of at least 1, got {hidden!r}; for example --hidden 64,64.")
    chosen = [m.strip() for m in methods.split(",")] if methods else list(METHODS)
    train, held = open_arrays(data, test, limit, size)
    with Bar() as bar:
        results = learning_curves(
            train, held, methods=chosen, hidden=widths, epochs=epochs, loss=loss, seed=seed, progress=bar
        )
    shape = "-".join(str(w) for w in [train[0][0].numel(), *widths, int(train[1].max()) + 1])
    curves_picture(results, out, f"{data}, {len(train[0])} images, {shape}, {loss.replace('_', '-')} loss, seed {seed}")
    if as_json:
        say(as_text([curve.to_json() for curve in results]))
        return
    rows = [
        [
            c.method,
            str(len(c.accuracy)),
            f"{100 * c.accuracy[-1]:.2f}%" if c.accuracy else "-",
            f"{100 * max(c.accuracy):.2f}%" if c.accuracy else "-",
            f"{max(c.residuals[-1]):.1e}" if c.residuals and c.residuals[-1] else "-",
            f"{c.seconds[-1]:.1f}" if c.seconds else "-",
            "broke down" if c.stopped else "",
        ]
        for c in results
    ]
    table(["optimizer", "epochs", "test accuracy", "best", "worst residual", "seconds", ""], rows)
    for curve in results:
        if curve.stopped:
            note(curve.stopped)
    say(f"picture in {out}")
