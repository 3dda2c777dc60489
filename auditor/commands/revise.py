"""``auditor revise``: a version without what the model should not rely on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from auditor.commands.group import (
    DATA_HELP,
    JSON,
    LABELS,
    LIMIT,
    PICKLE,
    SEED,
    SIGN_KEY,
    auditor,
    example,
    now_holds,
    reports_errors,
)

if TYPE_CHECKING:
    from torch import Tensor

    from auditor.explainers.base import Explainer
    from auditor.plugins.registry.location import ModelVersion
    from auditor.subject.subject import Subject


@auditor.command(
    epilog=example(
        "auditor revise models:/birds/1 --explainer concepts --remove concepts:0,1,2 --data photos/ --register",
        "auditor revise models:/birds/1 --remove texture:4 --data photos/         # concept 4 of explainer texture",
        "auditor revise models:/birds/1 --remove group:1 --refit-head --data photos/ --register",
    )
)
@click.argument("model")
@click.option(
    "--remove", required=True, metavar="WHAT", help="concepts:0,1,2, NAME:0,1,2 or group:1 (see auditor concepts)."
)
@click.option("--data", required=True, help=DATA_HELP)
@LABELS
@click.option("--explainer", "name", help="Whose concepts; default: the one attached that has directions.")
@click.option(
    "--refit-head/--no-refit-head",
    default=None,
    help="Refit what is above the layer on images without, or with swapped, spots; default: if that is better.",
)
@click.option("--register", is_flag=True, help="Register the revised network as a new version, and audit it.")
@click.option("--no-audit", is_flag=True, help="Register it without its audit.")
@LIMIT
@SEED
@PICKLE
@SIGN_KEY
@JSON
@reports_errors("nothing was registered")
def revise(
    model: str,
    remove: str,
    data: str,
    labels: str | None,
    name: str | None,
    refit_head: bool | None,
    register: bool,
    no_audit: bool,
    limit: int | None,
    seed: int,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Take concepts out of MODEL, and show what every class relies on before and after."""
    from auditor.commands.terminal import Bar, as_text, command_line, note, say, table, waiting
    from auditor.data.source import open_data
    from auditor.plugins import load_subject, run_audit
    from auditor.plugins.registry.lineage import register_repair
    from auditor.plugins.registry.location import resolve
    from auditor.release.repair import compared, repair

    name, remove = of_explainer(remove, name)
    source = open_data(data, limit=limit, seed=seed, labels=labels)
    version = resolve(model, registered=True)
    with waiting(f"loading {model}"):
        subject = load_subject(version, allow_pickle=allow_pickle or None)
        explainer = _explainer(version, subject, name)
    concepts = removed(remove, explainer)
    registered = None
    with Bar() as bar:
        done = repair(subject, explainer, concepts, source, refit_head=refit_head, seed=seed, progress=bar)
        rows = compared(subject, done, source, seed=seed, progress=bar)
        if register:
            registered = register_repair(done, explainer, version, subject=subject)
            now_holds(f"the revised network is registered as {registered}, its audit is not finished")
    if registered and not no_audit:
        with Bar() as bar:
            run_audit(registered, source, progress=bar, command=command_line())
    answer = {"model": version.label, "layer": done.layer, "removed": concepts, "refitted": bool(done.weights)}
    answer |= {"change": done.words, "held_out": done.held_out}
    if as_json:
        say(as_text({**answer, "registered": registered, "classes": rows}))
        return
    say(f"{explainer.name}, layer {done.layer}: {done.words}")
    if done.helps:
        say(done.helps)
    head = list(rows[0])
    table(head, [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows])
    if registered:
        say(f"registered as {registered}" + ("" if no_audit else ", with its audit"))
    else:
        note("auditor: nothing was registered; add --register to keep it")


def of_explainer(text: str, name: str | None) -> tuple[str | None, str]:
    """Return whose concepts are meant, and which: ``texture:4`` is ``concepts:4`` of the explainer ``texture``.

    >>> of_explainer("texture:4", None), of_explainer("group:1", None)
    (('texture', 'concepts:4'), (None, 'group:1'))
    """
    what, colon, rest = text.partition(":")
    if not colon or name is not None or what in ("concepts", "group"):
        return name, text
    return what, f"concepts:{rest}"


def removed(text: str, explainer: Explainer) -> list[int]:
    """Return the concepts that ``concepts:0,1,2`` or ``group:1`` names."""
    from auditor.errors import OptionError

    what, _, rest = text.partition(":")
    try:
        numbers = [int(part) for part in rest.split(",")]
    except ValueError:
        numbers = []
    if what not in ("concepts", "group") or not numbers or min(numbers) < 0:
        raise OptionError(f"--remove wants concepts:0,1,2 or group:1, got {text!r}.")
    if what == "concepts":
        return numbers
    parts = explainer.groups
    if max(numbers) >= len(parts):
        raise OptionError(
            f"--remove {text}: {explainer.name} has groups 0 to {len(parts) - 1}; auditor concepts shows them."
        )
    return sorted(k for number in numbers for k in parts[number])


def _explainer(version: ModelVersion, subject: Subject, name: str | None) -> Any:
    from auditor.errors import OptionError
    from auditor.plugins.registry.attachments import load
    from auditor.plugins.registry.audits import attached_explainers

    if name is not None:
        return load(version, name, subject=subject)
    usable = {
        k: e for k, e in attached_explainers(version, subject)[0].items() if _has_directions(e.concept_directions())
    }
    if len(usable) != 1:
        names = ", ".join(sorted(usable)) or "none"
        raise OptionError(
            f"revise: {version.label} has {len(usable)} explainers whose concepts can be taken out ({names}); name one "
            "with --explainer, or fit one whose concepts are directions of a layer."
        )
    return next(iter(usable.values()))


def _has_directions(directions: Tensor | None) -> bool:
    return directions is not None
