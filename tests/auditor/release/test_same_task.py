"""Same task: sizes and classes must agree, in order."""

from types import SimpleNamespace

import pytest

from auditor.errors import OptionError, ShapeError
from auditor.release.same_task import check_comparable


def model(shape=(3, 9, 11), names=("a", "b", "c")):
    return SimpleNamespace(input_shape=shape, class_names=names)


def test_the_same_question_about_the_same_images():
    check_comparable(model(), model([3, 9, 11]))


@pytest.mark.parametrize(
    ("other", "error", "said"),
    [
        (model((3, 11, 9)), ShapeError, r"different sizes, \(3, 9, 11\) and \(3, 11, 9\)"),
        (model(names=("a", "c", "b")), OptionError, r"3 and 3 classes, the order differs"),
        (model(names=("a", "b")), OptionError, r"3 and 2 classes, only one of them has c\)"),
    ],
)
def test_another_question_is_one_sentence(other, error, said):
    with pytest.raises(error, match=said):
        check_comparable(model(), other)
