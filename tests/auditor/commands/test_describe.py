"""``auditor describe``."""

import pytest

from auditor.plugins import load_subject


def test_what_is_described_travels_with_the_version(cli, scratch, tmp_path):
    names = [f"digit {k}" for k in range(10)]
    (tmp_path / "names.txt").write_text("\n".join(names) + "\n\n")
    answer = cli.json("describe", scratch, "--classes", tmp_path / "names.txt", "--mean", "0.25", "--std", "0.5")
    assert answer["class_names"] == names
    subject = load_subject(scratch)
    assert list(subject.class_names) == names
    assert (list(subject.preprocessing.mean), list(subject.preprocessing.std)) == ([0.25], [0.5])


def test_at_the_terminal(cli, scratch):
    assert f"{scratch} now carries: " in cli("describe", scratch, "--resize", "crop").stdout


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--mean", "x"), "--mean wants numbers"),
        (("--std", "0"), "std"),
        (("--classes", "/no/such"), "cannot be read"),
    ],
)
def test_bad_input_is_one_line(cli, options, sentence):
    assert sentence in cli.fails("describe", "models:/digits/1", *options)


def test_a_list_of_another_length_is_refused(cli, tmp_path):
    (tmp_path / "names.txt").write_text("one\ntwo\n")
    assert "10" in cli.fails("describe", "models:/digits/1", "--classes", tmp_path / "names.txt")


def test_what_a_model_puts_out_is_recorded_and_said(cli, scratch):
    lines = cli("describe", scratch).stdout
    assert "output logits: the model's outputs are logits" in lines
    assert cli.json("describe", scratch, "--output", "multilabel")["output"] == "multilabel"
    assert load_subject(scratch).output.name == "multilabel"
    assert "output softmax: the model's outputs are none" in cli.fails("describe", scratch, "--output", "softmax")
    assert cli.json("describe", scratch, "--output", "logits")["output_evidence"] == "the model's outputs are logits"
