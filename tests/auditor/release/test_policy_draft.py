"""A drafted policy: it passes its own audit, every line is explained, and margins by hand."""

import math

import pytest

from auditor.metrics.measure import Measure
from auditor.metrics.names import split
from auditor.metrics.thresholds import FOUND_FROM
from auditor.release.gate import judge
from auditor.release.policy import parse_policy
from auditor.release.policy_draft import draft_policy, limit_of, other_limit_of


def test_a_draft_passes_its_own_audit_and_says_what_every_line_means(audited):
    text = draft_policy(audited)
    policy = parse_policy(text)
    assert policy.explainers == ("concepts",)
    assert {"model/accuracy", "explainer/concepts/f_cls", "explainer/concepts/randomisation"} <= set(policy.limits)
    gate = judge(audited, policy)
    assert gate.verdict == "pass", gate.failed
    for name in policy.limits:
        above = text.split(f'[limits."{name}"]')[0].splitlines()[-2:]
        assert all(line.startswith("# ") for line in above), name
    assert not any(split(name)[1] for name in policy.limits if name.startswith("model/"))


@pytest.mark.parametrize(
    ("name", "measure", "limit"),
    [
        ("model/accuracy", Measure(0.9, 0.88, 0.92, 1000, direction="up"), 0.87),
        ("model/accuracy/7", Measure(1.0, 1.0, 1.0, 100, direction="up"), 0.97),  # no error in n: up to 3/n
        ("explainer/c/noise_c2", Measure(2.0, 1.8, 2.4, 40, direction="down"), 3.5),
        ("explainer/c/noise_c2", Measure(2.0, 0.8, 4.0, 40, direction="down"), 5.0),  # the interval is the wider margin
        ("explainer/c/basis_stability", Measure(0.8, n=2, direction="up"), 0.68),
        ("model/c1_local", Measure(60.0, n=50, direction="down"), 120.0),
        ("model/c1_sampled", Measure(50.0, n=50, direction="down"), None),  # another seed draws other pairs
        ("explainer/c/randomisation", Measure(0.1, 0.0, 0.2, 40, 1.0, "down"), 0.55),
        ("explainer/c/completeness_gap", Measure(1e-17, 0.0, 1e-16, 40, direction="down"), 1e-4),
        ("explainer/c/f_cls", Measure(float("nan"), direction="up", status="failed"), None),
        ("model/layer1/norm", Measure(3.0, direction="none"), None),
        ("model/layer1/sparsity", Measure(3.0, direction="up"), None),
    ],
)
def test_margins(name, measure, limit):
    assert limit_of(name, measure) == (None if limit is None else pytest.approx(limit))


def audit_with(**metrics):
    from auditor.auditing.audit import Audit

    about = {"name": "m", "version": "1", "digest": "d" * 64}
    data = {"spec": "x", "digest": "e" * 64, "n": 9, "n_explained": 9}
    return Audit(model=about, data=data, seed=0, metrics={k.replace("__", "/"): m for k, m in metrics.items()})


def test_reliance_is_limited_to_what_is_allowed_and_not_to_what_is():
    measure = Measure(2.0, n=9, direction="down")
    score = Measure(0.97, n=30, direction="down")
    other = {"model__reliance__jay__score": score, "model__reliance__worst__sameness": score}
    text = draft_policy(audit_with(model__reliance__found=measure, model__reliance__worst__score=score, **other))
    limits = parse_policy(text).limits
    assert set(limits) == {"model/reliance/found", "model/reliance/worst/score"}
    assert limits["model/reliance/found"].max == 0
    assert limits["model/reliance/worst/score"].max == FOUND_FROM
    assert text.count("TODAY IT IS BEYOND THIS LIMIT") == 2
    quiet = Measure(0.1, n=30, direction="down")
    assert "BEYOND" not in draft_policy(audit_with(model__reliance__worst__score=quiet))
    skipped_measure = Measure(math.nan, status="skipped", reason="too small", direction="down")
    text = draft_policy(
        audit_with(
            model__reliance__found=skipped_measure, model__reliance__jay__score=skipped_measure, model__nll=quiet
        )
    )
    assert "# no limit on model/reliance/found: skipped, too small" in text
    assert "jay" not in text


@pytest.mark.parametrize("metric", ["explainer__c__heatmap_spread", "model__c1_local"])
def test_what_can_be_too_good_is_limited_on_both_sides(metric):
    limits = parse_policy(draft_policy(audit_with(**{metric: Measure(1.6, 1.5, 1.7, 40, direction="down")}))).limits
    (limit,) = limits.values()
    assert limit.min < 1.5
    assert limit.min > 0.89 or metric != "explainer__c__heatmap_spread"  # a plate took it from 1.60 to 0.89
    assert limit.max > 1.6
    wide = Measure(1.6, 0.2, 1.7, 4, direction="down")
    assert other_limit_of("explainer/c/heatmap_spread", wide) == pytest.approx(1.6 - 1.5 * 1.4, abs=1e-3)
    assert other_limit_of("explainer/c/f_reg", wide) is None


def test_a_bound_far_from_what_was_reached_is_not_limited():
    reached = Measure(2.0, n=9, direction="down")
    for value, is_limited in ((150.0, True), (200.0, True), (201.0, False), (1e13, False)):
        metrics = {"model__c1_local": reached, "model__c1_certified": Measure(value, n=9, direction="down")}
        text = draft_policy(audit_with(**metrics))
        assert ("model/c1_certified" in parse_policy(text).limits) == is_limited, value
        assert ("no limit on model/c1_certified" in text) != is_limited
    alone = draft_policy(audit_with(model__c1_certified=Measure(1e13, n=9, direction="down")))
    assert "model/c1_certified" in parse_policy(alone).limits  # nothing to hold it against
