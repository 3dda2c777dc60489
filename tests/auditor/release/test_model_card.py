"""The model card: fields people give, what is missing, and mistakes in the file."""

from dataclasses import replace

import pytest

from auditor.errors import OptionError
from auditor.release.model_card import card_json, fill, read_card


def test_the_card_says_what_is_missing(audited, tmp_path):
    path = tmp_path / "card.toml"
    path.write_text('intended_use = "Reading digits."\nowner = ""\n')
    card = fill(read_card(path))
    assert card["fields"]["intended_use"] == "Reading digits."
    assert "owner" in card["missing"]
    assert "intended_use" not in card["missing"]
    whole = card_json(replace(audited, card=card))
    assert whole["performance"]["model/accuracy"]["value"] > 0.9
    assert {"limits", "training_data", "versions", "model", "evaluation_data", "audit"} <= set(whole)


@pytest.mark.parametrize(
    ("text", "message"),
    [("purpose = 'x'", "'purpose' is not a field"), ("owner = 3", "owner must be text"), ("owner =", "it is not TOML")],
)
def test_a_card_with_mistakes(tmp_path, text, message):
    path = tmp_path / "card.toml"
    path.write_text(text)
    with pytest.raises(OptionError, match=message):
        read_card(path)
