import pytest

from auditor.errors import DataError
from auditor.explainers.coupled.superclasses import read_superclasses

LABELS = ["cat", "dog", "pickup truck"]


def write(tmp_path, text):
    (tmp_path / "super.csv").write_text(text)
    return tmp_path / "super.csv"


def test_labels_get_their_super_class_with_and_without_a_header(tmp_path):
    text = "pickup truck, vehicle\ncat,animal\n"
    for head in ("", "label,superclass\n", "Class,group\n"):
        assert read_superclasses(write(tmp_path, head + text), LABELS) == ("animal", "no super-class", "vehicle")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("cat,animal\npick up truck,vehicle\n", "no label 'pick up truck'; the nearest label is 'pickup truck'"),
        ("zzz,animal\n", "no label 'zzz'; labels are such as 'cat', 'dog'"),
        ("cat,animal,old\n", "want a CSV file of two columns, label,superclass, got cat,animal,old"),
        ("", "got an empty file"),
    ],
)
def test_what_does_not_match_is_named_with_the_nearest(tmp_path, text, sentence):
    with pytest.raises(DataError, match=sentence):
        read_superclasses(write(tmp_path, text), LABELS)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_superclasses(tmp_path / "none.csv", LABELS)
