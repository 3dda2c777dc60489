"""Draft: a first policy from an audit, every limit with a margin taken from its interval and a line that explains it.

The margin is what chance could explain: the way from the value to the bad end of its 95% interval, and more where that
is known to be too little: a share that was 1 on all n images may still be 1 - 3/n, weights are shuffled anew with every
seed, and training the same model again moves the metrics of its explanations by the shares in ``TRAINING``. The images
of an audit are fixed, so another seed moves a value far less than that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping

from auditor.auditing.record import Audit
from auditor.metrics.measure import Measure
from auditor.metrics.names import split, words
from auditor.metrics.thresholds import FOUND_FROM
from auditor.release.gate import label_of

RELIANCE = "model/reliance"
RELIANCE_LIMITS = (f"{RELIANCE}/found", f"{RELIANCE}/worst/score")
WIDER = 1.5  # of the way to the end of the interval
NO_INTERVAL = 0.1  # share of the value, where there is no interval
# Share of the value by which an honest new training moves it; set on training seeds 1 to 5, 11 to 15 of bench_gate.py
TRAINING = {
    "c1_local": 1.0,
    "c2_local": 1.5,
    "c1_certified": 1.0,
    "c2_certified": 1.5,
    "nll": 0.5,
    "ece": 0.5,
    "f_cls": 0.03,
    "f_reg": 0.3,
    "residual_share": 0.6,
    "flip_area": 0.25,
    "deletion_area": 0.25,
    "flip_gain": 0.5,
    "noise_c2": 0.75,
    "noise_similarity": 0.05,
    "heatmap_overlap": 0.3,
    "heatmap_spread": 0.05,
    "basis_stability": 0.15,
}
ROUNDING = 1e-9
# Metrics of which less is better only so far: heatmaps that stare at one spot, a layer that no longer reacts. The share
# of the value is by how much less it may become.
BOTH_WAYS = {"heatmap_spread": 0.25, "c1_local": 0.5, "c1_certified": 0.5}
# A certified bound is at least what was reached; beyond this many times that, it says nothing of the model.
MOST_SLACK = 100.0
REACHED = {"c1_certified": ("c1_local", "c1_sampled"), "c2_certified": ("c2_local", "c2_sampled")}


def draft_policy(audit: Audit) -> str:
    """Return a policy as TOML text, ready to be read and changed by a person."""
    lines = [
        f"# Limits for {label_of(audit)}, drafted from its audit of {audit.time or 'today'} on {audit.data['spec']}",
        f"# ({audit.data['n']} images, {audit.data['n_explained']} explained). Change what you know better, then:",
        "#   auditor gate MODEL --policy policy.toml            exit 0: all limits hold, 1: some do not, 2: no verdict",
        "# A metric that is NaN, skipped or missing never passes. Delete a limit to stop caring about it.",
        "schema_version = 1",
        f"explainers = {json.dumps(sorted(n for n, e in audit.explainers.items() if not e.get('problem')))}"
        "  # must be attached, and every byte as it was attached",
        "",
        "[drafted]  # for the record; the gate does not read it",
        f"model = {json.dumps(label_of(audit))}",
        f"model_digest = {json.dumps(audit.model['digest'])}",
        f"data = {json.dumps(audit.data['spec'])}",
        f"data_digest = {json.dumps(audit.data['digest'])}",
        f"audit_digest = {json.dumps(audit.digest)}",
    ]
    order = sorted(audit.metrics, key=lambda name: (not name.startswith("model/"), name))
    for name in order:
        if not _is_of_fit(name):
            lines += _limit_lines(name, audit.metrics[name], audit.metrics)
    return "\n".join([*lines, *_fit_lines(audit.metrics), *_baseline_lines()]) + "\n"


def limit_of(name: str, measure: Measure) -> float | None:
    """Return the drafted limit (a floor where up is better, else a ceiling); None where none makes sense."""
    family, owner, metric = split(name)
    if measure.status != "passed" or measure.direction == "none" or metric == "verified":
        return None
    if metric.startswith("reliance/"):  # not what it is today: a shortcut that is there already is none to allow
        return {"reliance/found": 0.0, "reliance/worst/score": FOUND_FROM}.get(metric)
    if family == "model" and (owner or metric == "cross_entropy"):  # nll is the same on more images
        return None  # a person who cares for a single layer adds a limit by hand
    metric = metric.removeprefix("fit/")  # has the margin of the same metric of the audit, where there is one
    if metric in ("c1_sampled", "c2_sampled"):  # lower estimates: another seed draws other pairs
        return None
    if metric.startswith("randomisation"):  # must differ from the null of 1; how much is chance with few concepts
        return round(max(measure.high or 0.0, (measure.value + 1) / 2), 3) if metric == "randomisation" else None
    if metric == "completeness_gap":
        return 1e-4
    sign = 1.0 if measure.direction == "up" else -1.0
    bad_end = measure.low if measure.direction == "up" else measure.high
    margin = NO_INTERVAL * abs(measure.value) if bad_end is None else WIDER * abs(measure.value - bad_end)
    margin = max(margin, TRAINING.get(metric, 0.0) * abs(measure.value))
    if metric.partition("/")[0] in ("accuracy", "worst_class_accuracy", "f_cls"):
        margin = max(margin, 3 / max(measure.n, 1))
    limit = measure.value - sign * max(margin, ROUNDING)
    return _rounded(limit, measure.direction == "up")


def other_limit_of(name: str, measure: Measure) -> float | None:
    """Return the limit on the other side, for metrics that can be too good; None for all others."""
    share = BOTH_WAYS.get(split(name)[2])
    if share is None or measure.status != "passed" or measure.direction != "down":
        return None
    margin = max(share * abs(measure.value), WIDER * abs(measure.value - measure.low) if measure.low is not None else 0)
    return _rounded(measure.value - margin, True)


def says_nothing(name: str, metrics: Mapping[str, Measure]) -> str:
    """Return why a value says nothing of the model, so that no limit on it would; empty where it does.

    A certified bound holds for every image there could be. Where it is hundreds of times what any image of the data
    comes near to, it moves with the depth of the network and not with what was learned.
    """
    prefix, _, metric = name.rpartition("/")
    reached = [metrics.get(f"{prefix}/{other}") for other in REACHED.get(metric, ())]
    values = [m.value for m in reached if m is not None and m.is_taken and m.value > 0]
    measure = metrics[name]
    if not values or not measure.is_taken or measure.value <= MOST_SLACK * max(values):
        return ""
    return f"{measure.value:.3g} is {measure.value / max(values):.1g} times what was reached, so it says nothing"


def _limit_lines(name: str, measure: Measure, metrics: Mapping[str, Measure]) -> Iterator[str]:
    limit, empty = limit_of(name, measure), says_nothing(name, metrics)
    title, sentence = words(name)
    if limit is None or empty:
        named = name in RELIANCE_LIMITS or not name.startswith(f"{RELIANCE}/")  # not every class
        if empty or (measure.status != "passed" and named):
            yield ""
            why = empty or f"{measure.status}, {' '.join(measure.reason.split())}"
            yield f"# no limit on {name}: {why}"
        return
    yield ""
    yield f"# {title}: {sentence}." if sentence else f"# {title}."
    null = (
        ""
        if measure.null is None
        else f"; a random {'map' if 'flip' in name or 'area' in name else 'one'} gives {measure.null:.4g}"
    )
    where = (
        "" if measure.low is None or measure.high is None else f", 95% interval {measure.low:.4g} to {measure.high:.4g}"
    )
    yield f"# Today {measure.value:.4g}{where} (n = {measure.n}{null})."
    yield f"[limits.{json.dumps(name)}]"
    other = other_limit_of(name, measure)
    if other is not None:
        yield f"min = {other!r}  # much less is no better: it may have stopped looking at most of the image"
    if name in RELIANCE_LIMITS and measure.value > limit:
        yield "# TODAY IT IS BEYOND THIS LIMIT: read the findings in the audit's report before you change it."
    yield f"{'min' if measure.direction == 'up' else 'max'} = {limit!r}"


def _is_of_fit(name: str) -> bool:
    family, _, metric = split(name)
    return family == "explainer" and metric.startswith("fit/")


def _fit_lines(metrics: Mapping[str, Measure]) -> Iterator[str]:
    """Yield a limit for everything the fits measured that has a better side, as comments.

    The same explainer has the same values at every gate; such a limit judges the next fit, so a person switches it on.
    """
    limits = {name: limit_of(name, m) for name, m in sorted(metrics.items()) if _is_of_fit(name)}
    drafted = {name: limit for name, limit in limits.items() if limit is not None}
    if not drafted:
        return
    yield from (
        "",
        "# What the fits measured of themselves. Take # off both lines to hold the next fit to it.",
    )
    for name, limit in drafted.items():
        side = "min" if metrics[name].direction == "up" else "max"
        yield f"# [limits.{json.dumps(name)}]"
        yield f"# {side} = {limit!r}  # {words(name)[0]}, today {metrics[name].value:.4g}"


def _rounded(x: float, down: bool) -> float:
    """Return three significant digits of the distance that matters, rounded to the lenient side."""
    if x == 0 or not math.isfinite(x):
        return x
    scale = 10.0 ** (3 - math.floor(math.log10(abs(x))))
    return (math.floor(x * scale) if down else math.ceil(x * scale)) / scale


def _baseline_lines() -> list[str]:
    return [
        "",
        "# Single layers have metrics too (model/LAYER/METRIC in the audit's JSON); add limits on them here.",
        "",
        "# Against the version in production (auditor gate MODEL --policy policy.toml --baseline models:/m@champion):",
        '# [limits."drift/alarm"]         # 1: concepts changed beyond re-fitting and retraining (--honest)',
        "# max = 0",
        '# [limits."model/accuracy"]      # may be added to the limit above',
        "# max_absolute_loss = 0.005      # worse than the baseline by at most this; also max_relative_loss",
        "# min_absolute_change = 0.001    # better than the baseline by at least this; also min_relative_change",
    ]
