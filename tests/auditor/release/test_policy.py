"""Policies: what a file may say, the error when it says something else, and what is drafted from an audit."""

import hashlib

import pytest
from pydantic import ValidationError

from auditor.errors import OptionError
from auditor.metrics.names import can_exist, nearest, split, words
from auditor.release.policy import Limit, Policy, in_words, parse_policy, read_policy


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


@pytest.mark.parametrize(
    ("limits", "baseline", "drift"),
    [
        ({"model/accuracy": Limit(min=0.5)}, False, False),
        ({"model/accuracy": Limit(max_relative_loss=0.1)}, True, False),
        ({"model/accuracy": Limit(min=0.5), "model/loss": Limit(min_absolute_change=0.0)}, True, False),
        ({"drift/agreement": Limit(min=0.5)}, True, True),
        ({"drift/agreement": Limit(min=0.5), "model/accuracy": Limit(max_absolute_loss=0.1)}, True, True),
        ({}, False, False),
    ],
)
def test_changes_and_drift_need_a_baseline(limits, baseline, drift):
    policy = Policy(limits)
    assert (policy.needs_baseline, policy.needs_drift) == (baseline, drift)


def test_limits_by_former_names_are_limits_on_the_same_metric():
    policy = parse_policy('[limits."explainer/heads/locality"]\nmax = 2\n[limits."model/locality"]\nmax = 1')
    assert set(policy.limits) == {"explainer/heads/heatmap_spread", "model/locality"}
    assert can_exist("explainer/heads/heatmap_spread", {"heads"})
    assert not can_exist("explainer/heads/locality", {"heads"})


def test_a_limit_cannot_be_changed_later():
    limit = Limit(min=0.5)
    with pytest.raises(ValidationError):
        limit.min = 0.1


def test_limits_that_allow_one_value():
    assert Limit(min=0.5, max=0.5).min == 0.5
    with pytest.raises(ValidationError, match=r"min 0\.6 is above max 0\.5"):
        Limit(min=0.6, max=0.5)
    with pytest.raises(ValidationError, match="must be a finite number"):
        Limit(min=float("nan"))
    with pytest.raises(ValidationError, match="sets no limit"):
        Limit(greater_is_better=True)


@pytest.mark.parametrize(
    "name", ["min_absolute_change", "min_relative_change", "max_absolute_loss", "max_relative_loss"]
)
def test_limits_on_changes_need_a_baseline_and_absolute_ones_do_not(name):
    policy = parse_policy(f'[limits."model/accuracy"]\n{name} = 0')
    assert policy.needs_baseline
    assert not policy.needs_drift
    plain = parse_policy('[limits."model/accuracy"]\nmin = 0\nmax = 1\nthreshold = 0.5\ngreater_is_better = true')
    assert not plain.needs_baseline
    assert not plain.needs_drift
    with pytest.raises(OptionError, match=f"{name}: input should be greater than or equal to 0"):
        parse_policy(f'[limits."model/accuracy"]\n{name} = -0.001')


def test_a_limit_on_drift_needs_a_baseline():
    policy = parse_policy('[limits."drift/alarm"]\nmax = 0')
    assert policy.needs_drift
    assert policy.needs_baseline
    assert not parse_policy('[limits."model/drift/alarm"]\nmax = 0').needs_drift


def test_what_a_policy_keeps(tmp_path):
    text = 'schema_version = 1\nexplainers = ["a", "b"]\n[drafted]\nmodel = "m/1"\n'
    text += '[limits."model/ece"]\nmin = 0.5\nmax = 0.5\n'
    (tmp_path / "p.toml").write_text(text)
    policy = read_policy(tmp_path / "p.toml")
    assert policy.explainers == ("a", "b")
    assert (policy.limits["model/ece"].min, policy.limits["model/ece"].max) == (0.5, 0.5)  # equal bounds let one pass
    assert policy.digest == hashlib.sha256(text.encode()).hexdigest()
    assert policy.name == str(tmp_path / "p.toml")
    assert parse_policy(text + "\n").digest != policy.digest
    assert parse_policy(text).name == "policy"
    (tmp_path / "latin.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match="cannot be read"):
        read_policy(tmp_path / "latin.toml")


def test_unknown_words_are_answered_with_the_known_ones_of_that_place():
    with pytest.raises(OptionError, match="known are schema_version, explainers, limits, pins, signers, drafted"):
        parse_policy('explainer = "a"\n[limits."model/ece"]\nmax = 1')
    with pytest.raises(OptionError, match="known are min, max, threshold, greater_is_better"):
        parse_policy('[limits."model/ece"]\nmax = 1\nmaxi = 2')


def test_pins_and_signers_in_words():
    policy = parse_policy(
        '[limits."model/accuracy"]\nmin = 0.9\n[pins]\nimages = 50\nkinds = ["nmf", "tree"]\n'
        '[signers]\nmodel = ["alice"]\n',
        "p.toml",
    )
    assert in_words(policy) == [
        "model/accuracy: at least 0.9.",
        "The data has 50 images.",
        "There is an explainer of kind nmf, and one of kind tree.",
        "The model is signed by alice.",
    ]
