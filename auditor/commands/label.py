"""``auditor label``: a name for a concept."""

from __future__ import annotations

import click

from auditor.commands.group import JSON, PICKLE, SIGN_KEY, auditor, example, now_holds, reports_errors


@auditor.command(epilog=example('auditor label models:/digits/1 concepts 3 "upper loop"'))
@click.argument("model")
@click.argument("name")
@click.argument("concept", type=int)
@click.argument("text")
@PICKLE
@SIGN_KEY
@JSON
@reports_errors("the concept has the name it had")
def label(model: str, name: str, concept: int, text: str, allow_pickle: bool, as_json: bool) -> None:
    """Name CONCEPT (its number) of the explainer NAME; stored as a new attached revision."""
    from auditor.commands.terminal import as_text, say, waiting
    from auditor.plugins import attach, load, load_subject
    from auditor.plugins.registry.location import resolve

    with waiting(f"labelling {name}"):
        version = resolve(model, registered=True)
        subject = load_subject(version, allow_pickle=allow_pickle or None)
        explainer = load(version, name, subject=subject)
        explainer.rename(concept, text)
        now_holds(f"auditor list {model} says whether the new revision is attached already")
        digest = attach(explainer, version, name, subject=subject, attach_anyway=True, action="label").digest
    now_holds("the concept has its new name")
    answer = {"name": name, "concept": concept, "label": explainer.label(concept), "digest": digest}
    say(as_text(answer) if as_json else f"Concept {concept} of {name} is now {answer['label']!r} ({digest[:12]}).")
