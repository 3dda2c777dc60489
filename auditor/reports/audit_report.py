"""Report: an audit as one self-contained HTML page that a person without special knowledge can read.

No scripts, no fonts, nothing from elsewhere: it opens from a mail, in MLflow's artifact viewer, and prints to paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from auditor.auditing.data_quality import sentences as data_sentences
from auditor.auditing.images import held_out_words
from auditor.auditing.record import Audit
from auditor.metrics.measure import Measure
from auditor.metrics.names import split, words
from auditor.pages.templates import render
from auditor.release.gate import Gate, label_of, passed
from auditor.release.model_card import FIELDS, fill
from auditor.release.questions import believed, headline, reasons, to_look_at
from auditor.reports.drawings import bars, histogram, interval, number

FAITHFUL = ("f_cls", "f_reg", "residual_share", "completeness_gap", "flip_area", "deletion_area", "flip_gain")
STABLE = ("noise_similarity", "noise_c2", "randomisation", "basis_stability")
SHAPE = ("heatmap_overlap", "heatmap_spread", "grouping_purity")
TOGETHER = ("group_dominance", "group_ablation", "group_ablation_without_residual")
SHOWN = (
    *("mean_abs_weight", "near_zero_share", "cosine_max", "cosine_median", "cosine_share_below"),
    "faithfulness",
)
RELIANCE_SHOWN = (
    *(
        "score",
        "necessity_3_blur",
        "transplant_box",
        "transplant_best_box",
        "transplant_spot",
        "transplant_region",
        "transplant_frame",
        "transplant_surroundings",
    ),
    *("transplant_pattern", "transplant_colour", "transplant_spectrum", "sameness"),
)
ARROW = {"up": "more is better", "down": "less is better", "none": ""}


def write_report(audit: Audit, path: str | Path, gate: Gate | None = None) -> Path:
    """Write the page and return its path; with a gate its verdict comes first."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report_html(audit, gate), encoding="utf-8")
    return path


def report_html(audit: Audit, gate: Gate | None = None) -> str:
    """Return the page as one HTML document."""
    return render(
        "report.html",
        title=f"Audit of {label_of(audit)}",
        lead=_lead(audit),
        gate=None if gate is None else _gate(gate),
        **_questions(audit),
        looks=_looks_at(audit),
        measured_on=_measured_on(audit),
        data_quality=list(data_sentences(audit.data)),
        groups=_groups(audit),
        studies=_studies(audit),
        **_model(audit),
        layer_table=_layers(audit),
        not_measured=_not_measured(audit),
        cost=_cost(audit),
        card=_card(audit),
        command=audit.command,
        reproduce=_reproduce(audit),
    )


WHY_FAITHFUL = (
    "An explanation is faithful when it says what the model really uses. So it is put in the model's place and must "
    "come to the same class; and what it calls unimportant is replaced by noise, which must not matter much. The "
    "dashed tick, in numbers under “beside”, is what chance gives: a value close to it means nothing."
)
WHY_STABLE = (
    "Explanations should not change when the image changes too little to see, they must change when the model itself "
    "is destroyed, and fitting again should find the same concepts. For the destroyed weights the dashed tick is 1: "
    "an explanation that did not change at all."
)
WHY_TOGETHER = (
    "Concepts that fire together in the same places are one group. The group that speaks most for a class is taken out "
    "of its images, first with what the concepts leave unexplained kept, then without it: where much is lost only "
    "then, the unexplained rest carries the same thing."
)
WHY_FIT = (
    "When an explainer was fitted it measured these on images it held out, and they are stored in its artifact. A "
    "policy can hold the next fit to them: explainer/NAME/fit/METRIC."
)
WHY_SHAPE = "Heatmaps help when different concepts light up in different places, and each in few of them."


GROUPS = (
    ("How faithful are the explanations?", FAITHFUL, WHY_FAITHFUL),
    ("How stable are they?", STABLE, WHY_STABLE),
    ("How readable are the heatmaps?", SHAPE, WHY_SHAPE),
    ("Does one group of concepts carry a class?", TOGETHER, WHY_TOGETHER),
)


def _lead(audit: Audit) -> str:
    d, n = audit.data, len(audit.explainers)
    taken = f"; taken: {d['sample']}" if "sample" in d else ""
    return (
        f"{audit.time.replace('T', ' ').replace('+00:00', ' UTC')}; {d['n']} images of {d['spec']}, "
        f"{d['n_explained']} of them explained{taken}; {n} explainer{'' if n == 1 else 's'}."
    )


def _gate(gate: Gate) -> dict[str, Any]:
    level, word = ("good", "passes") if gate.verdict == "pass" else ("bad", "fails")
    return {
        "level": level,
        "word": word,
        "summary": f"{passed(gate.checks)} of {len(gate.checks)} limits of {gate.policy} hold.",
        "failed": [c for c in gate.checks if c.verdict == "fail"][:12],
    }


def _questions(audit: Audit) -> dict[str, Any]:
    """Return the headline, and what each class hangs on, with pictures, before anything is said of explanations."""
    level, text = headline(audit)
    hold_up, trusted = reasons(audit), believed(audit)
    entries, about = to_look_at(audit), audit.reliance or {}
    beside_pictures = {f["sentence"] for f in entries}
    return {
        "headline": {"level": level, "text": text},
        "answers": (hold_up, trusted),
        "reasons": hold_up,
        "findings": [_finding(f, audit.finding_pictures.get(f["name"])) for f in entries],
        "further_reasons": [f for f in hold_up.sentences if f.text not in beside_pictures],
        "measured_by": _measured_by(about) if about.get("images") else "",
        "believed": trusted,
        "believed_sentences": [f for f in trusted.sentences if not f.about],
        "believed_of": [
            {
                "name": name,
                "kind": info.get("kind", "not verified"),
                "sentences": [f for f in trusted.sentences if f.about == name],
            }
            for name, info in audit.explainers.items()
        ],
    }


def _measured_by(about: Mapping[str, Any]) -> str:
    heat = ", ".join([str(about["source"]), *about.get("sources", {})])
    regions = f" {about['regions']}." if about.get("regions") else ""
    return (
        f"Measured by hiding and transplanting on {about['images']}; deciding regions by {heat}; "
        f"{about['passes_per_image']:.0f} passes per image, a gradient counted as three.{regions}"
    )


def _finding(f: Mapping[str, Any], pictures: list[dict[str, Any]] | None) -> dict[str, Any]:
    level, word = ("bad", "Found") if f["verdict"] == "found" else ("warn", "Look at these pictures")
    concepts = [{**c, "share": f"{c['share']:.0%}"} for c in f.get("concepts", ())]
    return {
        "level": level,
        "title": f"{word}: {f['name']}",
        "sentence": f["sentence"],
        "pictures": pictures or [],
        "concepts": concepts,
        "advice": f["advice"],
    }


def _looks_at(audit: Audit) -> dict[str, Any] | None:
    if not audit.explainers:
        return None
    explainers = []
    for name, shown in audit.pictures.items():
        info = audit.explainers.get(name, {})
        layer = f", layer {info['layer']}" if info.get("layer") else ""
        explainers.append(
            {
                "name": name,
                "tag": f"{info.get('kind', '')}{layer}",
                "concepts": shown["concepts"],
                "examples": [_example(e) for e in shown["examples"]],
            }
        )
    return {"pictured": bool(audit.pictures), "explainers": explainers}


def _example(e: Mapping[str, Any]) -> dict[str, Any]:
    share = e.get("explained")
    return {
        **e,
        "probability": f"{e['probability']:.0%}",
        "truth": "" if e["truth"] is None or e["truth"] == e["prediction"] else e["truth"],
        "value": number(e["value"]),
        "explained": "" if share is None else f"{share:.0%}",
    }


def _measured_on(audit: Audit) -> dict[str, Any] | None:
    """Say how many images each explainer did not know; audits of earlier releases did not store that."""
    about = {name: info["held_out"] for name, info in audit.explainers.items() if info.get("held_out")}
    if not about:
        return None
    held = [(name, f"{held_out_words(entry)}.") for name, entry in about.items()]
    return {"explained": audit.data.get("explained") or audit.data["n_explained"], "held_out": held}


def _groups(audit: Audit) -> list[dict[str, Any]]:
    """Return the measures of explanations by what they are about; groups without any are left out."""
    groups = []
    for title, metrics, why in GROUPS:
        explainers = []
        for name, info in audit.explainers.items():
            rows = {f"explainer/{name}/{m}": audit.metrics.get(f"explainer/{name}/{m}") for m in metrics}
            measured = {k: m for k, m in rows.items() if m is not None and m.status == "passed"}
            if not measured:
                continue
            stages = {
                k: m
                for k, m in audit.metrics.items()
                if "randomisation" in metrics
                and k.startswith(f"explainer/{name}/randomisation/")
                and m.status == "passed"
            }
            explainers.append({"name": name, "kind": info.get("kind", ""), "rows": _rows(measured | stages)})
        if explainers:
            groups.append({"title": title, "why": why, "explainers": explainers})
    fitted = [
        {"name": name, "kind": info.get("kind", ""), "rows": rows_of_fit}
        for name, info in audit.explainers.items()
        if (rows_of_fit := _rows(_of_fit(audit, name)))
    ]
    return (
        [*groups, {"title": "What did the fits measure?", "why": WHY_FIT, "explainers": fitted}] if fitted else groups
    )


def _of_fit(audit: Audit, name: str) -> dict[str, Measure]:
    """Return what the fit of an explainer measured, as far as it has a better side; details of layers are left out."""
    prefix = f"explainer/{name}/fit/"
    return {
        k: m
        for k, m in audit.metrics.items()
        if k.startswith(prefix) and "/" not in k.removeprefix(prefix) and m.is_taken and m.direction != "none"
    }


def _studies(audit: Audit) -> list[dict[str, Any]]:
    """Return what studies with people found."""
    return _rows({k: m for k, m in audit.metrics.items() if k.startswith("study/") and m.status == "passed"})


def _rows(metrics: Mapping[str, Measure]) -> list[dict[str, Any]]:
    rows = []
    for name, m in metrics.items():
        title, sentence = words(name)
        interval_words = "" if m.low is None or m.high is None else f"{number(m.low)} to {number(m.high)}"
        rows.append(
            {
                "title": title,
                "sentence": sentence,
                "better": ARROW[m.direction],
                "note": m.reason,
                "value": number(m.value),
                "range": interval_words,
                "null": number(m.null),
                "n": m.n,
                "interval": interval(m),
                "histogram": histogram(m.per_image),
            }
        )
    return rows


def _model(audit: Audit) -> dict[str, Any]:
    metrics = {
        k: m
        for k, m in audit.metrics.items()
        if k.startswith("model/") and not split(k)[1] and not k.startswith("model/reliance/") and m.status == "passed"
    }
    classes = {k: m for k, m in metrics.items() if k.startswith("model/accuracy/")}
    rest = {k: m for k, m in metrics.items() if k not in classes}
    order = sorted(rest, key=lambda k: (k != "model/accuracy", k not in ("model/nll", "model/ece"), k))
    return {
        "model_rows": _rows({k: rest[k] for k in order}),
        "by_class": [
            {"name": k.removeprefix("model/accuracy/"), "width": f"{100 * m.value:.1f}", "share": f"{m.value:.1%}"}
            for k, m in classes.items()
        ],
        "reliance_table": _reliance_table(audit),
    }


def _reliance_table(audit: Audit) -> dict[str, Any] | None:
    """Show the numbers behind the findings: for each class its score and the measures that have a null."""
    rows: dict[str, dict[str, Measure]] = {}
    for name, m in audit.metrics.items():
        _, _, metric = split(name)
        if metric.startswith("reliance/") and metric.count("/") > 1:
            _, owner, measure = metric.split("/", 2)
            if owner != "worst":
                rows.setdefault(owner, {})[measure] = m
    if not rows:
        return None
    columns = [c for c in RELIANCE_SHOWN if any(c in row for row in rows.values())]
    titles = [words("model/reliance/x/" + c)[0] for c in columns]
    return {
        "owner": "class",
        "columns": titles,
        "drawn": "",
        "rows": [_grid_row(k, r, columns) for k, r in rows.items()],
    }


def _layers(audit: Audit) -> dict[str, Any] | None:
    rows: dict[str, dict[str, Measure]] = {}
    for name, m in audit.metrics.items():
        family, layer, metric = split(name)
        if family == "model" and layer:
            rows.setdefault(layer, {})[metric] = m
    if not rows:
        return None
    named = list(dict.fromkeys(metric for row in rows.values() for metric in row))
    columns = [c for c in SHOWN if c in named] or named[:8]
    return {
        "owner": "layer",
        "columns": [words("model/" + c)[0] for c in columns],
        "drawn": "cosines of its rows",
        "rows": [_grid_row(layer, row, columns) | {"drawing": _cosines(row)} for layer, row in rows.items()],
        "rest": len(named) - len(columns),
    }


def _grid_row(owner: str, row: Mapping[str, Measure], columns: list[str]) -> dict[str, Any]:
    cells = [
        None
        if (m := row.get(c)) is None
        else {"status": m.status, "reason": m.reason, "value": number(m.value), "null": number(m.null)}
        for c in columns
    ]
    return {"owner": owner, "cells": cells}


def _cosines(row: Mapping[str, Measure]) -> str:
    """Draw the histogram of all pairs of rows: how alike the weights of different units are."""
    m = row.get("cosine_histogram")
    if m is None or m.status != "passed" or not m.per_image:
        return ""
    return bars(m.per_image, "0", "1")


def _not_measured(audit: Audit) -> list[dict[str, Any]]:
    by_reason: dict[tuple[str, str], list[str]] = {}
    for name, m in audit.metrics.items():
        if m.status != "passed":
            by_reason.setdefault((m.status, m.reason), []).append(name)
    return [
        {"status": status, "reason": reason, "names": names[:12], "more": max(0, len(names) - 12)}
        for (status, reason), names in sorted(by_reason.items())
    ]


def _cost(audit: Audit) -> list[dict[str, Any]]:
    """Say where the time went: forward passes per image and seconds of every check."""
    return [
        {
            **c,
            "explainers": ", ".join(c["explainers"]),
            "at_most": number(c["passes_per_image_at_most"]),
            "passes": number(c["passes_per_image"]),
            "seconds": f"{c['seconds']:.1f}",
        }
        for c in audit.cost
    ]


def _card(audit: Audit) -> dict[str, Any]:
    fields = (audit.card or fill({}))["fields"]
    m, d = audit.model, audit.data
    shape = " x ".join(str(n) for n in m["input_shape"])
    facts = [
        ("classes", f"{len(m['classes'])}: {', '.join(m['classes'][:20])}{', …' if len(m['classes']) > 20 else ''}"),
        ("input", f"images of {shape} (channels, height, width)"),
        ("size", f"{m['parameters']:,} parameters"),
        ("evaluated on", f"{d['spec']}, {d['n']} images, {d['unlabelled']} without a label"),
        ("model digest", m["digest"]),
        ("data digest", d["digest"]),
    ]
    named = [{"name": k.replace("_", " "), "value": v, "meaning": FIELDS[k]} for k, v in fields.items()]
    return {"fields": named, "facts": facts, "missing": sum(not value for value in fields.values())}


def _reproduce(audit: Audit) -> list[tuple[str, Any]]:
    rows = [("seed", audit.seed), ("audit digest", audit.digest), ("took", f"{audit.seconds:.0f} s")]
    rows += [(f"explainer {n}", e.get("digest") or e.get("problem", "")) for n, e in audit.explainers.items()]
    return rows + [(f"version of {k}", v) for k, v in sorted(audit.versions.items())]
