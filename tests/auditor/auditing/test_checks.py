"""Names of checks, explainers and durations as a person types them."""

import pytest

from auditor.auditing.checks import CHECKS, OF_EXPLAINERS, asked_for, duration, parse_checks, parse_duration
from auditor.auditing.explanation_quality import GROUPS
from auditor.commands import audit as command
from auditor.errors import OptionError, UnknownExplainerError


def test_checks_are_those_of_the_groups_and_the_command_lists_all_of_them():
    assert set(OF_EXPLAINERS) == set(GROUPS)
    assert set(command.CHECKS) == set(CHECKS)


def test_checks_are_given_in_any_order_and_once():
    assert parse_checks("noise, RELIANCE,noise") == ("reliance", "noise")


@pytest.mark.parametrize(("text", "came"), [("noise,relianse", "'relianse'"), ("", "none"), (" , ", "none")])
def test_an_unknown_check_is_named_with_the_known_ones(text, came):
    with pytest.raises(OptionError, match=rf"want some of performance, .*, got {came}"):
        parse_checks(text)


def test_an_explainer_that_is_not_attached():
    assert asked_for(("b",), {"a", "b"}) == ("b",)
    assert set(asked_for(None, {"a", "b"})) == set(asked_for(("*",), {"a", "b"})) == {"a", "b"}
    assert not asked_for((), {"a"})
    with pytest.raises(UnknownExplainerError, match="no explainer 'c'; attached are: a, b"):
        asked_for(("b", "c"), {"b", "a"})


@pytest.mark.parametrize(
    ("text", "seconds"), [("1h", 3600), ("2m30s", 150), ("0.5m", 30), (" 45 ", 45), ("1H1M1S", 3661)]
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "five", "5 min", "-3s", "0", "0s", "1m1h", "1e3", "nan", "m"])
def test_no_duration(text):
    with pytest.raises(OptionError, match="budget: want a duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (60, "1 min"), (3600, "60 min"), (59.6, "1 min"), (2.5, "2.5 s")]
)
def test_a_duration_in_words(seconds, words):
    assert duration(seconds) == words
