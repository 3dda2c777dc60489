"""``auditor verify``: every byte of a version, and who signed it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from auditor.commands.group import JSON, PICKLE, TRUSTED, auditor, example, reports_errors

if TYPE_CHECKING:
    from auditor.plugins.registry.attestations import Attestation


@auditor.command(
    epilog=example(
        "auditor verify models:/digits/1 && echo untouched", "auditor verify models:/digits/1 --trusted keys/"
    )
)
@click.argument("model")
@TRUSTED
@PICKLE
@JSON
@reports_errors("not everything was checked")
def verify(model: str, trusted: Path | None, allow_pickle: bool, as_json: bool) -> None:
    """Check every byte of MODEL and of what is attached; exit 1 when anything is not what it was.

    With --trusted it also says who signed what, and what no trusted key has signed is a failure.
    """
    from auditor.commands.terminal import as_text, note, say, waiting
    from auditor.plugins import verify as verify_version
    from auditor.plugins.registry.leftovers import find
    from auditor.plugins.registry.location import resolve

    with waiting(f"verifying {model}"):
        version = resolve(model, registered=True)
        entries = verify_version(version, allow_pickle=allow_pickle or None)
        signed = _signed(model, trusted)
        unused = find(version)
    bad = [x for x in entries if not x.verified]
    unsigned = [x for x in signed if x.problem]
    if as_json:
        answer = {"verified": not (bad or unsigned), "explainers": [x.to_json() for x in entries], "unused": unused}
        say(as_text({**answer, "attestations": None if trusted is None else [x.to_json() for x in signed]}))
    else:
        for x in bad:
            note(f"{x.name}: {x.problem}")
        attached = [x for x in entries if x.digest]  # other parts of the version are here with their problem alone
        good = sum(x.verified for x in attached)
        count = f"{good} of {len(attached)} attached explainers verify."
        say(count if attached else f"Nothing is attached to {model}.")
        for x in entries:
            if x.verified and x.digest_version == 1:
                say(f"{x.name}: its digest is of version 1, which compares the weights alone; attach it again.")
        if unused:
            folders = "1 folder lies" if len(unused) == 1 else f"{len(unused)} folders lie"
            say(
                f"{folders} beside the model that no tag points to, of what was replaced or detached: {unused[0]}"
                + " …" * (len(unused) > 1)
            )
        _show(signed, trusted)
    if bad or unsigned:
        sys.exit(1)


def _signed(model: str, trusted: Path | None) -> list[Attestation]:
    from auditor.plugins.registry.attestations import attestations_of
    from auditor.signing.keys import read_trusted

    return [] if trusted is None else attestations_of(model, read_trusted(trusted))


def _show(signed: list[Attestation], trusted: Path | None) -> None:
    from auditor.commands.terminal import note, say, table

    if trusted is None:
        say("Signatures were not looked at: without --trusted nobody is believed.")
        return
    for x in signed:
        if x.problem:
            note(f"{x.part}: {x.problem}")
    rows = [[x.part, x.digest[:12], x.says, x.signer, x.time] for x in signed if not x.problem]
    if rows:
        table(["signed", "digest", "says", "by", "at"], rows)
