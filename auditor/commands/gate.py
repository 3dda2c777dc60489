"""``auditor gate``: a version against a policy; 0 passes, 1 fails, 2 is no verdict."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from auditor.commands.cluster_option import CLUSTER
from auditor.commands.device_option import DEVICE
from auditor.commands.group import (
    DATA_HELP,
    FRESH,
    HONEST_HELP,
    IMAGES,
    JSON,
    LABELS,
    PICKLE,
    SEED,
    SIGN_KEY,
    TRUSTED,
    WithHonest,
    auditor,
    example,
    now_holds,
    reports_errors,
    signature_words,
)

if TYPE_CHECKING:
    from auditor.auditing.record import Audit
    from auditor.data.source import Data
    from auditor.release.gate import Gate


@auditor.command(
    cls=WithHonest,
    epilog=example(
        "auditor gate models:/digits/2 --policy policy.toml --baseline models:/digits@champion --junit gate.xml",
        "auditor gate models:/digits/2 --policy policy.toml --promote champion",
    ),
)
@click.argument("model")
@click.option("--policy", "policy_file", required=True, type=click.Path(path_type=Path), help="Limits, as TOML.")
@click.option("--baseline", help="Version to compare with, for limits on changes and drift.")
@click.option("--honest", multiple=True, metavar="MODEL", help=HONEST_HELP)
@click.option("--data", help=f"{DATA_HELP} Default: those of the stored audit.")
@LABELS
@click.option(
    "--audit", "audit_file", type=click.Path(path_type=Path), help="Judge this audit file, if it is not stale."
)
@click.option("--junit", type=click.Path(path_type=Path), help="Write JUnit XML here.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Write a Markdown summary here.")
@click.option("--promote", metavar="ALIAS", help="Move this alias to MODEL when, and only when, the gate passes.")
@TRUSTED
@click.option("--require-signed-audit", is_flag=True, help="Fail unless a key of --trusted signed the audit.")
@IMAGES
@FRESH
@SEED
@CLUSTER
@DEVICE
@PICKLE
@SIGN_KEY
@JSON
@reports_errors("there is no verdict and nothing was promoted")
def gate(
    model: str,
    policy_file: Path,
    baseline: str | None,
    honest: tuple[str, ...],
    data: str | None,
    labels: str | None,
    audit_file: Path | None,
    junit: Path | None,
    markdown: Path | None,
    promote: str | None,
    trusted: Path | None,
    require_signed_audit: bool,
    images: int,
    fresh: bool,
    seed: int,
    cluster: str | None,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Hold MODEL against a policy. Exit 0: it passes, 1: it fails, 2: there is no verdict (and no pass)."""
    from auditor.auditing.config import AuditConfig
    from auditor.commands.terminal import Bar, as_text, command_line, say
    from auditor.plugins import run_gate
    from auditor.release.policy import read_policy
    from auditor.runners.cluster import counted_work
    from auditor.signing.keys import read_trusted

    for path in (junit, markdown):
        _check_can_write(path)
    source, rules = _source(data, labels), read_policy(policy_file)
    stored_audit = read_audit(audit_file) if audit_file is not None else None
    with counted_work(cluster) as work, Bar() as bar:
        result = run_gate(
            model,
            rules,
            baseline=baseline,
            honest=honest,
            data=source,
            audit=stored_audit,
            config=AuditConfig(seed=seed, images=images),
            fresh=fresh,
            promote=promote,
            allow_pickle=allow_pickle or None,
            progress=bar,
            command=command_line(),
            before_promotion=lambda result: _write(result, junit, markdown),
            trusted=None if trusted is None else read_trusted(trusted),
            require_signed_audit=require_signed_audit,
        )
    if as_json:
        say(as_text({**result.to_json(), **work}))
    else:
        _show(result)
    if result.verdict != "pass":
        sys.exit(1)


def _show(result: Gate) -> None:
    from auditor.commands.terminal import say, table

    bad = [c for c in result.checks if c.verdict == "fail"]
    if bad:
        table(["failed", "value", "limit", ""], [[c.metric, f"{c.value:.4g}", c.limit, c.reason] for c in bad])
    against = f" against {result.baseline}" if result.baseline else ""
    say(
        f"{result.verdict.upper()}: {result.model}{against}, "
        f"{len(result.checks) - len(bad)} of {len(result.checks)} checks hold"
    )
    say(signature_words("verdict"))
    if result.promoted:
        say(f"alias {result.promoted} now points to {result.model}")


def _write(result: Gate, junit: Path | None, markdown: Path | None) -> None:
    """Write the files asked for, before an alias moves."""
    from auditor.reports import gate_summary

    now_holds(f"the verdict is {result.verdict}, nothing was promoted, the files asked for may be missing")
    for path, text in ((junit, gate_summary.junit), (markdown, gate_summary.markdown)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text(result), encoding="utf-8")
    now_holds(f"the verdict is {result.verdict}; auditor log says whether an alias was moved")


def _check_can_write(path: Path | None) -> None:
    """Raise now what would stop a file from being written after the audit."""
    from auditor.errors import OptionError

    if path is not None and path.is_dir():
        raise OptionError(f"{path} is a folder; name a file to write to.")


def _source(data: str | None, labels: str | None) -> Data | None:
    from auditor.errors import OptionError

    if data is None and labels is not None:
        raise OptionError("--labels says what the labels of --data are; give --data too.")
    if data is None:
        return None
    from auditor.data.source import open_data  # loads torch, which a stored audit does not need

    return open_data(data, labels=labels)


def read_audit(path: Path) -> Audit:
    """Read a sealed audit from a file."""
    from auditor.auditing.record import Audit
    from auditor.errors import OptionError

    try:
        content = path.read_bytes()
    except OSError as error:
        raise OptionError(f"audit {path}: cannot be read ({error.strerror or error}).") from None
    return Audit.from_json(content, f"the audit file {path}")
