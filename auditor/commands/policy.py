"""``auditor policy``: limits drafted from an audit, and a policy file in words."""

from __future__ import annotations

from pathlib import Path

import click

from auditor.commands.gate import read_audit
from auditor.commands.group import JSON, auditor, example, reports_errors


@auditor.group(epilog=example("auditor policy init models:/digits/1 > policy.toml"))
def policy() -> None:
    """Limits on audit metrics for the gate."""


@policy.command("check", epilog=example("auditor policy check policy.toml"))
@click.argument("file", type=click.Path(path_type=Path))
@JSON
@reports_errors("nothing was checked")
def policy_check(file: Path, as_json: bool) -> None:
    """Check a policy file and say in words what it asks for."""
    from auditor.commands.terminal import as_text, say
    from auditor.release.policy import in_words, read_policy

    rules = read_policy(file)
    lines = in_words(rules)
    if as_json:
        say(
            as_text(
                {"policy": str(file), "digest": rules.digest, "needs_baseline": rules.needs_baseline, "words": lines}
            )
        )
        return
    say(f"{file} ({rules.digest[:12]}) passes a version when all of this holds:", *(f"- {line}" for line in lines))
    if rules.needs_baseline:
        say("It speaks of a baseline, so the gate needs --baseline MODEL.")
    if rules.signers.asked:
        say("It speaks of signatures, so the gate needs --trusted keys/.")


@policy.command("init", epilog=example("auditor policy init models:/digits/1 > policy.toml"))
@click.argument("model")
@click.option(
    "--audit", "audit_file", type=click.Path(path_type=Path), help="Draft from this file; default: the stored."
)
@reports_errors("no policy was written")
def policy_init(model: str, audit_file: Path | None) -> None:
    """Print a policy drafted from the stored audit of MODEL, with margins from its intervals."""
    from auditor.commands.terminal import say, waiting
    from auditor.errors import OptionError
    from auditor.plugins import latest_audit
    from auditor.release.policy_draft import draft_policy

    with waiting(f"reading the audit of {model}"):
        stored = read_audit(audit_file) if audit_file is not None else latest_audit(model)
    if stored is None:
        raise OptionError(f"{model} has no stored audit; run auditor audit {model} --data DATA first.")
    say(draft_policy(stored).rstrip())
