"""``auditor audit``: measure a model and its explainers, and store the audit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from auditor.commands.answer_flags import listed
from auditor.commands.cluster_option import CLUSTER
from auditor.commands.config_file import CONFIG
from auditor.commands.device_option import DEVICE
from auditor.commands.group import (
    DATA_HELP,
    FRESH,
    IMAGES,
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
    signature_words,
)

if TYPE_CHECKING:
    from auditor.auditing.record import Audit
    from auditor.progress import Progress

CHECKS = (  # as in auditor.auditing.checks, which would load torch for --help
    *("performance", "layers", "reliance"),
    *("faithfulness", "flipping", "randomisation", "noise", "heatmaps", "basis", "groups", "grouping"),
)
UNFINISHED = "nothing was stored; the same command goes on from the parts that were finished"


@auditor.command(
    epilog=example(
        "auditor audit models:/digits/1 --data sklearn:digits --report report.html --out audit.json",
        "auditor audit --config audit.toml",
    )
)
@click.argument("model")
@click.option("--data", required=True, help=DATA_HELP)
@LABELS
@click.option("--report", type=click.Path(path_type=Path), help="Write the page (HTML) here too.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the audit (JSON, sealed) here too.")
@click.option("--card", type=click.Path(path_type=Path), help="TOML with the model card's fields (intended_use, …).")
@IMAGES
@click.option(
    "--refits", default=0, type=click.IntRange(0, 10), help="Re-fit each explainer N times for its stability."
)
@LIMIT
@click.option(
    "--no-reliance", is_flag=True, help="Do not measure what each class hangs on (at most 60 passes an image)."
)
@click.option(
    "--regions",
    type=click.Path(path_type=Path),
    help="Masks of objects or parts (folder), COCO .json or folder of VOC .xml: how much of the heat lies on them.",
)
@click.option(
    "--explainers",
    "--only",
    "explainers",
    multiple=True,
    metavar="NAMES",
    help="Names of attached explainers; * means all. Default: all.  May be repeated, or hold commas.",
)
@click.option("--checks", metavar="NAMES", help=f"Take these checks only, with commas between: {', '.join(CHECKS)}.")
@click.option("--budget", metavar="TIME", help="Start no check after this time (5m, 90s) and end the one that runs.")
@click.option("--exhaustive", is_flag=True, help="Take all images and draws of a check, however clear its verdict is.")
@click.option("--no-store", is_flag=True, help="Do not store the audit with the version.")
@FRESH
@SEED
@CLUSTER
@DEVICE
@PICKLE
@SIGN_KEY
@CONFIG
@JSON
@reports_errors(UNFINISHED)
def audit(
    model: str,
    data: str,
    labels: str | None,
    report: Path | None,
    out: Path | None,
    card: Path | None,
    images: int,
    refits: int,
    limit: int | None,
    no_reliance: bool,
    regions: Path | None,
    explainers: tuple[str, ...],
    checks: str | None,
    budget: str | None,
    exhaustive: bool,
    no_store: bool,
    fresh: bool,
    seed: int,
    cluster: str | None,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Measure MODEL and every explainer attached to it on DATA; store the audit with the version.

    With --explainers, --checks or --budget the audit is a partial one: what is left out is skipped and passes no gate.
    """
    from auditor.auditing.checks import parse_checks, parse_duration
    from auditor.auditing.config import AuditConfig
    from auditor.commands.terminal import Bar, command_line
    from auditor.data.source import open_data
    from auditor.plugins import run_audit
    from auditor.release.model_card import read_card
    from auditor.reliance.annotations import check_path
    from auditor.runners.cluster import counted_work

    if regions is not None:
        check_path(regions)
    if fresh:
        now_holds("nothing was stored")  # finished parts are not kept then
    parts: dict[str, Any] = {"seed": seed, "images": images, "refits": refits, "exhaustive": exhaustive}
    parts |= {"explainers": listed(explainers) or None, "checks": () if checks is None else parse_checks(checks)}
    budget_s = None if budget is None else parse_duration(budget)
    card_fields = read_card(card) if card is not None else None
    source = open_data(data, limit=limit, seed=seed, labels=labels)
    with counted_work(cluster) as work, Bar() as bar:
        result = run_audit(
            model,
            source,
            config=AuditConfig(reliance=not no_reliance, regions=regions, budget_s=budget_s, **parts),
            card=card_fields,
            store=not no_store,
            fresh=fresh,
            allow_pickle=allow_pickle or None,
            progress=bar if fresh else _counting(bar),
            say=bar.say,
            command=command_line(),
        )
    now_holds("the audit is " + ("not stored" if no_store else "stored") + ", the files asked for may be missing")
    _give(result, report, out, as_json, work)


def _give(result: Audit, report: Path | None, out: Path | None, as_json: bool, work: Mapping[str, Any]) -> None:
    """Write the files that were asked for, and print the audit."""
    from auditor.commands.terminal import as_text, say
    from auditor.reports.audit_report import write_report

    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(result.sealed())
    if report is not None:
        write_report(result, report)
    if as_json:
        say(as_text({**result.to_json(), "verdict": _verdict(result), **work}))
        return
    _show(result)
    say(signature_words("audit"))
    for what, path in (("page", report), ("audit", out)):
        if path is not None:
            say(f"{what} in {path}")


def _counting(progress: Progress) -> Progress:
    """Return the progress that keeps for Ctrl-C how many parts are finished."""

    def report(stage: str, done: int, total: int | None) -> None:
        if stage == "audit" and done:
            now_holds(
                f"nothing was stored; {done} of {total} parts are finished, and the same command goes on from them"
            )
        progress(stage, done, total)

    return report


def _verdict(result: Audit) -> dict[str, Any]:
    from auditor.release.questions import believed, headline, reasons

    level, text = headline(result)
    return {"level": level, "headline": text, "answers": [reasons(result).to_json(), believed(result).to_json()]}


def _say_answers(result: Audit) -> None:
    """Print the headline, the two questions with their answers, and every sentence that is not good news."""
    from auditor.commands.terminal import say
    from auditor.release.questions import believed, headline, reasons, to_look_at

    level, text = headline(result)
    say(f"{level.upper()}: {text}")
    for answer in (reasons(result), believed(result)):
        say("", f"{answer.question} {answer.text}.")
        for f in answer.sentences:
            if f.level != "good":
                say(f"  {'!' if f.level == 'warn' else 'x'} {f'{f.about}: ' if f.about else ''}{f.text}")
    for entry in to_look_at(result):
        where = ", ".join(entry["images"])
        concepts = ", ".join(f"{c['explainer']}: {c['label']}" for c in entry["concepts"])
        shown = f"{entry['name']}: images {where}" + (f"; concepts {concepts}" if concepts else "")
        say("", shown, f"  {entry['advice']}")
    say("")


def _is_shown(name: str) -> bool:
    """Whether a metric stands in the table: of reliance only those of the worst class, none of what fits measured."""
    if name.startswith("explainer/") and name.split("/")[2] == "fit":
        return False  # `auditor list` shows them
    return not name.startswith("model/reliance/") or name.startswith(("model/reliance/worst/", "model/reliance/found"))


def _show(result: Audit) -> None:
    from auditor.auditing.cost import cost_sentence
    from auditor.auditing.data_quality import sentences as data_sentences
    from auditor.auditing.images import held_out_words
    from auditor.commands.terminal import say, table
    from auditor.metrics.names import split, words

    _say_answers(result)
    shown = [(n, m) for n, m in result.metrics.items() if not (n.startswith("model/") and split(n)[1]) and _is_shown(n)]
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
    for name, info in result.explainers.items():
        if info.get("held_out"):
            say(f"{name}: {held_out_words(info['held_out'])}")
    for line in data_sentences(result.data):
        say(f"data: {line}")
    rest = len(result.metrics) - len(shown)
    failed = sum(m.status == "failed" for m in result.metrics.values())
    skipped = sum(m.status == "skipped" for m in result.metrics.values())
    say(
        f"explained: {result.data['explained']}"
        + (f"; data: {result.data['sample']}" if "limit" in result.data else "")
    )
    if result.cost:
        say(f"time: {cost_sentence(result.cost)}")
    say(
        f"{len(result.metrics)} metrics ({rest} of fits, single layers and classes not shown), {failed} failed, "
        f"{skipped} skipped; {result.data['n']} images, {result.seconds:.0f} s, audit {result.digest[:12]}"
    )
