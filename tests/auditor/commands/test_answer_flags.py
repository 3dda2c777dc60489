"""Flags of an answer: one per option, with its default, its limits and its name of an earlier release."""

import click
import pytest
from click.testing import CliRunner

from auditor.commands.answer_flags import answer_flags
from auditor.errors import OptionError
from auditor.explainers.answer_options import OLD_NAMES, AnswerOptions


def run(*args, **defaults):
    """The options that a command gets; what it prints is in ``stderr``."""
    values = {}

    @click.command()
    @click.argument("image")
    @answer_flags("show", **defaults)
    def command(image, options):
        values.update(image=image, options=options)

    result = CliRunner().invoke(command, ["x.png", *args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return values.get("options"), result


def test_without_flags_the_defaults_are_those_of_the_options_or_of_the_command():
    assert run()[0] == AnswerOptions()
    assert run(explainers=["*"], top_k=3)[0] == AnswerOptions(explainers=["*"], top_k=3)


def test_every_option_has_a_flag_that_help_shows_with_its_default():
    text = run("--help")[1].stdout
    for name in AnswerOptions.model_fields:
        assert f"--{name.replace('_', '-')} " in text
    for old in OLD_NAMES:
        assert f"--{old} " not in text
    assert "[default: fast]" in text
    assert "[default: *]" in run("--help", explainers=["*"])[1].stdout


def test_flags_are_read_as_their_types():
    options, _ = run(
        *("--explainers", "a, b", "--explainers", "c", "--target", "7", "--top-k", "2", "--radius", "0.5"),
        *("--stability", "full", "--timeout-s", "1.5"),
    )
    assert options == AnswerOptions(
        explainers=["a", "b", "c"], target="7", top_k=2, radius=0.5, stability="full", timeout_s=1.5
    )


def test_names_of_an_earlier_release_work_with_a_warning():
    options, result = run("--samples", "3", "--explainer", "a", "--explainer", "b")
    assert options == AnswerOptions(noise_samples=3, explainers=["a", "b"])
    assert result.stderr.splitlines() == [
        "auditor: warning: --explainer is called --explainers now; the old name goes with the next release.",
        "auditor: warning: --samples is called --noise-samples now; the old name goes with the next release.",
    ]
    options, _ = run("--samples", "3", "--noise-samples", "5")
    assert options.noise_samples == 5


def test_values_out_of_range_are_one_sentence():
    with pytest.raises(OptionError, match="show: top_k: input should be greater than or equal to 1"):
        run("--top-k", "0")
    for wrong in (["--stability", "half"], ["--seed", "one"], ["--nosuch", "1"]):
        assert run(*wrong)[1].exit_code == 2
