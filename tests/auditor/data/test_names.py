"""Names against a plain list: found by bisection when sorted, by a table when not."""

import pytest

from auditor.data.names import Names
from tests.stores import travelled


@pytest.mark.parametrize("texts", [["a", "ab", "b", "ü", "中"], ["b", "a", "c/d", "a.png"], []])
def test_names_are_those_of_a_list(texts):
    names = Names(texts)
    assert list(names) == texts
    assert len(names) == len(texts)
    assert names.is_sorted == (texts == sorted(texts, key=str.encode))
    for row, text in enumerate(texts):
        assert names[row] == texts[row]
        assert names[row - len(texts)] == text
        assert names.find(text) == row
    assert names.find("nosuch") is None
    assert names[1:3] == texts[1:3]
    with pytest.raises(IndexError):
        names[len(texts)]


def test_a_name_twice_is_not_sorted_and_the_first_is_found():
    names = Names(["a", "b", "b"])
    assert not names.is_sorted
    assert names.find("b") == 1


def test_bytes_that_are_no_text_survive():
    odd = b"caf\xe9.png".decode(errors="surrogateescape")
    names = Names([odd])
    assert names[0] == odd
    assert names.find(odd) == 0


def test_they_travel():
    names = Names(["a", "b"])
    assert list(travelled(names)) == ["a", "b"]
