"""``auditor study results`` and ``auditor study plan``: what a study found, and how many people it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from auditor.commands.group import JSON, example, now_holds, reports_errors
from auditor.commands.study import ANSWERS, STUDY, find, open_answers
from auditor.commands.study import study as study_group


@study_group.command(
    epilog=example("auditor study results models:/birds/3#birds --report results.html --csv results.csv")
)
@STUDY
@ANSWERS
@click.option("--report", type=click.Path(path_type=Path), help="Write the page (HTML) here.")
@click.option("--csv", "table", type=click.Path(path_type=Path), help="Write a line per participant and batch here.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the results (JSON) here.")
@click.option(
    "--store/--no-store",
    default=None,
    help="Store them with the version, as metrics and in its audit.  [default: when STUDY is MODEL#NAME]",
)
@JSON
@reports_errors("nothing was stored")
def results(
    study: str,
    answers: Path | None,
    report: Path | None,
    table: Path | None,
    out: Path | None,
    store: bool | None,
    as_json: bool,
) -> None:
    """Say what STUDY found: purity, confidence and ratings by condition, and which differences are beyond chance."""
    from auditor.commands.terminal import as_text, say
    from auditor.errors import OptionError
    from auditor.plugins.registry.study_results import store_everywhere
    from auditor.reports.study_page import study_page
    from auditor.study.results import results_of
    from auditor.study.scores import as_csv

    drawn = find(study)
    if store and drawn.version is None:
        raise OptionError(
            "--store: name the study as MODEL#NAME (models:/birds/3#birds), so that the version is known."
        )
    store_of_answers = open_answers(drawn, answers)
    everybody = store_of_answers.everybody()
    store_of_answers.close()
    result = results_of(drawn.study, drawn.digest, everybody)
    page, rows = study_page(result), as_csv(result.scores)
    text = as_text(result.to_json())
    for path, content in ((report, page), (table, rows), (out, text + "\n")):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
    stored = []
    if store is not False and drawn.version is not None:
        stored = store_everywhere(result, study_page(result, with_comments=False))
        now_holds(f"results are stored with {', '.join(stored)}")
    if as_json:
        say(text)
        return
    _show(result)
    if stored:
        say(f"stored with {', '.join(stored)}, as metrics study/{drawn.study.name}/…")


def _show(result: Any) -> None:
    """Print how many took part, the means by condition, and the comparisons."""
    from auditor.commands.terminal import say, table

    name = result.study.name
    say(f"study {name}: {result.began} began, {result.finished} finished")
    metrics = ("purity", "purity_of_labels", "confidence", "rating", "seconds")
    body = []
    for condition in result.study.config.conditions:
        row = [condition]
        for metric in metrics:
            m = result.metrics.get(f"study/{name}/{metric}/{condition}")
            span = "" if m is None or m.low is None else f" ({m.low:.2f} to {m.high:.2f})"
            row.append("" if m is None else f"{m.value:.3g}{span}")
        null = result.metrics.get(f"study/{name}/purity/{condition}")
        row.append("" if null is None or null.null is None else f"{null.null:.3f}")
        body.append(row)
    table(["condition", *(m.replace("_", " ") for m in metrics), "chance"], body)
    rows = [
        [
            f"{c.what}{', ' + c.data if c.data else ''}",
            f"{c.a} - {c.b}",
            str(c.n),
            f"{c.difference:+.3f}",
            "" if c.d_z is None else f"{c.d_z:+.2f}",
            _p(c.p_wilcoxon_holm),
            _p(c.p_permutation_holm) + (" *" if c.is_significant else ""),
        ]
        for c in result.comparisons
    ]
    say("", "paired comparisons; p corrected by Holm's method, * at most 0.05")
    table(["of", "pair", "n", "difference", "d_z", "p Wilcoxon", "p permutation"], rows)
    for e in result.effects:
        said = (
            f"not tested: {e.reason}"
            if e.reason
            else f"size {e.size:+.3f}, p {'< 0.001' if e.p < 0.001 else f'{e.p:.3f}'}, n {e.n}"
        )
        say(f"{e.name}: {said}")


def _p(p: float) -> str:
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}"


@study_group.command(
    epilog=example(
        "auditor study plan --difference 0.1 --conditions 3",
        "auditor study plan models:/birds/3#birds --difference 0.1",
    )
)
@click.argument("study", required=False)
@click.option("--difference", required=True, type=float, help="Difference of mean purity that must be found.")
@click.option(
    "--sd", type=float, help="Spread of one batch's purity.  [default: 0.14, or of guessing in STUDY if larger]"
)
@click.option(
    "--batches", type=int, help="Batches per condition and person.  [default: the data sets of STUDY, else 1]"
)
@click.option(
    "--conditions", type=click.IntRange(2, 20), help="Conditions, all pairs compared.  [default: of STUDY, 2]"
)
@click.option("--correlation", default=0.0, show_default=True, help="Of one person's means under two conditions.")
@click.option("--alpha", default=0.05, show_default=True, help="How often a difference may be found where none is.")
@click.option("--power", default=0.8, show_default=True, help="How often the difference must be found.")
@JSON
@reports_errors("nothing was planned")
def plan(
    study: str | None,
    difference: float,
    sd: float | None,
    batches: int | None,
    conditions: int | None,
    correlation: float,
    alpha: float,
    power: float,
    as_json: bool,
) -> None:
    """Say how many people are needed to find a difference between two conditions."""
    from dataclasses import asdict

    from auditor.commands.terminal import as_text, say
    from auditor.study.power import USUAL_SD, sd_of_guessing
    from auditor.study.power import plan as planned

    drawn = find(study).study if study else None
    n_conditions = conditions or (len(drawn.config.conditions) if drawn else 2)
    made = planned(
        difference,
        sd=sd if sd is not None else max(USUAL_SD, sd_of_guessing(drawn) if drawn else 0.0),
        batches=batches or (len(drawn.data) if drawn else 1),
        correlation=correlation,
        comparisons=n_conditions * (n_conditions - 1) // 2,
        alpha=alpha,
        power=power,
    )
    if as_json:
        say(as_text(asdict(made)))
        return
    say(
        f"{made.people} people find a difference of {made.difference:g} in {power:.0%} of studies (two-sided, alpha "
        f"{alpha:g}, {made.comparisons} comparison{'' if made.comparisons == 1 else 's'}, {made.batches} "
        f"batch{'' if made.batches == 1 else 'es'} per condition)",
        f"spread of one batch {made.sd_of_batch:.3f}, of a person's difference {made.sd_of_difference:.3f}; "
        f"{made.people_t} people where differences are normal and a t test is used",
    )
