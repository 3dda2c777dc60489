"""``auditor log``: the history of a registered model, and whether it is whole."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auditor.commands.group import JSON, TRUSTED, auditor, example, reports_errors

if TYPE_CHECKING:
    from auditor.plugins.registry.history import Entry


class _WithVerify(click.Group):
    """``auditor log MODEL`` shows, ``auditor log verify MODEL`` checks."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the name of a model for ``show NAME``."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["show", *args]
        return super().parse_args(ctx, args)


@auditor.group(cls=_WithVerify, epilog=example("auditor log digits", "auditor log verify digits --trusted keys/"))
def log() -> None:
    """Show or check the history of a registered model: who attached, audited, gated and promoted what."""


@log.command("show", epilog=example("auditor log digits"))
@click.argument("model")
@JSON
@reports_errors("nothing was changed")
def show(model: str, as_json: bool) -> None:
    """Show the history of MODEL, a registered name or any of its versions."""
    from auditor.commands.terminal import as_text, say
    from auditor.plugins.registry import history

    lines = history.verify(history.entries(_name(model)))
    if as_json:
        say(as_text([entry.to_json() for entry in lines]))
        return
    lines = history.shown(lines)
    if lines:
        _table(lines)
    else:
        say(f"There is no history of {_name(model)} yet.")


@log.command("verify", epilog=example("auditor log verify digits --trusted keys/ --head 1f3a…"))
@click.argument("model")
@TRUSTED
@click.option("--head", default="", help="Digest of an entry that was noted earlier and must be there.")
@JSON
@reports_errors("not everything was checked")
def verify(model: str, trusted: Path | None, head: str, as_json: bool) -> None:
    """Check that no entry of MODEL's history was rewritten, removed or rolled back; exit 1 when one was.

    Explainers, audits, verdicts, graphs and promoted aliases are held against the newest entry about each: what was
    done without an entry, or undone without one, is named.
    """
    from auditor.commands.terminal import as_text, note, say
    from auditor.plugins.registry import history
    from auditor.plugins.registry.logged_state import differences
    from auditor.signing.keys import read_trusted

    name = _name(model)
    keys = None if trusted is None else read_trusted(trusted)
    lines = history.verify(history.entries(name), heads=history.heads_of(name), trusted=keys, head=head)
    lines += differences(name, lines)
    bad = [entry for entry in lines if entry.problem]
    newest = max((entry for entry in lines if not entry.problem), key=lambda entry: entry.number, default=None)
    if as_json:
        summary: dict[str, Any] = {"whole": not bad, "head": newest.digest if newest else ""}
        say(as_text({**summary, "entries": [entry.to_json() for entry in lines]}))
    else:
        for entry in bad:
            note(f"{_entry_words(entry)}: {entry.problem}")
        for entry in history.shown(lines):
            if entry.action.startswith(history.BEGIN) and not entry.problem:
                say(f"entry {entry.number}: {entry.action} of version {entry.version} was never noted as done.")
        lines = [entry for entry in lines if entry.digest]
        unsigned = sum(not entry.envelope for entry in lines)
        signatures = f"{unsigned} of them unsigned" if unsigned else "all signed"
        state = "is whole" if not bad else f"is NOT whole: {len(bad)} entries do not stand"
        say(f"The history of {name} {state}; {len(lines)} entries, {signatures}" + _newest(newest))
    if bad:
        sys.exit(1)


def _entry_words(entry: Entry) -> str:
    return f"entry {entry.number} ({entry.action})" if entry.digest else entry.action


def _newest(entry: Entry | None) -> str:
    return f"; newest {entry.digest}" if entry is not None else ""


def _name(model: str) -> str:
    """Return the registered name of a model URI, or the name itself."""
    from auditor.plugins.registry.location import URI, check_server

    check_server()
    match = URI.match(model)
    return match["name"] if match else model


def _table(lines: list[Entry]) -> None:
    from auditor.commands.terminal import table

    table(
        ["", "time", "version", "what", "", "signed", ""],
        [
            [
                str(entry.number),
                entry.time[:19],
                entry.version,
                entry.action,
                entry.detail or ", ".join(entry.digests),
                "yes" if entry.envelope else "no",
                entry.problem,
            ]
            for entry in lines
        ],
    )
