"""``auditor study``: a study with people, from drawing it to what it found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from auditor.commands.group import JSON, LABELS, LIMIT, PICKLE, SEED, auditor, example, now_holds, reports_errors

ANSWERS = click.option(
    "--answers",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="AUDITOR_STUDY_ANSWERS",
    help="File of the answers (SQLite).  [default: study-NAME-DIGEST.db here; env: AUDITOR_STUDY_ANSWERS]",
)
STUDY = click.argument("study")


@auditor.group(
    epilog=example(
        "auditor study new models:/birds/3 --data photos/ --conditions none,one-heatmap,xnn --name birds",
        "auditor study plan models:/birds/3#birds --difference 0.1",
        "auditor study serve models:/birds/3#birds --links 30",
        "auditor study results models:/birds/3#birds --report results.html",
    )
)
def study() -> None:
    """Find out with people whether explanations help: draw a study, serve it, read its results.

    STUDY is the folder that `study new` wrote, or MODEL#NAME for one attached to a version (models:/birds/3#birds).
    """


@study.command(
    epilog=example(
        "auditor study new models:/birds/3 --data photos/ --conditions none,one-heatmap,xnn --name birds",
        "auditor study new models:/birds/3 --data photos/ --also models:/digits/1 sklearn:digits "
        "--conditions none,one-heatmap,xnn",
    )
)
@click.argument("model")
@click.option("--data", "data", multiple=True, required=True, help="Images to draw from; may be repeated.")
@click.option("--also", nargs=2, multiple=True, metavar="MODEL DATA", help="A further data set, of another model.")
@click.option("--conditions", default="none,one-heatmap", show_default=True, help="none, one-heatmap, explainers.")
@click.option("--name", default="study", show_default=True, help="Name under which it is attached.")
@click.option("--names", help="Names of the data sets, with commas between; default: from their paths.")
@click.option(
    "--classes",
    default="alike",
    show_default=True,
    help="alike (most alike to the model), random, or names with commas between; one list for every data set, with ;.",
)
@click.option("--n-classes", default=4, show_default=True, help="Classes per data set, and groups to make.")
@click.option("--per-batch", default=10, show_default=True, help="Images per batch.")
@click.option("--sets", default=5, show_default=True, help="Sets of images drawn beforehand, per data set.")
@click.option(
    "--order", type=click.Choice(["latin", "seed"]), default="latin", show_default=True, help="Balance, or chance."
)
@click.option("--texts", type=click.Path(path_type=Path), help="TOML with title, welcome, consent, [[questions]].")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the study.  [default: study-NAME]")
@click.option("--attach/--no-attach", default=True, show_default=True, help="Attach it to the model version.")
@LABELS
@LIMIT
@SEED
@PICKLE
@JSON
@reports_errors("no study was drawn")
def new(
    model: str,
    data: tuple[str, ...],
    also: tuple[tuple[str, str], ...],
    name: str,
    names: str | None,
    classes: str,
    texts: Path | None,
    out: Path | None,
    attach: bool,
    labels: str | None,
    limit: int | None,
    seed: int,
    allow_pickle: bool,
    as_json: bool,
    conditions: str,
    **numbers: Any,
) -> None:
    """Draw a study from MODEL: what participants see is rendered now, so serving it needs no model.

    Conditions are none (the images alone), one-heatmap (of the predicted class, by excitation backprop) and the names
    of attached explainers. Images are drawn by what the model predicts; see docs/studies.md.
    """
    from auditor.commands.terminal import Bar, as_text, say
    from auditor.data.source import open_data
    from auditor.plugins.registry.studies import Wanted, new_study
    from auditor.study.design import checked_config
    from auditor.study.orders import words
    from auditor.study.texts import read_texts

    chosen = tuple(part.strip() for part in conditions.split(",") if part.strip())
    config = checked_config(name=name, conditions=chosen, seed=seed, **numbers, **(read_texts(texts) if texts else {}))
    pairs = [(model, spec) for spec in data] + list(also)
    titles, lists = _data_names(names, [spec for _, spec in pairs]), _class_lists(classes, len(pairs))
    wanted = [
        Wanted(uri, open_data(spec, limit=limit, seed=seed, labels=labels), title, of)
        for (uri, spec), title, of in zip(pairs, titles, lists, strict=True)
    ]
    folder = out or Path(f"study-{name}")
    with Bar() as bar:
        drawn, digest = new_study(
            wanted, config, folder, attach=attach, allow_pickle=allow_pickle or None, progress=bar
        )
    now_holds(f"the study is in {folder}")
    if as_json:
        about = [{"name": d.name, "classes": d.classes, "chosen_by": d.chosen_by, "model": d.model} for d in drawn.data]
        levels = [drawn.levels(i, s) for i in range(len(drawn.data)) for s in range(config.sets)]
        levels_json = [{"chance": c, "ceiling": top} for c, top in levels]
        say(as_text({"name": name, "digest": digest, "folder": str(folder), "data": about, "sets": levels_json}))
        return
    for d in drawn.data:
        say(f"{d.name}: {', '.join(d.classes)} (chosen {d.chosen_by}), {config.sets} sets of {config.per_batch} images")
    say(words(config.conditions, len(drawn.data), config.order))
    where = f"{drawn.models[0]}#{name}" if attach else str(folder)
    say(f"drawn into {folder}" + (f", attached to {', '.join(drawn.models)}" if attach else "") + f" ({digest[:12]})")
    say(f"next: auditor study serve {where} --links 30")


@study.command(
    epilog=example(
        "auditor study serve models:/birds/3#birds --links 30",
        "auditor study serve study-birds --open gulls-2026 --host 0.0.0.0",
    )
)
@STUDY
@ANSWERS
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=3100, show_default=True, type=click.IntRange(0, 65535), help="Port to listen on.")
@click.option("--links", default=0, type=click.IntRange(0, 1000), metavar="N", help="Make N links that work once each.")
@click.option("--open", "open_code", metavar="CODE", help="Let everybody in who knows this code, at /open.")
@click.option(
    "--key",
    envvar="AUDITOR_STUDY_KEY",
    help="The owner's key, of 12 characters or more; default: one is made.  [env: AUDITOR_STUDY_KEY]",
)
@click.option("--address", metavar="URL", help="Address that people reach it by, for the links that are printed.")
@reports_errors("the server stopped; every saved answer is kept")
def serve(
    study: str,
    answers: Path | None,
    host: str,
    port: int,
    links: int,
    open_code: str | None,
    key: str | None,
    address: str | None,
) -> None:
    """Serve STUDY to participants until it is stopped. It needs no model, and stores nothing of who asks.

    Behind a reverse proxy with TLS, give its address with --address.
    """
    import secrets

    from auditor.commands.terminal import note, say, waiting
    from auditor.errors import OptionError
    from auditor.plugins.study_site.launch import run
    from auditor.plugins.study_site.site import StudySite
    from auditor.study.answers import AnswerStore

    if key is not None and len(key) < 12:
        raise OptionError(
            "--key: want at least 12 characters, so that nobody guesses it; leave it out and one is made."
        )
    if open_code is not None and len(open_code.strip()) < 4:
        raise OptionError("--open: want a code of at least 4 characters.")
    owner_key = key or secrets.token_urlsafe(18)
    with waiting(f"reading {study}"):
        drawn = find(study)
    path = answers or default_answers(drawn.study.name, drawn.digest)
    store = AnswerStore(path, drawn.study, drawn.digest)
    site = StudySite(drawn.study, drawn.pictures, store, owner_key, open_code=open_code.strip() if open_code else None)
    made = store.add_links(links)

    def ready(at: str) -> None:
        root = (address or at).rstrip("/")
        for link in made:
            say(f"{root}/p/{link}")
        note(f"study {drawn.study.name} at {root}, answers in {path}")
        if open_code:
            note(f"open to everybody with the code, at {root}/open")
        note(f"the owner's page is {root}/owner" + ("" if key else f", its key {owner_key}"))

    run(site, host, port, ready)


@study.command(epilog=example("auditor study erase models:/birds/3#birds 7KQ2MXW9TP"))
@STUDY
@click.argument("code")
@ANSWERS
@JSON
@reports_errors("nothing was erased")
def erase(study: str, code: str, answers: Path | None, as_json: bool) -> None:
    """Erase every answer of the participant with CODE, which they saw at the end; this cannot be undone."""
    from auditor.commands.terminal import as_text, say

    store = open_answers(find(study), answers)
    n = store.erase(code)
    store.close()
    say(as_text({"erased": n}) if as_json else f"erased: {n} rows; results that were stored before still count them")


@study.command(epilog=example("auditor study export models:/birds/3#birds answers.json"))
@STUDY
@click.argument("file", type=click.Path(path_type=Path))
@ANSWERS
@reports_errors("nothing was written")
def export(study: str, file: Path, answers: Path | None) -> None:
    """Write all answers to FILE, as JSON that needs nothing else to be read."""
    from auditor.commands.terminal import say
    from auditor.study.archive import archive

    store = open_answers(find(study), answers)
    file.write_bytes(archive(store))
    store.close()
    say(f"{file}: all answers to {store.study.name}")


def find(text: str) -> Any:
    """Return the study that the user names."""
    from auditor.plugins.registry.studies import find_study

    return find_study(text)


def default_answers(name: str, digest: str) -> Path:
    """Return where answers are when nobody says otherwise."""
    return Path(f"study-{name}-{digest[:8]}.db")


def open_answers(drawn: Any, answers: Path | None) -> Any:
    """Open the answers that are there."""
    from auditor.study.answers import AnswerStore

    path = answers or default_answers(drawn.study.name, drawn.digest)
    return AnswerStore(path, drawn.study, drawn.digest, create=False)


def _data_names(names: str | None, specs: list[str]) -> list[str]:
    """Return a name for every data set: as given, else from its path."""
    import re

    from auditor.errors import OptionError

    if names is not None:
        given = [part.strip() for part in names.split(",")]
        if len(given) != len(specs) or not all(re.fullmatch(r"[\w.-]{1,40}", part) for part in given):
            raise OptionError(f"--names: want {len(specs)} plain names with commas between, got {names!r}.")
        return given
    parts = [re.split(r"[?]", spec)[0].rstrip("/") for spec in specs]
    titles = []
    for part in parts:
        pieces = [piece for piece in re.split(r"[/:\\]", part) if piece]
        generic = len(pieces) > 1 and pieces[-1] in ("train", "test", "val", "valid", "validation", "images", "data")
        titles.append(re.sub(r"[^\w.-]+", "-", pieces[-2] if generic else Path(pieces[-1]).stem)[:40] or "data")
    return [f"{t}-{i + 1}" if titles.count(t) > 1 else t for i, t in enumerate(titles)]


def _class_lists(text: str, n: int) -> list[tuple[str, ...] | str]:
    """Return how the classes of every data set are chosen."""
    from auditor.errors import OptionError

    parts = [part.strip() for part in text.split(";")]
    if len(parts) not in (1, n):
        raise OptionError(f"--classes: want one list, or {n} with ; between, got {len(parts)}.")
    lists: list[tuple[str, ...] | str] = [
        part if part in ("alike", "random") else tuple(c.strip() for c in part.split(",") if c.strip())
        for part in parts
    ]
    return lists if len(lists) == n else lists * n
