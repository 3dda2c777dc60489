"""The pieces of the demo; ``auditor demo`` as a whole is tested in tests/auditor/commands/test_demo.py."""

import numpy as np
import pytest
from PIL import Image

from auditor.errors import OptionError
from auditor.explainers.base import available_kinds
from auditor.plugins import demo


def test_every_kind_has_its_part_and_a_name_of_its_own():
    assert set(demo.KINDS) <= set(available_kinds())
    assert len({name for name, _ in demo.KINDS.values()}) == len(demo.KINDS) == 6


def test_kinds_are_chosen_by_name_or_all():
    assert demo.chosen_kinds([]) == list(demo.KINDS)
    assert demo.chosen_kinds(["tree", "nmf"]) == ["tree", "nmf"]
    with pytest.raises(OptionError, match="there is no kind 'lime'; the kinds are nmf, coupled"):
        demo.chosen_kinds(["nmf", "lime"])


def test_a_kind_that_is_not_available_is_left_out(monkeypatch):
    monkeypatch.setattr("auditor.explainers.base.available_kinds", lambda: ["nmf"])
    assert demo.chosen_kinds([]) == ["nmf"]
    with pytest.raises(OptionError, match="there is no kind 'tree'; the kinds are nmf"):
        demo.chosen_kinds(["tree"])


def test_the_picture_to_try_is_a_seven(digits, concepts, tmp_path):
    sheet, image = demo._pictures(digits, concepts, tmp_path)
    with Image.open(image) as picture:
        assert (picture.size, picture.mode) == ((8, 8), "L")
        pixels = np.asarray(picture, dtype=np.float32)[None, None] / 255
    assert digits.class_names[int(digits.logits(digits.pixels(pixels)).argmax())] == "7"
    with Image.open(sheet) as picture:
        assert min(picture.size) > 300


def test_a_file_in_the_way_is_refused_before_anything_is_trained(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OptionError, match="there is a file of this name"):
        demo.run_demo(tmp_path / "file", seed=0, progress=lambda *_: pytest.fail("training began"))
