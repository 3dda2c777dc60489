"""Report: an audit as one self-contained HTML page that a person without special knowledge can read.

No scripts, no fonts, nothing from elsewhere: it opens from a mail, in MLflow's artifact viewer, and prints to paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from auditor.auditing.audit import Audit
from auditor.auditing.data_quality import sentences as data_sentences
from auditor.auditing.images import held_out_words
from auditor.metrics.measure import Measure
from auditor.metrics.names import split, words
from auditor.release.findings import Finding
from auditor.release.gate import Gate, label_of, passed
from auditor.release.model_card import FIELDS, fill
from auditor.release.questions import Answer, believed, headline, reasons, to_look_at
from auditor.reports.style import STYLE, bars, esc, histogram, interval, number

FAITHFUL = ("f_cls", "f_reg", "residual_share", "completeness_gap", "flip_area", "deletion_area", "flip_gain")
STABLE = ("noise_similarity", "noise_c2", "randomisation", "basis_stability")
SHAPE = ("orthogonality", "locality")
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
    label = label_of(audit)
    sections = [
        _head(audit, label),
        *([_gate(gate)] if gate is not None else []),
        _headline(audit),
        _reasons(audit),
        _believed(audit),
        _looks_at(audit),
        _measured_on(audit),
        _data_quality(audit),
        _group(audit, "How faithful are the explanations?", FAITHFUL, WHY_FAITHFUL),
        _group(audit, "How stable are they?", STABLE, WHY_STABLE),
        _group(audit, "How readable are the heatmaps?", SHAPE, WHY_SHAPE),
        _group(audit, "Does one group of concepts carry a class?", TOGETHER, WHY_TOGETHER),
        _model(audit),
        _layers(audit),
        _not_measured(audit),
        _cost(audit),
        _card(audit),
        _reproduce(audit),
    ]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>Audit of {esc(label)}</title><style>{STYLE}</style></head><body>\n"
        + "\n".join(s for s in sections if s)
        + "\n</body></html>\n"
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
WHY_SHAPE = "Heatmaps help when different concepts light up in different places, and each in few of them."


def _head(audit: Audit, label: str) -> str:
    d = audit.data
    return (
        f"<h1>Audit of {esc(label)}</h1><p class='lead'>{esc(audit.time.replace('T', ' ').replace('+00:00', ' UTC'))}; "
        f"{d['n']} images of {esc(d['spec'])}, {d['n_explained']} of them explained"
        f"{'; taken: ' + esc(d['sample']) if 'sample' in d else ''}; "
        f"{len(audit.explainers)} explainer{'' if len(audit.explainers) == 1 else 's'}.</p>"
    )


def _gate(gate: Gate) -> str:
    bad = [c for c in gate.checks if c.verdict == "fail"]
    rows = "".join(f"<li class='bad'><code>{esc(c.metric)}</code>: {esc(c.reason)}</li>" for c in bad[:12])
    level, word = ("good", "passes") if gate.verdict == "pass" else ("bad", "fails")
    return (
        f"<div class='verdict {level}'><h2>The gate {word}</h2><p>"
        f"{passed(gate.checks)} of {len(gate.checks)} limits of {esc(gate.policy)} hold.</p>"
        f"<ul class='finds'>{rows}</ul></div>"
    )


def _headline(audit: Audit) -> str:
    level, text = headline(audit)
    rows = "".join(
        f"<li class={a.level!r}>{esc(a.question)} <b>{esc(a.text)}.</b></li>" for a in (reasons(audit), believed(audit))
    )
    return f"<div class='verdict {level}'><h2>{esc(text)}</h2><ul class='finds'>{rows}</ul></div>"


def _reasons(audit: Audit) -> str:
    """Say what each class hangs on, with pictures, before anything is said of explanations."""
    answer = reasons(audit)
    entries = to_look_at(audit)
    about = audit.reliance or {}
    beside_pictures = {f["sentence"] for f in entries}
    parts = [f"<section class='verdict {answer.level}'><h2>{esc(answer.question)}</h2>{_short(answer)}"]
    parts += [_finding(f, audit.finding_pictures.get(f["name"])) for f in entries]
    parts.append(_finds(f for f in answer.sentences if f.text not in beside_pictures))
    if about.get("images"):
        heat = ", ".join([str(about["source"]), *about.get("sources", {})])
        parts.append(
            f"<p class='pale small'>Measured by hiding and transplanting on {esc(about['images'])}; deciding regions "
            f"by {esc(heat)}; {about['passes_per_image']:.0f} passes per image, a gradient counted as three."
            f"{' ' + esc(about['regions']) + '.' if about.get('regions') else ''}</p>"
        )
    return "".join(parts) + "</section>"


def _finding(f: Mapping[str, Any], pictures: list[dict[str, Any]] | None) -> str:
    level = "bad" if f["verdict"] == "found" else "warn"
    shown = "".join(
        f"<figure><img src='{p['whole']}' alt='image {esc(p['id'])}' title='{esc(p['id'])}'>"
        + (f"<img class='spot' src='{p['spot']}' alt='the deciding region of {esc(p['id'])}'>" if p["spot"] else "")
        + "</figure>"
        for p in pictures or ()
    )
    none = "<p class='pale small'>Its pictures are on the page that was written with the audit itself.</p>"
    concepts = "".join(
        f"<li>{esc(c['explainer'])}: {esc(c['label'])} ({c['share']:.0%} of its heat lies in the region, it adds "
        f"{_signed(c['adds'])})</li>"
        for c in f.get("concepts", ())
    )
    involved = f"<p class='small'>Concepts that show it:</p><ul class='small'>{concepts}</ul>" if concepts else ""
    title = "Look at these pictures" if level == "warn" else "Found"
    return (
        f"<div class='finding {level}'><h3>{title}: {esc(f['name'])}</h3><p>{esc(f['sentence'])}</p>"
        f"<div class='spots'>{shown or none}</div>{involved}<p><b>What to do.</b> {esc(f['advice'])}</p></div>"
    )


def _short(answer: Answer) -> str:
    return f"<p><b>{esc(answer.text)}.</b></p>"


def _believed(audit: Audit) -> str:
    answer = believed(audit)
    parts = [f"<section class='verdict {answer.level}'><h2>{esc(answer.question)}</h2>{_short(answer)}"]
    parts.append(_finds(f for f in answer.sentences if not f.about))
    for name, info in audit.explainers.items():
        about_it = [f for f in answer.sentences if f.about == name]
        parts.append(
            f"<h3>{esc(name)}<span class='tag'>{esc(info.get('kind', 'not verified'))}</span></h3>{_finds(about_it)}"
        )
    return "".join(parts) + "</section>"


def _finds(sentences: Iterable[Finding]) -> str:
    return f"<ul class='finds'>{''.join(f'<li class={f.level!r}>{esc(f.text)}</li>' for f in sentences)}</ul>"


def _looks_at(audit: Audit) -> str:
    parts = ["<h2>What the model looks at</h2>"]
    if not audit.explainers:
        return ""
    if not audit.pictures:
        return parts[0] + "<p class='pale'>Pictures are on the page that was written with the audit itself.</p>"
    for name, shown in audit.pictures.items():
        info = audit.explainers.get(name, {})
        layer = f", layer {esc(info['layer'])}" if info.get("layer") else ""
        parts.append(f"<h3>{esc(name)}<span class='tag'>{esc(info.get('kind', ''))}{layer}</span></h3>")
        if shown["concepts"]:
            parts.append(
                "<p class='pale'>Each row is a concept: images that show it most, where it is seen in red, and what it "
                "adds to (+) or takes from (&minus;) the score of the classes it matters for.</p>"
            )
            parts += [_concept(c) for c in shown["concepts"]]
        if shown["examples"]:
            parts.append(
                "<p class='pale'>Single images: the prediction, then the concepts behind it, the strongest first. Red "
                "counts for the class, blue against it.</p>"
            )
            parts += [_case(e) for e in shown["examples"]]
    return "".join(parts)


def _concept(c: Mapping[str, Any]) -> str:
    classes = "<br>".join(f"{esc(label)} {_signed(value)}" for label, value in c["classes"])
    shots = "".join(f"<img src='{s['src']}' alt='{esc(s['alt'])}' title='{esc(s['alt'])}'>" for s in c["shots"])
    return (
        f"<div class='concept'><div><b>{esc(c['label'])}</b><span class='small'>{classes}</span></div>"
        f"<div class='shots'>{shots or 'no image shows it'}</div></div>"
    )


def _case(e: Mapping[str, Any]) -> str:
    truth = f", in truth {esc(e['truth'])}" if e["truth"] is not None and e["truth"] != e["prediction"] else ""
    figures = [
        f"<figure><img src='{e['src']}' alt='image {esc(e['id'])}'><figcaption><b>{esc(e['prediction'])}</b> "
        f"{e['probability']:.0%}{truth}</figcaption></figure>"
    ]
    for part in e["parts"]:
        image = f"<img src='{part['src']}' alt='heatmap of {esc(part['label'])}'>" if part["src"] else ""
        value = "" if part["contribution"] is None else _signed(part["contribution"])
        figures.append(f"<figure>{image}<figcaption>{value} {esc(part['label'])}</figcaption></figure>")
    if e["bias"] is not None:
        more = f"{e['more']} more concepts<br>" if e["more"] else ""
        figures.append(
            f"<figure><figcaption class='pale'>{more}start {_signed(e['bias'])}<br>unexplained {_signed(e['residual'])}"
            f"<br>= score {number(e['value'])} of {esc(e['target'])}{_explained(e)}</figcaption></figure>"
        )
    return f"<div class='case'>{''.join(figures)}</div>"


def _explained(e: Mapping[str, Any]) -> str:
    share = e.get("explained")
    return "" if share is None else f"<br>the concepts shown explain {share:.0%}"


def _signed(x: float) -> str:
    x = 0.0 if abs(x) < 0.005 else x
    return f"<span class='{'pos' if x >= 0 else 'neg'}'>{'+' if x >= 0 else '&minus;'}{abs(x):.2f}</span>"


def _measured_on(audit: Audit) -> str:
    """Say how many images each explainer did not know; audits of earlier releases did not store that."""
    about = {name: info["held_out"] for name, info in audit.explainers.items() if info.get("held_out")}
    if not about:
        return ""
    rows = "".join(f"<dt>{esc(name)}</dt><dd>{esc(held_out_words(entry))}.</dd>" for name, entry in about.items())
    return (
        "<h2>Which images were they measured on?</h2><p class='pale'>Only on images that no explainer depends on: "
        f"{esc(audit.data.get('explained') or audit.data['n_explained'])} were explained.</p><dl>{rows}</dl>"
    )


def _data_quality(audit: Audit) -> str:
    """Say which labels and images of the data look wrong."""
    rows = "".join(f"<li>{esc(line)}</li>" for line in data_sentences(audit.data))
    return f"<h2>Can the data be trusted?</h2><ul>{rows}</ul>" if rows else ""


def _group(audit: Audit, title: str, metrics: tuple[str, ...], why: str) -> str:
    parts = [f"<h2>{title}</h2><p class='pale'>{why}</p>"]
    for name, info in audit.explainers.items():
        rows = {f"explainer/{name}/{m}": audit.metrics.get(f"explainer/{name}/{m}") for m in metrics}
        measured = {k: m for k, m in rows.items() if m is not None and m.status == "passed"}
        if not measured:
            continue
        stages = {
            k: m
            for k, m in audit.metrics.items()
            if "randomisation" in metrics and k.startswith(f"explainer/{name}/randomisation/") and m.status == "passed"
        }
        tag = f"<span class='tag'>{esc(info.get('kind', ''))}</span>"
        parts.append(f"<h3>{esc(name)}{tag}</h3>{_table(measured | stages)}")
    return "".join(parts) if len(parts) > 1 else ""


def _table(metrics: Mapping[str, Measure]) -> str:
    body = []
    for name, m in metrics.items():
        title, sentence = words(name)
        better = f" <span class='pale small'>{ARROW[m.direction]}</span>" if m.direction != "none" else ""
        note = f"<br><span class='pale small'>{esc(m.reason)}</span>" if m.reason else ""
        body.append(
            f"<tr><td><b>{esc(title)}</b>{better}<br><span class='pale small'>{esc(sentence)}</span>{note}</td>"
            f"<td class='num'><b>{number(m.value)}</b><br><span class='pale small'>{_range(m)}</span></td>"
            f"<td class='num'>{number(m.null)}</td><td class='num'>{m.n}</td>"
            f"<td class='draw'>{interval(m)}</td><td class='draw'>{histogram(m.per_image)}</td></tr>"
        )
    return (
        "<div class='scroll'><table><thead><tr><th>measure</th><th class='num'>value</th><th class='num'>beside</th>"
        "<th class='num'>n</th><th class='draw'>interval</th><th class='draw'>per image</th></tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _range(m: Measure) -> str:
    return "" if m.low is None or m.high is None else f"{number(m.low)} to {number(m.high)}"


def _model(audit: Audit) -> str:
    metrics = {
        k: m
        for k, m in audit.metrics.items()
        if k.startswith("model/") and not split(k)[1] and not k.startswith("model/reliance/") and m.status == "passed"
    }
    classes = {k: m for k, m in metrics.items() if k.startswith("model/accuracy/")}
    rest = {k: m for k, m in metrics.items() if k not in classes}
    if not rest:
        return ""
    order = sorted(rest, key=lambda k: (k != "model/accuracy", k not in ("model/nll", "model/ece"), k))
    parts = [f"<h2>The model itself</h2>{_table({k: rest[k] for k in order})}"]
    if classes:
        bars = "".join(
            f"<div><span>{esc(k.removeprefix('model/accuracy/'))}</span><i style='width:{100 * m.value:.1f}%'></i>"
            f"<span>{m.value:.1%}</span></div>"
            for k, m in classes.items()
        )
        parts.append(f"<h3>Right, by class</h3><div class='bars'>{bars}</div>")
    return "".join(parts) + _reliance_table(audit)


def _reliance_table(audit: Audit) -> str:
    """Show the numbers behind the findings: for each class its score and the measures that have a null."""
    rows: dict[str, dict[str, Measure]] = {}
    for name, m in audit.metrics.items():
        _, _, metric = split(name)
        if metric.startswith("reliance/") and metric.count("/") > 1:
            _, owner, measure = metric.split("/", 2)
            if owner != "worst":
                rows.setdefault(owner, {})[measure] = m
    if not rows:
        return ""
    columns = [c for c in RELIANCE_SHOWN if any(c in row for row in rows.values())]
    head = "".join(f"<th class='num'>{esc(words('model/reliance/x/' + c)[0])}</th>" for c in columns)
    body = "".join(
        f"<tr><td>{esc(owner)}</td>" + "".join(f"<td class='num'>{_cell(row.get(c))}</td>" for c in columns) + "</tr>"
        for owner, row in rows.items()
    )
    return (
        "<h3>What each class hangs on, in numbers</h3><p class='pale'>Shares of images; in brackets the same with a "
        "region from elsewhere, or with what another image has. More measures and their intervals are in the JSON.</p>"
        f"<div class='scroll'><table><thead><tr><th>class</th>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _layers(audit: Audit) -> str:
    rows: dict[str, dict[str, Measure]] = {}
    for name, m in audit.metrics.items():
        family, layer, metric = split(name)
        if family == "model" and layer:
            rows.setdefault(layer, {})[metric] = m
    if not rows:
        return ""
    named = list(dict.fromkeys(metric for row in rows.values() for metric in row))
    columns = [c for c in SHOWN if c in named] or named[:8]
    head = "".join(f"<th class='num'>{esc(words('model/' + c)[0])}</th>" for c in columns)
    body = "".join(
        f"<tr><td>{esc(layer)}</td>"
        + "".join(f"<td class='num'>{_cell(row.get(c))}</td>" for c in columns)
        + f"<td class='draw'>{_cosines(row)}</td></tr>"
        for layer, row in rows.items()
    )
    rest = len(named) - len(columns)
    more = f" {rest} more measures of each layer are in the JSON." if rest else ""
    return (
        "<h2>Layer by layer</h2><p class='pale'>In brackets what the same layer gives with random weights: a number "
        f"close to it says nothing about training.{more}</p>"
        f"<div class='scroll'><table><thead><tr><th>layer</th>{head}<th class='draw'>cosines of its rows</th></tr>"
        f"</thead><tbody>{body}</tbody></table></div>"
    )


def _cosines(row: Mapping[str, Measure]) -> str:
    """Draw the histogram of all pairs of rows: how alike the weights of different units are."""
    m = row.get("cosine_histogram")
    if m is None or m.status != "passed" or not m.per_image:
        return ""
    return bars(m.per_image, "0", "1")


def _cell(m: Measure | None) -> str:
    if m is None:
        return ""
    if m.status != "passed":
        return f"<span class='pale small' title='{esc(m.reason)}'>{m.status}</span>"
    return number(m.value) + ("" if m.null is None else f"<br><span class='pale small'>({number(m.null)})</span>")


def _not_measured(audit: Audit) -> str:
    odd = {k: m for k, m in audit.metrics.items() if m.status != "passed"}
    if not odd:
        return "<h2>What was not measured</h2><p>Everything was measured.</p>"
    by_reason: dict[tuple[str, str], list[str]] = {}
    for name, m in odd.items():
        by_reason.setdefault((m.status, m.reason), []).append(name)
    rows = "".join(
        f"<tr><td><b class='{'missing' if status == 'failed' else ''}'>{status}</b></td>"
        f"<td>{'<br>'.join(f'<code>{esc(n)}</code>' for n in names[:12])}"
        f"{f'<br>and {len(names) - 12} more' if len(names) > 12 else ''}</td><td>{esc(reason)}</td></tr>"
        for (status, reason), names in sorted(by_reason.items())
    )
    return (
        "<h2>What was not measured</h2><p class='pale'>A measure that failed or was skipped never passes a gate.</p>"
        f"<table><thead><tr><th></th><th>measure</th><th>why</th></tr></thead><tbody>{rows}</tbody></table>"
    )


def _cost(audit: Audit) -> str:
    """Say where the time went: forward passes per image and seconds of every check."""
    if not audit.cost:
        return ""
    rows = "".join(
        f"<tr><td>{esc(c['check'])}</td><td>{esc(', '.join(c['explainers']))}</td><td class='num'>{c['images']}</td>"
        f"<td class='num'>{number(c['passes_per_image_at_most'])}</td>"
        f"<td class='num'>{number(c['passes_per_image'])}</td>"
        f"<td class='num'>{c['seconds']:.1f}</td><td class='small'>{esc(c['note'])}</td></tr>"
        for c in audit.cost
    )
    return (
        "<h2>Where the time went</h2><p class='pale'>Forward passes of the model for every image that a check measured "
        "on: how many it was allowed, and how many it took. Gradients and runs of single layers are in the seconds.</p>"
        "<div class='scroll'><table><thead><tr><th>check</th><th>explainers</th><th class='num'>images</th>"
        "<th class='num'>at most</th><th class='num'>passes</th><th class='num'>seconds</th><th></th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _card(audit: Audit) -> str:
    fields = (audit.card or fill({}))["fields"]
    rows = "".join(
        f"<dt>{esc(key.replace('_', ' '))}</dt>"
        + (
            f"<dd>{esc(value)}</dd>"
            if value
            else f"<dd><span class='missing'>not given.</span> {esc(FIELDS[key])}</dd>"
        )
        for key, value in fields.items()
    )
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
    rows += "".join(f"<dt>{k}</dt><dd>{esc(v)}</dd>" for k, v in facts)
    missing = [key for key, value in fields.items() if not value]
    hint = (
        f"<p class='pale'>{len(missing)} of {len(fields)} fields are missing; give them in a file: "
        "<code>auditor audit … --card card.toml</code></p>"
        if missing
        else ""
    )
    return f"<h2>Model card</h2>{hint}<dl>{rows}</dl>"


def _reproduce(audit: Audit) -> str:
    rows = [("seed", audit.seed), ("audit digest", audit.digest), ("took", f"{audit.seconds:.0f} s")]
    rows += [(f"explainer {n}", e.get("digest") or e.get("problem", "")) for n, e in audit.explainers.items()]
    rows += [(f"version of {k}", v) for k, v in sorted(audit.versions.items())]
    command = f"<pre><code>{esc(audit.command)}</code></pre>" if audit.command else ""
    return (
        "<h2>How to get the same numbers again</h2><p class='pale'>The images are a fixed choice from the data; the "
        "seed moves only noise, shuffled weights and the intervals.</p>"
        f"{command}<dl>{''.join(f'<dt>{esc(k)}</dt><dd><code>{esc(v)}</code></dd>' for k, v in rows)}</dl>"
    )
