"""Policies: what a file may say, what it is told when it says something else, and what is drafted from an audit."""

import pytest

from auditor.errors import OptionError
from auditor.release.gate import judge
from auditor.metrics.measure import Measure
from auditor.metrics.names import can_exist, nearest, split, words
from auditor.release.policy import parse_policy, read_policy
from auditor.release.policy_draft import draft_policy, limit_of


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "sets no limits, so it would pass anything"),
        ("[limits]", "sets no limits, so it would pass anything"),
        ("schema_version = 1", "sets no limits"),
        ("limits = 3", "limits: input should be a valid dictionary"),
        ("[limits", "it is not TOML"),
        ('[limits."model/accuracy"]', "it sets no limit"),
        ('[limits."model/accuracy"]\ngreater_is_better = true', "it sets no limit"),
        (
            '[limits."model/accuracy"]\nminimum = 0.9',
            "'limits.model/accuracy.minimum' is not known here; known are min",
        ),
        ('[limit."model/accuracy"]\nmin = 0.9', "'limit' is not known here"),
        ('[limits."model/accuracy"]\nmin = nan', "min must be a finite number"),
        ('[limits."model/accuracy"]\nmax = inf', "max must be a finite number"),
        ('[limits."model/accuracy"]\nmin = 0.9\nmax = 0.1', "min 0.9 is above max 0.1, so nothing passes"),
        ('[limits."model/accuracy"]\nmin = "high"', "valid number"),
        ('[limits."model/accuracy"]\nmax_absolute_loss = -1', "greater than or equal to 0"),
        ('schema_version = 9\n[limits."model/accuracy"]\nmin = 0.9', "schema_version 9 is newer"),
    ],
)
def test_what_is_wrong_with_a_policy_is_one_sentence(text, message):
    with pytest.raises(OptionError, match=message) as caught:
        parse_policy(text, "p.toml")
    assert str(caught.value).startswith("policy p.toml: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(OptionError, match="cannot be read"):
        read_policy(tmp_path / "none.toml")


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


def test_names():
    assert split("model/accuracy/7") == ("model", "", "accuracy/7")
    assert split("explainer/a/randomisation/head.3") == ("explainer", "a", "randomisation/head.3")
    assert words("drift/alarm")[0] == "drift alarm"
    assert can_exist("explainer/a/f_cls", {"a"})
    assert not can_exist("explainer/b/f_cls", {"a"})
    assert not can_exist("explainer/a/f_clss", {"a"})
    assert not can_exist("model/acuracy", {"a"})
    assert can_exist("drift/cka/conv", ())
    assert nearest("model/acuracy", {"model/accuracy", "model/ece"})[0] == "model/accuracy"
