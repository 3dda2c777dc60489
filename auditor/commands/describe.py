"""``auditor describe``: class names, preprocessing and the meaning of outputs that travel with a version."""

from __future__ import annotations

from pathlib import Path

import click

from auditor.commands.group import JSON, PICKLE, SIGN_KEY, auditor, example, reports_errors

OUTPUTS = ("logits", "softmax", "log-softmax", "sigmoid", "multilabel")  # as auditor.subject.outputs has them


@auditor.command(
    epilog=example("auditor describe models:/m/1 --classes names.txt --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225")
)
@click.argument("model")
@click.option("--classes", type=click.Path(path_type=Path), help="File with one class name per line.")
@click.option("--mean", help="Mean of pixels in [0, 1], one number or one per channel, with commas.")
@click.option("--std", help="Standard deviation, likewise.")
@click.option("--size", help="Input size in pixels: HEIGHT,WIDTH or one number.")
@click.option(
    "--resize",
    metavar="RULE",
    help="How images of other sizes are brought to size: stretch, crop, or crop-256 to scale the short side to 256 "
    "before; -bicubic or another interpolation may follow.",
)
@click.option(
    "--output",
    type=click.Choice(OUTPUTS),
    help="What the model puts out. Without it a pass detects a softmax, log-softmax or sigmoid at the model's end, "
    "which is left out to have its logits; multilabel: several labels may be true of one image.",
)
@PICKLE
@SIGN_KEY
@JSON
@reports_errors("nothing was recorded")
def describe(
    model: str,
    classes: Path | None,
    mean: str | None,
    std: str | None,
    size: str | None,
    resize: str | None,
    output: str | None,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Record class names, input size, mean, std and the meaning of outputs with a version, once for all its users.

    A model with one logit takes two class names: the second by the logit, the first by its negative.
    """
    from auditor.commands.terminal import as_text, note, numbers, read_names, say, waiting
    from auditor.plugins import describe as describe_version

    with waiting(f"describing {model}"):
        notes = describe_version(
            model,
            class_names=read_names(classes) if classes else None,
            mean=numbers("--mean", mean),
            std=numbers("--std", std),
            size=[int(n) for n in numbers("--size", size) or []] or None,
            resize=resize,
            output=output,
            allow_pickle=allow_pickle or None,
        )
    if as_json:
        say(as_text(notes))
        return
    evidence, changed = notes.pop("output_evidence"), notes.pop("changed")
    if changed:
        changed_parts = " and ".join(changed)
        note(f"auditor: other {changed_parts} than before; explainers and audits from before no longer count.")
    say(f"{model} now carries: {as_text(notes)}", f"output {notes['output']}: {evidence}.")
