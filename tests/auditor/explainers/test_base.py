"""The contract of an explainer: what the rest of the product asks, answered alike by every kind."""

import pytest

from auditor.errors import OptionError

MODEL = "models:/digits/1"


def test_x_features_can_be_named_at_the_terminal(cli, digits, heads):
    from auditor.plugins import attach, detach, load

    attach(heads, MODEL, "heads", subject=digits, attach_anyway=True)
    try:
        assert cli.json("label", MODEL, "heads", "2", "closed  loop")["label"] == "closed loop"
        assert load(MODEL, "heads", subject=digits).label(2) == "closed loop"
        assert f"has concepts 0 to {heads.n_concepts - 1}" in cli.fails("label", MODEL, "heads", "5", "beyond")
    finally:
        detach(MODEL, "heads")


@pytest.mark.parametrize("index", [-1, 6])
def test_only_concepts_that_exist_are_named(concepts, index):
    before = dict(concepts.labels)
    with pytest.raises(OptionError, match=f"has concepts 0 to 5, got {index}"):
        concepts.rename(index, "stripes")
    assert concepts.labels == before


@pytest.mark.parametrize("text", ["", "   ", "x" * 81, "bell\a"])
def test_a_name_is_1_to_80_printable_characters(concepts, text):
    before = dict(concepts.labels)
    with pytest.raises(OptionError, match="1 to 80 printable characters"):
        concepts.rename(0, text)
    assert concepts.labels == before


def test_the_longest_name_is_taken_and_spaces_become_one(concepts):
    before = dict(concepts.labels)
    try:
        concepts.rename(0, " " + "x" * 80 + "\n")
        assert concepts.label(0) == "x" * 80
        concepts.rename(0, "a\t b")
        assert concepts.label(0) == "a b"
    finally:
        concepts.labels = before
