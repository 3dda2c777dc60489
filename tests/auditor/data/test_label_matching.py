"""Labels of data against classes of a model: names in every spelling, tables, and what must never be guessed."""

import pytest

from auditor.data.label_matching import LabelMatching, has_no_names, match_labels, mismatch, read_label_table
from auditor.errors import DataError

BIRDS = ["Black footed albatross", "Laysan Albatross", "crane, Grus"]


@pytest.mark.parametrize(
    ("label", "number"),
    [
        ("Black footed albatross", 0),
        ("black_footed__ALBATROSS", 0),
        ("001.Black_footed_Albatross", 0),
        ("2 - laysan-albatross", 1),
        ("crane", 2),
        ("3_Crane", 2),
        ("albatross", -1),
        ("", -1),
        ("1", -1),
    ],
)
def test_a_name_is_matched_in_its_usual_spellings(label, number):
    assert match_labels([label], BIRDS).classes == (number,)
    assert match_labels([label], BIRDS).unmatched == (() if number >= 0 else (label,))


def test_the_strictest_comparison_wins_and_no_class_is_given_twice():
    classes = ["Cat", "cat", "dog"]
    assert match_labels(["cat", "Cat"], classes).classes == (1, 0)
    assert match_labels(["CAT"], classes).classes == (-1,)  # two classes are as near: nobody can say which
    assert match_labels(["dog", "DOG"], classes) == LabelMatching((2, -1), "name", ("DOG",))
    assert match_labels(["DOG", "Dog"], classes).classes == (-1, -1)  # two labels for one class
    assert match_labels(["crane"], ["crane", "crane"]).classes == (-1,)  # as in ImageNet


def test_only_classes_without_names_are_taken_in_order_and_only_when_all_are_there():
    assert match_labels(["cat", "dog"], ["0", "1"]) == LabelMatching((0, 1), "order")
    assert match_labels(["1", "0"], ["0", "1"]) == LabelMatching((1, 0), "name")
    foreign = match_labels(["mixed", "round", "straight"], [str(i) for i in range(10)])
    assert foreign == LabelMatching((-1, -1, -1), "nothing", ("mixed", "round", "straight"))
    assert match_labels(["a", "b"], ["x", "y"]).classes == (-1, -1)
    assert has_no_names(["0"])
    assert not has_no_names(["1", "2"])


def test_a_single_logit_is_that_of_the_second_label():
    assert match_labels(["benign", "malignant"], ["malignant"]).classes == (0, 1)
    assert match_labels(["Malignant", "other"], ["malignant"]).classes == (1, 0)
    assert match_labels(["a", "b"], ["0"]) == LabelMatching((0, 1), "order")


def test_a_table_decides_by_name_or_number_and_names_decide_for_the_rest():
    table = {"white": "Laysan Albatross", "dark": "0", "junk": "-"}
    labels = ["Crane", "dark", "junk", "white", "what"]
    assert match_labels(labels, BIRDS, table) == LabelMatching((2, 0, -1, 1, -1), "table", ("what",))
    assert match_labels(["a", "b"], ["x", "y"], {"a": "y", "b": "y"}).classes == (1, 1)  # many labels, one class
    assert match_labels(["a"], ["5", "0"], {"a": "0"}).classes == (1,)  # a name before a number
    with pytest.raises(DataError, match="class 'Laysan Albatros', which the model does not have; near is 'Laysan"):
        match_labels(["white"], BIRDS, {"white": "Laysan Albatros"})
    with pytest.raises(DataError, match="a number from 0 to 2"):
        match_labels(["white"], BIRDS, {"white": "3"})
    with pytest.raises(DataError, match="names no label of the data: it has 'whit', the data 'white'"):
        match_labels(["white"], BIRDS, {"whit": "1"})


def test_the_sentence_shows_names_side_by_side():
    text = mismatch(["Laysan_Albatros", "x"], BIRDS, ["Laysan_Albatros", "x"])
    assert "2 of its 2 labels are no class of the model: 'Laysan_Albatros' (near 'Laysan Albatross'), 'x';" in text
    assert "the model has 3 classes: 'Black footed albatross', 'Laysan Albatross', 'crane, Grus'." in text
    assert "--labels map.csv" in text
    assert "--labels none" in text
    many = [f"label {i}" for i in range(9)]
    assert "'label 4' and 4 more;" in mismatch(many, ["0", "1"], many).replace(" (near '0')", "")
    assert "classes have no names" in mismatch(many, ["0", "1"], many)


def test_a_table_is_read_with_or_without_a_head(tmp_path):
    path = tmp_path / "map.csv"
    path.write_text('\ufefffolder,class\n"a, b",1\n\n c , Laysan Albatross\n', encoding="utf-8")
    assert read_label_table(path) == {"a, b": "1", "c": "Laysan Albatross"}
    path.write_text("a,1\na,1\n")
    assert read_label_table(path) == {"a": "1"}
    for text, sentence in (
        ("a,1\na,2\n", "'a' is given two classes, '1' and '2'"),
        ("a;1\n", "row 1: want two cells, folder,class, got 1 .a;1."),
        ("", "want 1 to 100000 lines folder,class, got 0"),
        ("folder,class\n", "got 0"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=sentence):
            read_label_table(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read"):
        read_label_table(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_label_table(tmp_path / "none.csv")
