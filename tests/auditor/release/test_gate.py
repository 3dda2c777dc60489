"""The gate: every kind of limit, MLflow's semantics, and that nothing passes for want of a number."""

import math
from dataclasses import replace

import numpy as np
import pytest

from auditor.auditing.audit import Audit
from auditor.errors import OptionError
from auditor.metrics.measure import Measure, of_value, skipped
from auditor.release.gate import Gate, SignedBy, judge, label_of, passed
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
    visited = set()
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
        visited.add(expected)
    assert visited == {"pass", "fail"}


def test_skipped_failed_and_missing_metrics_fail_with_the_reason():
    audit = audit_of(
        {
            "model/accuracy": skipped("the data has no labels", "up"),
            "model/nll": Measure(0.5, direction="down", status="failed", reason="odd"),
        }
    )
    gate = judge(audit, policy_of({"model/accuracy": {"min": 0}, "model/nll": {"max": 1}, "model/ece": {"max": 1}}))
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
    audit = replace(audit_of({"explainer/concepts/f_cls": 0.9}), explainers={"concepts": {}})
    with pytest.raises(OptionError, match="explainer/concept/f_cls"):
        judge(audit, policy_of({"explainer/concept/f_cls": {"min": 0.5}}))


def test_limits_on_changes_need_a_baseline():
    with pytest.raises(OptionError, match="model/accuracy refers to a baseline; name one with --baseline"):
        judge(audit_of({"model/accuracy": 0.9}), policy_of({"model/accuracy": {"max_absolute_loss": 0.1}}))
    with pytest.raises(OptionError, match="drift/alarm refers to a baseline"):
        judge(audit_of({"model/accuracy": 0.9}), policy_of({"drift/alarm": {"max": 0}}))


def test_drift_is_judged_like_any_metric():
    audit, base = audit_of({"model/accuracy": 0.9}), audit_of({"model/accuracy": 0.9})
    rules = policy_of({"drift/alarm": {"max": 0}})
    assert judge(audit, rules, base, {"drift/alarm": of_value(0.0, "down")}).verdict == "pass"
    assert judge(audit, rules, base, {"drift/alarm": of_value(1.0, "down")}).verdict == "fail"
    assert judge(audit, rules, base, {}).verdict == "fail"


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
    audit = audit_of({"model/layer/x": Measure(1.0, direction="none")})
    with pytest.raises(OptionError, match="set greater_is_better"):
        judge(audit, policy_of({"model/layer/x": {"threshold": 0.5}}))
    assert judge(audit, policy_of({"model/layer/x": {"min": 0.5}})).verdict == "pass"


def test_explainers_must_be_there_and_verify():
    metrics = {"model/accuracy": 0.9, "explainer/a/verified": 1.0}
    audit = replace(audit_of(metrics), explainers={"a": {"kind": "nmf"}})
    rules = policy_of({"model/accuracy": {"min": 0.5}}, ("a",))
    assert judge(audit, rules).verdict == "pass"
    gate = judge(audit, policy_of({"model/accuracy": {"min": 0.5}}, ("a", "b")))
    assert gate.failed == ["explainer/b/verified"]
    # one that nobody asked for but does not verify
    broken = Measure(0.0, direction="up", status="failed", reason="bytes differ")
    audit = replace(
        audit_of(metrics | {"explainer/z/verified": broken}), explainers={"a": {}, "z": {"problem": "bytes differ"}}
    )
    gate = judge(audit, rules)
    assert (gate.verdict, gate.failed) == ("fail", ["explainer/z/verified"])


def test_a_gate_without_checks_does_not_pass():
    assert Gate(()).verdict == "fail"


def test_passes_are_counted():
    gate = judge(audit_of({"model/accuracy": of_value(0.9, "up")}), policy_of({"model/accuracy": {"min": 0.5}}))
    failing = judge(audit_of({"model/accuracy": of_value(0.1, "up")}), policy_of({"model/accuracy": {"min": 0.5}}))
    assert passed(gate.checks) == 1
    assert passed(failing.checks) == 0
    assert passed([*gate.checks, *gate.checks, *failing.checks]) == 2


@pytest.mark.parametrize(
    ("value", "baseline", "limit", "expected"),
    [
        (0.855, 0.9, {"max_relative_loss": 0.05}, "pass"),  # 0.045 / 0.9 is a rounding error above 0.05
        (0.855 - 1e-9, 0.9, {"max_relative_loss": 0.05}, "fail"),
        (0.895 - 1e-9, 0.9, {"max_absolute_loss": 0.005}, "fail"),
        (1e6 - 0.1, 1e6, {"max_absolute_loss": 0.1}, "pass"),  # numbers of this size are rounded at 1e-10
        (1e6 - 0.11, 1e6, {"max_absolute_loss": 0.1}, "fail"),
        (-1e6 - 0.1, -1e6, {"max_absolute_loss": 0.1}, "pass"),
        (0.905, 0.9, {"min_absolute_change": 0.005}, "pass"),
        (0.905 - 1e-9, 0.9, {"min_absolute_change": 0.005}, "fail"),
        (0.945, 0.9, {"min_relative_change": 0.05}, "pass"),
        (0.945 - 1e-9, 0.9, {"min_relative_change": 0.05}, "fail"),
        (-0.95, -1.0, {"min_relative_change": 0.05}, "pass"),  # better than a negative number is nearer to zero
        (-1.05, -1.0, {"min_relative_change": 0.05}, "fail"),
        (1e-10, 0.0, {"min_relative_change": 0.05}, "pass"),  # a share of nothing: any gain will do
        (0.0, 0.0, {"min_relative_change": 0.05}, "fail"),
        (-1e-10, 0.0, {"max_relative_loss": 0.05}, "pass"),
        (-2e-10, 0.0, {"max_relative_loss": 0.05}, "fail"),
        (0.9, math.inf, {"max_absolute_loss": 0.1}, "fail"),
        (0.9, 0.9, {"max_absolute_loss": 0.0}, "pass"),
        (0.9, 0.9, {"max_absolute_loss": 0.0, "min_absolute_change": 0.001}, "fail"),  # all of them must hold
    ],
)
def test_rounding_never_decides_and_nothing_larger_is_forgiven(value, baseline, limit, expected):
    assert verdict(value, limit, baseline) == expected
    mirrored = verdict(-value, limit, -baseline, "down")
    assert mirrored == expected


def test_every_number_of_a_limit_is_a_check_of_its_own():
    limit = {
        "min": 0.5, "max": 0.99, "threshold": 0.6, "min_absolute_change": 0.05, "min_relative_change": 0.06,
        "max_absolute_loss": 0.01, "max_relative_loss": 0.02,
    }  # fmt: skip
    audit, base = audit_of({"model/accuracy": 0.9}), audit_of({"model/accuracy": 0.8})
    gate = judge(audit, policy_of({"model/accuracy": limit}), base)
    assert [(c.limit, c.baseline) for c in gate.checks] == [
        ("at least 0.5", None),
        ("at least 0.6", None),
        ("at most 0.99", None),
        ("better by at least 0.05", 0.8),
        ("better by at least 0.06 of the baseline", 0.8),
        ("worse by at most 0.01", 0.8),
        ("worse by at most 0.02 of the baseline", 0.8),
    ]
    assert gate.verdict == "pass"
    assert all(c.reason == "" and c.value == 0.9 for c in gate.checks)
    assert set(gate.checks[0].to_json()) == {"metric", "value", "limit", "verdict", "reason"}
    assert gate.checks[3].to_json()["baseline"] == 0.8
    down = judge(audit_of({"model/ece": Measure(0.9, direction="down")}), policy_of({"model/ece": {"threshold": 0.6}}))
    assert [(c.limit, c.verdict, c.reason) for c in down.checks] == [("at most 0.6", "fail", "0.9 is not at most 0.6")]


def test_reasons_name_what_was_wanted_and_what_came():
    base = audit_of({"model/accuracy": 0.9})
    (check,) = judge(
        audit_of({"model/accuracy": 0.85}), policy_of({"model/accuracy": {"max_absolute_loss": 0.01}}), base
    ).checks
    assert check.reason == "0.85 against 0.9 is not worse by at most 0.01"
    odd = replace(base, metrics={"model/accuracy": Measure(math.inf, direction="up")})
    (check,) = judge(odd, policy_of({"model/accuracy": {"min": 0}})).checks
    assert check.reason == "it is inf in the audit"
    silent = replace(base, metrics={"model/accuracy": Measure(0.9, direction="up", status="failed")})
    (check,) = judge(silent, policy_of({"model/accuracy": {"min": 0}})).checks
    assert check.reason == "failed in the audit: no reason given"


def test_what_the_gate_is_about():
    audit, base = audit_of({"model/accuracy": 0.9}), audit_of({"model/accuracy": 0.9}, version="2")
    gate = judge(audit, policy_of({"model/accuracy": {"min": 0.95}, "model/ece": {"min": 0, "max": 1}}), base)
    about = gate.to_json()
    assert (about["model"], about["baseline"], about["policy"]) == ("m/1", "m/2", "p.toml")
    assert (about["policy_digest"], about["audit_digest"]) == ("f" * 64, audit.digest)
    assert about["promoted"] == ""
    assert gate.failed == ["model/accuracy", "model/ece"]  # each once, though two limits of ece fail
    assert passed(gate.checks) == 0
    assert label_of(audit_of({}, name="")) == "model dddddddddddd"
    assert judge(audit, policy_of({"model/accuracy": {"min": 0.5}})).baseline == ""


def test_an_explainer_nobody_asks_for_is_checked_only_when_it_does_not_verify():
    metrics = {"model/accuracy": 0.9, "explainer/a/verified": 1.0}
    rules = policy_of({"model/accuracy": {"min": 0.5}})
    good = replace(audit_of(metrics), explainers={"a": {}})
    assert [c.metric for c in judge(good, rules).checks] == ["model/accuracy"]
    half = replace(audit_of(metrics | {"explainer/a/verified": 0.5}), explainers={"a": {}})
    assert judge(half, rules).failed == ["explainer/a/verified"]
    absent = replace(audit_of({"model/accuracy": 0.9}), explainers={"a": {}})
    assert [(c.metric, c.reason) for c in judge(absent, rules).checks if c.verdict == "fail"] == [
        ("explainer/a/verified", "it is not attached")
    ]
    expected = judge(good, policy_of({"model/accuracy": {"min": 0.5}}, ("a",)))
    first = expected.checks[0]
    assert (first.metric, first.verdict, first.limit) == (
        "explainer/a/verified", "pass", "attached and verified",
    )  # fmt: skip


def test_a_direction_that_is_missing_matters_only_where_better_is_asked_for():
    audit = audit_of({"model/layer/x": Measure(1.0, direction="none")})
    base = audit_of({"model/layer/x": Measure(1.0, direction="none")})
    with pytest.raises(OptionError, match="model/layer/x has no better direction of its own"):
        judge(audit, policy_of({"model/layer/x": {"max_absolute_loss": 0.5}}), base)
    policy = policy_of({"model/layer/x": {"max_absolute_loss": 0.5, "greater_is_better": False}})
    assert judge(audit, policy, base).verdict == "pass"
    missing = policy_of({"model/accuracy": {"threshold": 0.5}})  # fails as missing, whatever its direction
    assert judge(audit, missing).verdict == "fail"


PINS = [
    ({"data_digest": "d" * 64}, "pin/data"),
    ({"images": 31}, "pin/images"),
    ({"explained": 31}, "pin/explained"),
    ({"seed": 1}, "pin/seed"),
    ({"auditor": ">=9"}, "pin/auditor"),
    ({"kinds": ["tree"]}, "pin/kind/tree"),
]


def pinned(pins, signers=None):
    from auditor.release.policy import Pins, Signers

    rules = policy_of({"model/accuracy": {"min": 0.5}})
    return replace(rules, pins=Pins(**pins), signers=Signers(**(signers or {})))


def with_pins():
    audit = audit_of({"model/accuracy": 0.9, "explainer/a/verified": 1.0})
    data = {**audit.data, "digest": "a" * 64, "n": 30, "n_explained": 30}
    versions = {"mlflow-auditor": "0.1.0"}
    return replace(audit, data=data, seed=0, versions=versions, explainers={"a": {"kind": "nmf", "digest": "1" * 64}})


@pytest.mark.parametrize(("pins", "metric"), PINS)
def test_an_audit_made_of_something_else_fails(pins, metric):
    gate = judge(with_pins(), pinned(pins))
    assert (gate.verdict, gate.failed) == ("fail", [metric])
    assert "the audit has" in gate.checks[0].reason


def test_an_audit_made_of_what_is_pinned_passes():
    pins = {"data_digest": "a" * 12, "images": 30, "explained": 30, "seed": 0, "auditor": ">=0.1,<1", "kinds": ["nmf"]}
    assert judge(with_pins(), pinned(pins)).verdict == "pass"


def test_a_baseline_with_the_same_weights_fails_where_it_must_differ():
    rules, audit = pinned({"baseline_differs": True}), with_pins()
    with pytest.raises(OptionError, match=r"pins\.baseline_differs refers to a baseline"):
        judge(audit, rules)
    assert judge(audit, rules, audit).failed == ["pin/baseline"]
    other = replace(audit, model={**audit.model, "digest": "f" * 64})
    assert judge(audit, rules, other).verdict == "pass"


@pytest.mark.parametrize(
    ("signers", "signed", "failed"),
    [
        ({}, SignedBy(), []),
        ({}, SignedBy(required=True, problem="nobody did"), ["signer/audit"]),
        ({}, SignedBy(("a",), required=True), []),
        ({"audit": ["a"]}, SignedBy(("a",)), []),
        ({"audit": ["a"]}, SignedBy(("b",)), ["signer/audit"]),
        ({"model": ["a"]}, SignedBy(("a",), ()), ["signer/model"]),
        ({"differ": True}, SignedBy(("a",), ("b",)), []),
        ({"differ": True}, SignedBy(("a", "c"), ("a",)), ["signer/differ"]),
        ({"differ": True}, SignedBy(("a",), ()), ["signer/model", "signer/differ"]),
    ],
)
def test_whose_signatures_count_is_part_of_the_verdict(signers, signed, failed):
    gate = judge(with_pins(), pinned({}, signers), signed=signed)
    assert gate.failed == failed
