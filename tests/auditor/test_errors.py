"""Every error a user can cause, and the tree that the docstring draws of them."""

import re

import pytest

from auditor import errors
from auditor.errors import AuditError


def drawn() -> dict[str, str]:
    """Each error of the drawing with the one it hangs under."""
    parents, above = {}, {}
    for line in errors.__doc__.splitlines():
        branch = re.match(r"([│ ]*[├└]── )?(\w+Error)\b", line)
        if branch:
            depth = len(branch[1] or "") // 4
            above[depth] = branch[2]
            parents[branch[2]] = above.get(depth - 1, "Exception")
    return parents


def test_the_drawing_is_the_class_tree():
    classes = {
        name: cls for name, cls in vars(errors).items() if isinstance(cls, type) and cls.__module__ == errors.__name__
    }
    assert set(drawn()) == set(classes)
    for name, parent in drawn().items():
        assert classes[name].__bases__[0].__name__ == parent, name


@pytest.mark.parametrize("name", sorted(drawn()))
def test_one_clause_catches_all_of_them(name):
    with pytest.raises(AuditError, match="said"):
        raise getattr(errors, name)("said")


@pytest.mark.parametrize("name", ["LayerError", "DataError", "ShapeError", "OptionError"])
def test_bad_values_are_also_pythons_own_kind(name):
    assert issubclass(getattr(errors, name), ValueError)
