"""What fits measured, in the audit and before a gate."""

import math
from types import SimpleNamespace

import pytest

from auditor.auditing.fit_metrics import fit_measures
from auditor.errors import OptionError
from auditor.metrics.names import can_exist, words
from auditor.release.gate import judge
from auditor.release.policy import parse_policy
from auditor.release.policy_draft import draft_policy


def fitted(**metrics):
    return SimpleNamespace(metrics=metrics)


def test_every_number_of_a_fit_is_a_measure_and_nan_is_none_that_passes():
    explainers = {"b": fitted(rank=3.0), "a": fitted(f_cls=0.9, purity=math.nan, n_held_out=40.0)}
    explainers["a"].metrics["relative_error/conv2"] = 0.25
    measures = fit_measures(explainers)
    assert next(iter(measures)).startswith("explainer/a/")
    assert measures["explainer/a/fit/f_cls"].n == 40
    assert measures["explainer/a/fit/relative_error/conv2"].direction == "down"
    assert (measures["explainer/b/fit/rank"].n, measures["explainer/b/fit/rank"].direction) == (1, "none")
    lost = measures["explainer/a/fit/purity"]
    assert (lost.status, lost.is_taken, lost.reason) == ("failed", False, "the fit measured nan")


def test_the_audit_has_what_the_fit_measured_and_a_gate_holds_it(audited):
    for metric in ("f_cls", "relative_error", "n_held_out"):
        assert audited.metrics[f"explainer/concepts/fit/{metric}"].is_taken, metric
    assert audited.metrics["explainer/concepts/fit/f_cls"].value == audited.explainers["concepts"]["metrics"]["f_cls"]

    def verdict(limit):
        return judge(audited, parse_policy(f'[limits."explainer/concepts/fit/f_cls"]\nmin = {limit}')).verdict

    value = audited.metrics["explainer/concepts/fit/f_cls"].value
    assert verdict(value - 0.01) == "pass"
    assert verdict(value + 0.01) == "fail"
    with pytest.raises(OptionError, match=r"near names are .*explainer/concepts/fit/f_cls"):
        judge(audited, parse_policy('[limits."explainer/concepts/fit/f_clss"]\nmin = 0.1'))


def test_a_metric_that_the_fit_did_not_take_fails_the_gate(audited):
    gate = judge(audited, parse_policy('[limits."explainer/concepts/fit/fidelity"]\nmin = 0.1'))
    assert gate.verdict == "fail"


def test_a_drafted_policy_names_them_as_comments_that_work_when_switched_on(audited):
    text = draft_policy(audited)
    line = '# [limits."explainer/concepts/fit/relative_error"]\n# max = '
    assert line in text
    switched = text.replace(line, line.replace("# ", ""))
    assert "explainer/concepts/fit/relative_error" in parse_policy(switched).limits
    assert judge(audited, parse_policy(switched)).verdict == judge(audited, parse_policy(text)).verdict


def test_names_and_words():
    assert can_exist("explainer/a/fit/cka_lambda/0.1", {"a"})
    assert not can_exist("explainer/b/fit/f_cls", {"a"})
    assert words("explainer/a/fit/brand_new")[0] == "fit: brand new"
