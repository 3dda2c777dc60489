"""Which concepts explain which class: numbering, words, and what comes back from a manifest."""

import pytest

from auditor.errors import TamperError
from auditor.explainers.nmf.class_bases import ClassBases

BASES = ClassBases.of(3, 50, {9: ("dog", 2, 1), 4: ("cat", 5, 20)})


def test_concepts_are_numbered_over_all_bases_classes_in_order():
    assert [(p.index, p.first, p.stop) for p in BASES.parts] == [(-1, 0, 3), (4, 3, 8), (9, 8, 10)]
    assert BASES.n_concepts == 10
    assert [BASES.of_concept(k).index for k in range(10)] == [-1] * 3 + [4] * 5 + [9] * 2


def test_a_class_without_a_basis_takes_the_shared_one():
    assert BASES.for_class(4).name == "cat"
    assert BASES.for_class(5) is BASES.shared
    assert BASES.are_per_class
    assert not ClassBases.of(3, 50, {}).are_per_class


def test_few_images_are_said():
    assert BASES.for_class(9).words == "concepts of dog (only 1 image)"
    assert BASES.for_class(4).words == "concepts of cat (20 images)"
    assert BASES.shared.words == "concepts shared by all classes (50 images)"


def test_a_manifest_gives_it_back_and_earlier_ones_have_one_shared_basis():
    again = ClassBases.restore(BASES.to_json(), 10)
    assert again.parts == BASES.parts
    assert ClassBases.restore(None, 6).parts[0].concepts == range(6)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"class": -1}],
        "text",
        BASES.to_json()[:2],  # too few concepts
        BASES.to_json()[1:],  # no shared basis
        [BASES.to_json()[0], BASES.to_json()[2], BASES.to_json()[1]],
        [*BASES.to_json()[:2], {**BASES.to_json()[2], "concepts": [7, 10]}],  # overlaps
        [*BASES.to_json()[:2], {**BASES.to_json()[2], "class": 4}],  # twice
    ],
)
def test_rows_that_do_not_fit_are_refused(rows):
    with pytest.raises(TamperError, match="class bases"):
        ClassBases.restore(rows, 10)
