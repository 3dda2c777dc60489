"""``auditor verify``: every byte of what is attached."""

from __future__ import annotations

import sys

import click

from auditor.commands.group import JSON, PICKLE, auditor, example, reports_errors


@auditor.command(epilog=example("auditor verify models:/digits/1 && echo untouched"))
@click.argument("model")
@PICKLE
@JSON
@reports_errors("not everything was checked")
def verify(model: str, allow_pickle: bool, as_json: bool) -> None:
    """Check every byte of what is attached to MODEL; exit 1 when anything is not what was attached."""
    from auditor.commands.terminal import as_text, note, say, waiting
    from auditor.plugins import verify as verify_version

    with waiting(f"verifying {model}"):
        entries = verify_version(model, allow_pickle=allow_pickle or None)
    bad = [x for x in entries if not x.verified]
    if as_json:
        say(as_text({"verified": not bad, "explainers": [x.to_json() for x in entries]}))
    else:
        for x in bad:
            note(f"{x.name}: {x.problem}")
        good = len(entries) - len(bad)
        say(f"{good} of {len(entries)} attached explainers verify." if entries else f"Nothing is attached to {model}.")
    if bad:
        sys.exit(1)
