"""Commands of the release: audit, policy, gate."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from auditor.commands.group import JSON, PICKLE, SEED, auditor, example, tells

FRESH = click.option("--fresh", is_flag=True, help="Measure everything again, whatever was finished or stored.")
IMAGES = click.option(
    "--images", default=100, show_default=True, type=click.IntRange(min=20), help="Images to explain and measure on."
)
DATA_HELP = "Images to measure on; see auditor --help."


@auditor.command(
    epilog=example("auditor audit models:/digits/1 --data sklearn:digits --report report.html --out audit.json")
)
@click.argument("model")
@click.option("--data", required=True, help=DATA_HELP)
@click.option("--report", type=click.Path(path_type=Path), help="Write the page (HTML) here too.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the audit (JSON, sealed) here too.")
@click.option("--card", type=click.Path(path_type=Path), help="TOML with the model card's fields (intended_use, …).")
@IMAGES
@click.option(
    "--refits", default=0, type=click.IntRange(0, 10), help="Re-fit each explainer N times for its stability."
)
@click.option("--limit", type=click.IntRange(min=1), help="Use the first N images only.")
@click.option("--no-store", is_flag=True, help="Do not store the audit with the version.")
@FRESH
@SEED
@PICKLE
@JSON
@tells
def audit(
    model: str,
    data: str,
    report: Path | None,
    out: Path | None,
    card: Path | None,
    images: int,
    refits: int,
    limit: int | None,
    no_store: bool,
    fresh: bool,
    seed: int,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Measure MODEL and every explainer attached to it on DATA; store the audit with the version."""
    from auditor.auditing.audit import AuditConfig
    from auditor.data.source import open_data
    from auditor.release.model_card import read_card
    from auditor.plugins import run_audit
    from auditor.reports.audit_report import write_report
    from auditor.commands.terminal import Bar, as_text, say

    given = read_card(card) if card is not None else None
    source = open_data(data, limit=limit)
    with Bar() as bar:
        found = run_audit(
            model,
            source,
            config=AuditConfig(seed=seed, images=images, refits=refits),
            card=given,
            store=not no_store,
            fresh=fresh,
            allow_pickle=allow_pickle or None,
            progress=bar,
            command=_command(),
        )
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(found.sealed())
    if report is not None:
        write_report(found, report)
    if as_json:
        say(as_text(found.to_json()))
        return
    _show(found)
    for what, path in (("page", report), ("audit", out)):
        if path is not None:
            say(f"{what} in {path}")


def _show(found: Any) -> None:
    from auditor.metrics.names import split, words
    from auditor.commands.terminal import say, table

    shown = [(n, m) for n, m in found.metrics.items() if not (n.startswith("model/") and split(n)[1])]
    body = [
        [
            name,
            words(name)[0],
            f"{m.value:.4g}" if m.status == "passed" else m.status.upper(),
            "" if m.low is None or m.high is None else f"{m.low:.4g} to {m.high:.4g}",
            "" if m.null is None else f"{m.null:.4g}",
            {"up": "more is better", "down": "less is better"}.get(m.direction, ""),
            m.reason[:80],
        ]
        for name, m in shown
    ]
    table(["metric", "", "value", "95% interval", "null", "", ""], body)
    rest = len(found.metrics) - len(shown)
    failed = sum(m.status == "failed" for m in found.metrics.values())
    skipped = sum(m.status == "skipped" for m in found.metrics.values())
    say(
        f"{len(found.metrics)} metrics ({rest} of single layers not shown), {failed} failed, {skipped} skipped; "
        f"{found.data['n']} images, {found.seconds:.0f} s, audit {found.digest[:12]}"
    )


@auditor.group(epilog=example("auditor policy init models:/digits/1 > policy.toml"))
def policy() -> None:
    """Limits on audit metrics for the gate."""


@policy.command("init", epilog=example("auditor policy init models:/digits/1 > policy.toml"))
@click.argument("model")
@click.option(
    "--audit", "audit_file", type=click.Path(path_type=Path), help="Draft from this file; default: the stored."
)
@tells
def policy_init(model: str, audit_file: Path | None) -> None:
    """Print a policy drafted from the stored audit of MODEL, with margins from its intervals."""
    from auditor.errors import OptionError
    from auditor.plugins import latest_audit
    from auditor.release.policy_draft import draft_policy
    from auditor.commands.terminal import say, waiting

    with waiting(f"reading the audit of {model}"):
        found = _read_audit(audit_file) if audit_file is not None else latest_audit(model)
    if found is None:
        raise OptionError(f"{model} has no stored audit; run auditor audit {model} --data DATA first.")
    say(draft_policy(found).rstrip())


@auditor.command(
    epilog=example(
        "auditor gate models:/digits/2 --policy policy.toml --baseline models:/digits@champion --junit gate.xml",
        "auditor gate models:/digits/2 --policy policy.toml --promote champion",
    )
)
@click.argument("model")
@click.option("--policy", "policy_file", required=True, type=click.Path(path_type=Path), help="Limits, as TOML.")
@click.option("--baseline", help="Version to compare with, for limits on changes and drift.")
@click.option("--data", help=f"{DATA_HELP} Default: those of the stored audit.")
@click.option(
    "--audit", "audit_file", type=click.Path(path_type=Path), help="Judge this audit file, if it is not stale."
)
@click.option("--junit", type=click.Path(path_type=Path), help="Write JUnit XML here.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Write a Markdown summary here.")
@click.option("--promote", metavar="ALIAS", help="Move this alias to MODEL when, and only when, the gate passes.")
@IMAGES
@FRESH
@SEED
@PICKLE
@JSON
@tells
def gate(
    model: str,
    policy_file: Path,
    baseline: str | None,
    data: str | None,
    audit_file: Path | None,
    junit: Path | None,
    markdown: Path | None,
    promote: str | None,
    images: int,
    fresh: bool,
    seed: int,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Hold MODEL against a policy. Exit 0: it passes, 1: it fails, 2: there is no verdict (and no pass)."""
    from auditor.reports import gate_summary as gate_report
    from auditor.auditing.audit import AuditConfig
    from auditor.plugins import run_gate
    from auditor.release.policy import read_policy
    from auditor.commands.terminal import Bar, as_text, say, table

    rules = read_policy(policy_file)
    given = _read_audit(audit_file) if audit_file is not None else None
    with Bar() as bar:
        found = run_gate(
            model,
            rules,
            baseline=baseline,
            data=data,
            audit=given,
            config=AuditConfig(seed=seed, images=images),
            fresh=fresh,
            promote=promote,
            allow_pickle=allow_pickle or None,
            progress=bar,
            command=_command(),
        )
    for path, write in ((junit, gate_report.junit), (markdown, gate_report.markdown)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(write(found), encoding="utf-8")
    if as_json:
        say(as_text(found.to_json()))
    else:
        bad = [c for c in found.checks if c.verdict == "fail"]
        if bad:
            table(["failed", "value", "limit", ""], [[c.metric, f"{c.value:.4g}", c.limit, c.reason] for c in bad])
        against = f" against {found.baseline}" if found.baseline else ""
        say(
            f"{found.verdict.upper()}: {found.model}{against}, "
            f"{len(found.checks) - len(bad)} of {len(found.checks)} checks hold"
        )
        if found.promoted:
            say(f"alias {found.promoted} now points to {found.model}")
    if found.verdict != "pass":
        sys.exit(1)


def _read_audit(path: Path) -> Any:
    from auditor.auditing.audit import Audit
    from auditor.errors import OptionError

    try:
        content = path.read_bytes()
    except OSError as error:
        raise OptionError(f"audit {path}: cannot be read ({error.strerror or error}).") from None
    return Audit.from_json(content, f"the audit file {path}")


def _command() -> str:
    """Return the command line as a person would type it again."""
    return shlex.join(["auditor", *sys.argv[1:]])
