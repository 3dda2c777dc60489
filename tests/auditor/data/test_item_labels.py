"""Labels as programs hold them: numbers, names, sets; what they are called, and what is none."""

import numpy as np
import pandas as pd
import pytest
import torch

from auditor.data.item_labels import ItemLabels, label_text, read_labels
from auditor.errors import DataError


@pytest.mark.parametrize(
    ("values", "names", "want"),
    [
        ([2, 0, None, -1], None, [2, 0, -1, -1]),
        (torch.tensor([1, 2]), None, [1, 2]),
        ([np.int64(3), torch.tensor(1), 2.0], None, [3, 1, 2]),
        ([float("nan"), 1], None, [-1, 1]),
        ([True, False], None, [1, 0]),
        (["b", "a", None, "b"], None, [1, 0, -1, 1]),
        (["b", "a"], ["b", "c", "a"], [0, 2]),
        ([[1], [0]], None, [1, 0]),
        ([[0, 0, 1], [1, 0, 0]], None, [2, 0]),
        ([[2], [0], [1]], ["x", "y", "z"], [2, 0, 1]),
        ([], None, []),
    ],
)
def test_one_class_per_image(values, names, want):
    labels = read_labels(values, names, "here")
    assert labels.numbers.tolist() == want
    assert labels.single.tolist() == want


@pytest.mark.parametrize(
    ("values", "names", "want"),
    [
        ([[1, 1, 0], [0, 0, 0]], None, [[1, 1, 0], [0, 0, 0]]),
        ([[0, 2], [1], None], None, [[1, 0, 1], [0, 1, 0], [0, 0, 0]]),
        ([[0, 2], [1, 2]], ["a", "b", "c", "d"], [[1, 0, 1, 0], [0, 1, 1, 0]]),
        (torch.tensor([[1.0, 1.0], [0.0, 1.0]]), None, [[1, 1], [0, 1]]),
    ],
)
def test_several_classes_per_image(values, names, want):
    labels = read_labels(values, names, "here")
    assert labels.numbers.tolist() == want
    assert labels.single.tolist() == [row.index(1) if sum(row) == 1 else -1 for row in want]


@pytest.mark.parametrize(
    ("values", "names", "sentence"),
    [
        ([0.5, 1], None, r"class numbers from 0, names, or rows of 0 and 1, got 0.5"),
        ([-2], None, "got -2"),
        ([0, 3], ["a", "b"], "it has 2 class names and a label 3"),
        (["a", "q"], ["a", "b"], "label 'q' is none of its class names"),
        ([[0, 5], [1]], ["a", "b"], "it has 2 class names and a label 5"),
        ([["a", "b"]], None, "labels of several classes must be numbers"),
        ([[0, -1], [2]], None, "class numbers, or 0 and 1 per label"),
        ([[0, 1.5], [2]], None, "class numbers, or 0 and 1 per label"),
    ],
)
def test_what_is_no_label_is_refused(values, names, sentence):
    with pytest.raises(DataError, match=f"^here: .*{sentence}"):
        read_labels(values, names, "here")


def test_labels_are_called_by_their_names():
    labels = read_labels(["b", "a", None], None, "here")
    assert [labels.text(i) for i in range(3)] == ["b", "a", "-1"]
    assert read_labels([1], None, "here").text(0) == "1"
    assert read_labels([[1, 1]], ["a", "b"], "here").text(0) == "[1, 1]"
    assert read_labels([0], [("tench", "Tinca tinca")], "here").text(0) == "tench, Tinca tinca"


def test_text_of_a_label_is_the_same_whoever_holds_it():
    assert label_text(3) == label_text(np.int64(3)) == label_text(torch.tensor(3)) == label_text(np.array([3])) == "3"
    assert label_text(pd.Series(["x"])[0]) == "x"


def test_images_without_labels():
    labels = ItemLabels.none(3)
    assert labels.numbers.tolist() == [-1, -1, -1]
    assert labels.names is None
