"""The gate: every kind of limit, MLflow's semantics, and that nothing passes for want of a number."""

import math
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from auditor.auditing.audit import Audit
from auditor.errors import OptionError
from auditor.release.gate import Gate, judge
from auditor.reports.gate_summary import junit, markdown
from auditor.metrics.measure import Measure, of_value, skipped
from auditor.release.policy import Limit, Policy

MODEL = {"name": "m", "version": "1", "digest": "d" * 64, "input_shape": [1, 8, 8], "classes": ["a", "b"]}
DATA = {"spec": "x.npz", "digest": "e" * 64, "n": 50, "n_explained": 20, "unlabelled": 0}


def audit_of(metrics, **model):
    metrics = {k: m if isinstance(m, Measure) else of_value(m, "up") for k, m in metrics.items()}
    return Audit(model=MODEL | model, data=DATA, seed=0, metrics=metrics)


def policy_of(limits, explainers=()):
    return Policy({k: Limit(**v) for k, v in limits.items()}, explainers, "f" * 64, "p.toml")


def verdict(value, limit, baseline=None, direction="up"):
    measure = Measure(value, direction=direction)
    base = None if baseline is None else audit_of({"model/accuracy": Measure(baseline, direction=direction)})
    return judge(audit_of({"model/accuracy": measure}), policy_of({"model/accuracy": limit}), base).verdict


@pytest.mark.parametrize(
    ("value", "limit", "expected"),
    [
        (0.9, {"min": 0.9}, "pass"),
        (0.8999, {"min": 0.9}, "fail"),
        (0.9, {"max": 0.9}, "pass"),
        (0.91, {"max": 0.9}, "fail"),
        (0.5, {"min": 0.4, "max": 0.6}, "pass"),
        (0.7, {"min": 0.4, "max": 0.6}, "fail"),
        (0.5, {"threshold": 0.4}, "pass"),  # up by the metric's own direction
        (0.5, {"threshold": 0.4, "greater_is_better": False}, "fail"),
        (math.nan, {"min": -1e9}, "fail"),
        (math.nan, {"max": 1e9}, "fail"),
        (math.inf, {"min": 0}, "fail"),
    ],
)
def test_absolute_limits(value, limit, expected):
    assert verdict(value, limit) == expected


@pytest.mark.parametrize(
    ("value", "baseline", "direction", "limit", "expected"),
    [
        (0.895, 0.9, "up", {"max_absolute_loss": 0.005}, "pass"),
        (0.894, 0.9, "up", {"max_absolute_loss": 0.005}, "fail"),
        (0.5, 0.4, "down", {"max_absolute_loss": 0.1}, "pass"),
        (0.51, 0.4, "down", {"max_absolute_loss": 0.1}, "fail"),
        (0.85, 0.9, "up", {"max_relative_loss": 0.06}, "pass"),
        (0.84, 0.9, "up", {"max_relative_loss": 0.06}, "fail"),
        (-1.05, -1.0, "up", {"max_relative_loss": 0.06}, "pass"),  # the share is of the baseline's size
        (0.0, 0.0, "up", {"max_relative_loss": 0.06}, "pass"),
        (-0.1, 0.0, "up", {"max_relative_loss": 0.06}, "fail"),
        (0.9, math.nan, "up", {"max_absolute_loss": 0.1}, "fail"),
        (math.nan, 0.9, "up", {"max_absolute_loss": 0.1}, "fail"),
    ],
)
def test_losses_against_a_baseline(value, baseline, direction, limit, expected):
    assert verdict(value, limit, baseline, direction) == expected


def test_improvements_mean_what_they_mean_in_mlflow():
    """On random numbers every verdict is that of mlflow.validate_evaluation_results."""
    from mlflow.models.evaluation import EvaluationResult
    from mlflow.models.evaluation.validation import (
        MetricThreshold,
        ModelValidationFailedException,
        validate_evaluation_results,
    )

    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(300):
        value, base = rng.choice([-1.0, -0.5, 0.0, 0.25, 0.5, 0.75, 1.0], 2)
        up = bool(rng.random() < 0.5)
        limit = {"greater_is_better": up}
        for key, choices in (
            ("threshold", [0.25, 0.5]),
            ("min_absolute_change", [0.25, 0.5]),
            ("min_relative_change", [0.25, 0.5]),
        ):
            if rng.random() < 0.5:
                limit[key] = float(rng.choice(choices))
        if len(limit) == 1:
            continue
        try:
            validate_evaluation_results(
                {"m": MetricThreshold(**limit)},
                EvaluationResult(metrics={"m": value}, artifacts={}),
                EvaluationResult(metrics={"m": base}, artifacts={}),
            )
            expected = "pass"
        except ModelValidationFailedException:
            expected = "fail"
        assert verdict(float(value), limit, float(base)) == expected, (value, base, limit)
        seen.add(expected)
    assert seen == {"pass", "fail"}


def test_skipped_failed_and_missing_metrics_fail_with_the_reason():
    found = audit_of(
        {
            "model/accuracy": skipped("the data has no labels", "up"),
            "model/nll": Measure(0.5, direction="down", status="failed", reason="odd"),
        }
    )
    gate = judge(found, policy_of({"model/accuracy": {"min": 0}, "model/nll": {"max": 1}, "model/ece": {"max": 1}}))
    assert [c.verdict for c in gate.checks] == ["fail"] * 3
    assert "the data has no labels" in gate.checks[0].reason
    assert "odd" in gate.checks[1].reason
    assert "no such metric" in gate.checks[2].reason


def test_a_metric_missing_in_the_baseline_fails():
    gate = judge(
        audit_of({"model/accuracy": 0.9}),
        policy_of({"model/accuracy": {"max_absolute_loss": 0.1}}),
        audit_of({"model/ece": 0.1}),
    )
    assert gate.verdict == "fail"
    assert "the baseline's audit has no such metric" in gate.checks[0].reason


def test_a_typo_is_an_error_with_the_nearest_names():
    with pytest.raises(
        OptionError, match=r"no audit gives a metric called 'model/acuracy'; near names are model/accur"
    ):
        judge(audit_of({"model/accuracy": 0.9}), policy_of({"model/acuracy": {"min": 0.5}}))
    found = replace(audit_of({"explainer/concepts/f_cls": 0.9}), explainers={"concepts": {}})
    with pytest.raises(OptionError, match="explainer/concept/f_cls"):
        judge(found, policy_of({"explainer/concept/f_cls": {"min": 0.5}}))


def test_limits_on_changes_need_a_baseline():
    with pytest.raises(OptionError, match="model/accuracy speaks of a baseline; name one with --baseline"):
        judge(audit_of({"model/accuracy": 0.9}), policy_of({"model/accuracy": {"max_absolute_loss": 0.1}}))
    with pytest.raises(OptionError, match="drift/alarm speaks of a baseline"):
        judge(audit_of({"model/accuracy": 0.9}), policy_of({"drift/alarm": {"max": 0}}))


def test_drift_is_judged_like_any_metric():
    found, base = audit_of({"model/accuracy": 0.9}), audit_of({"model/accuracy": 0.9})
    rules = policy_of({"drift/alarm": {"max": 0}})
    assert judge(found, rules, base, {"drift/alarm": of_value(0.0, "down")}).verdict == "pass"
    assert judge(found, rules, base, {"drift/alarm": of_value(1.0, "down")}).verdict == "fail"
    assert judge(found, rules, base, {}).verdict == "fail"


@pytest.mark.parametrize("change", [{"classes": ["a", "c"]}, {"input_shape": [3, 8, 8]}])
def test_a_baseline_of_another_task_is_an_error(change):
    with pytest.raises(OptionError, match="do not do the same task"):
        judge(
            audit_of({"model/accuracy": 0.9}),
            policy_of({"model/accuracy": {"min": 0.5}}),
            audit_of({"model/accuracy": 0.9}, **change),
        )


def test_a_baseline_on_other_data_is_an_error():
    base = replace(audit_of({"model/accuracy": 0.9}), data=DATA | {"digest": "0" * 64})
    with pytest.raises(OptionError, match="audited on other data"):
        judge(audit_of({"model/accuracy": 0.9}), policy_of({"model/accuracy": {"min": 0.5}}), base)


def test_a_direction_of_its_own_or_one_that_is_said():
    found = audit_of({"model/layer/x": Measure(1.0, direction="none")})
    with pytest.raises(OptionError, match="set greater_is_better"):
        judge(found, policy_of({"model/layer/x": {"threshold": 0.5}}))
    assert judge(found, policy_of({"model/layer/x": {"min": 0.5}})).verdict == "pass"


def test_explainers_must_be_there_and_verify():
    metrics = {"model/accuracy": 0.9, "explainer/a/verified": 1.0}
    found = replace(audit_of(metrics), explainers={"a": {"kind": "nmf"}})
    rules = policy_of({"model/accuracy": {"min": 0.5}}, ("a",))
    assert judge(found, rules).verdict == "pass"
    gate = judge(found, policy_of({"model/accuracy": {"min": 0.5}}, ("a", "b")))
    assert gate.failed == ["explainer/b/verified"]
    # one that nobody asked for but does not verify
    broken = Measure(0.0, direction="up", status="failed", reason="bytes differ")
    found = replace(
        audit_of(metrics | {"explainer/z/verified": broken}), explainers={"a": {}, "z": {"problem": "bytes differ"}}
    )
    gate = judge(found, rules)
    assert (gate.verdict, gate.failed) == ("fail", ["explainer/z/verified"])


def test_a_gate_without_checks_does_not_pass():
    assert Gate(()).verdict == "fail"


def test_what_ci_reads():
    found = audit_of({"model/accuracy": 0.9, "model/ece": Measure(math.nan, direction="down", status="failed")})
    gate = judge(found, policy_of({"model/accuracy": {"min": 0.5}, "model/ece": {"max": 0.1}}))
    suite = ElementTree.fromstring(junit(gate)).find("testsuite")
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    cases = suite.findall("testcase")
    assert [c.get("name") for c in cases] == ["accuracy at least 0.5", "ece at most 0.1"]
    assert [c.find("failure") is not None for c in cases] == [False, True]
    text = markdown(gate)
    assert text.startswith("## Gate: FAIL")
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert "**FAIL**" in rows[0]
    assert "`model/ece`" in rows[0]
    assert gate.to_json()["verdict"] == "fail"
    assert set(gate.to_json()["checks"][0]) >= {"metric", "value", "limit", "verdict", "reason"}
