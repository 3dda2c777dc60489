"""One table of options: names, defaults and limits; old names work and say so."""

import warnings

import pytest

from auditor.errors import OptionError
from auditor.explainers.answer_options import OLD_NAMES, OPTION_NAMES, AnswerOptions, deprecation, options_of


def test_the_vocabulary():
    assert OPTION_NAMES == (
        "explainers", "target", "top_k", "heatmaps", "stability", "noise_samples", "radius", "seed", "timeout_s",
        "max_steps",
    )  # fmt: skip
    defaults = AnswerOptions()
    assert (defaults.heatmaps, defaults.stability, defaults.noise_samples) == ("png", "fast", 8)
    assert (defaults.radius, defaults.seed, defaults.explainers, defaults.timeout_s) == (0.02, 0, None, None)
    assert set(OLD_NAMES.values()) <= set(OPTION_NAMES)
    assert not set(OLD_NAMES) & set(OPTION_NAMES)


@pytest.mark.parametrize(("old", "value"), [("samples", 4), ("timeout", 2.5), ("explainer", ["a"])])
def test_an_old_name_is_its_new_one_and_warns(old, value):
    with pytest.warns(DeprecationWarning, match=f"^{old} is called {OLD_NAMES[old]} now"):
        options = options_of("here", {old: value})
    assert getattr(options, OLD_NAMES[old]) == value
    assert options.renamed == {old: OLD_NAMES[old]}
    assert AnswerOptions.model_validate_json('{"samples": 3}').noise_samples == 3


def test_the_new_name_wins_and_alone_says_nothing():
    with pytest.warns(DeprecationWarning, match="samples is called"):
        assert options_of("here", {"samples": 4, "noise_samples": 2}).noise_samples == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert options_of("here", {"noise_samples": 2}).renamed == {}


@pytest.mark.filterwarnings("ignore:samples is called")
@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"noise_samples": 0}, "here: noise_samples: input should be greater than or equal to 1."),
        ({"samples": 65}, "here: noise_samples: input should be less than or equal to 64."),
        ({"stability": "on"}, "here: stability: input should be 'off', 'fast' or 'full'."),
        ({"nosuch": 1}, f"here: unknown option 'nosuch'; the options are {', '.join(OPTION_NAMES)}."),
    ],
)
def test_what_does_not_fit_is_one_sentence(values, sentence):
    with pytest.raises(OptionError) as caught:
        options_of("here", values)
    assert str(caught.value) == sentence


def test_the_sentence_about_an_old_name():
    assert deprecation("a", "b") == "a is called b now; the old name goes with the next release."
