"""Findings: what the checks of a model and its explainers mean, in sentences with how good the news is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from auditor.auditing.record import Audit
from auditor.metrics.measure import Measure
from auditor.metrics.thresholds import CHANGED, STEADY

Level = Literal["good", "warn", "bad"]

AGREES, AGREES_ENOUGH = 0.95, 0.8
BASIS, UNEXPLAINED, OVERSURE = 0.8, 0.5, 0.1


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence with how good the news is; ``about`` is an explainer's name, or empty for the model."""

    level: Level
    text: str
    about: str = ""


def findings(audit: Audit) -> list[Finding]:
    """Return what the audit found, of the model first, then of each explainer."""
    sentences = list(_model(audit))
    for name, info in audit.explainers.items():
        if info.get("problem"):
            sentences.append(Finding("bad", f"It does not verify: {info['problem']}", name))
        else:
            sentences += _explainer(audit, name)
    return sentences


def worst(sentences: Iterable[Finding]) -> Level:
    """Return the worst level of some findings."""
    levels = {f.level for f in sentences}
    return "bad" if "bad" in levels else "warn" if "warn" in levels else "good"


def _model(audit: Audit) -> Iterator[Finding]:
    accuracy = audit.metrics.get("model/accuracy")
    if accuracy is None or accuracy.status != "passed":
        yield Finding("warn", "How often the model is right is not known: the data has no labels.")
        return
    null = accuracy.null or 0.0
    better = accuracy.low is not None and accuracy.low > null
    text = f"The model is right on {accuracy.value:.1%} of {accuracy.n} labelled images"
    yield Finding(
        "good" if better else "bad",
        f"{text}." if better else f"{text}, no better than always saying the most frequent class ({null:.1%}).",
    )
    worst = audit.metrics.get("model/worst_class_accuracy")
    if worst is not None and worst.status == "passed" and worst.value < 0.8 * accuracy.value:
        yield Finding("warn", f"One class does much worse than the rest: {worst.value:.1%} of its images are right.")
    ece = audit.metrics.get("model/ece")
    if ece is not None and ece.status == "passed" and ece.value > OVERSURE:
        yield Finding("warn", f"How sure it is misses how often it is right by {ece.value:.0%} on average.")


def _explainer(audit: Audit, name: str) -> Iterator[Finding]:
    def get(metric: str) -> Measure | None:
        m = audit.metrics.get(f"explainer/{name}/{metric}")
        return m if m is not None and m.status == "passed" else None

    left_out = {
        k.removesuffix(f" of {name}"): why for k, why in audit.not_measured.items() if k.endswith(f" of {name}")
    }
    for reason in dict.fromkeys(left_out.values()):
        checks = ", ".join(check for check, why in left_out.items() if why == reason)
        yield Finding("warn", f"Not checked: {checks}; {reason}.", name)
    if audit.explainers[name].get("held_out", {}).get("known_from") == "guess":
        text = "Some audited images may be ones it was fitted on: it has no record of them. Fit it again."
        yield Finding("warn", text, name)
    for metric in ("randomisation", "completeness_gap", "f_cls", "flip_gain", "noise_similarity"):
        m = audit.metrics.get(f"explainer/{name}/{metric}")
        if m is not None and m.status == "failed":
            yield Finding("bad", f"The check {metric} failed: {m.reason}.", name)
        elif m is not None and m.status == "skipped" and metric == "randomisation" not in left_out:
            yield Finding("warn", f"Whether it depends on the model was not checked: {m.reason}.", name)
    if m := get("randomisation"):
        if m.value > CHANGED:
            yield Finding("warn", f"It changes little ({m.value:.2f}) when the model's weights are destroyed.", name)
        else:
            yield Finding(
                "good", f"It depends on the model: with destroyed weights it says something else ({m.value:.2f}).", name
            )
    if m := get("f_cls"):
        level: Level = "good" if m.value >= AGREES else "warn"
        more = "" if m.value >= AGREES_ENOUGH else " That is too little to read it as the model's reasons."
        yield Finding(
            level, f"Put in the model's place, it comes to the same class on {m.value:.0%} of images.{more}", name
        )
    if (m := get("residual_share")) and m.value > UNEXPLAINED:
        yield Finding("warn", f"It leaves {m.value:.0%} of the model's value unexplained.", name)
    if m := get("flip_gain"):
        if m.low is not None and m.low > 0:
            yield Finding("good", "Its heatmaps point to pixels that matter: better than random maps.", name)
        else:
            yield Finding(
                "warn", "Its heatmaps are not shown to be better than random ones: read them with care.", name
            )
    if m := get("noise_similarity"):
        if m.value >= STEADY:
            yield Finding("good", f"A little noise in the image hardly changes it ({m.value:.2f} of 1).", name)
        else:
            yield Finding("warn", f"A little noise in the image changes what it says ({m.value:.2f} of 1).", name)
    m = get("basis_stability")
    if m is not None and m.value < BASIS:
        yield Finding("warn", f"Fitted again it finds partly other concepts ({m.value:.2f} of 1).", name)
