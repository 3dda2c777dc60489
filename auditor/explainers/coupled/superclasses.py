"""Super-classes: a second name for the labels of the probe images, which no network was trained on.

A CSV file has two columns, label and super-class. They serve as a pseudonym of each concept, as in table I of
[CoupledNMF].
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from auditor.errors import DataError

UNNAMED = "no super-class"
HEADERS = ("label", "labels", "class", "name")


def read_superclasses(path: str | Path, labels: Sequence[str]) -> tuple[str, ...]:
    """Return the super-class of every label; a label that the file leaves out has none, an unknown one is an error.

    >>> import tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "super.csv"
    >>> _ = file.write_text("label,superclass" + chr(10) + "cat,animal" + chr(10) + "dog,animal" + chr(10))
    >>> read_superclasses(file, ["cat", "dog", "car"])
    ('animal', 'animal', 'no super-class')
    """
    where, wanted = f"superclasses {path}", "want a CSV file of two columns, label,superclass"
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            rows = [[cell.strip() for cell in row] for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{where}: cannot be read ({error}); {wanted}.") from None
    wrong = [row for row in rows if len(row) != 2 or not all(row)]
    if wrong or not rows:
        raise DataError(f"{where}: {wanted}, got {','.join(wrong[0])[:80] if wrong else 'an empty file'}.")
    names = dict(rows[1:] if rows[0][0].lower() in HEADERS else rows)
    for name in names:
        if name not in labels:
            near = get_close_matches(name, labels, n=1, cutoff=0.5)
            shown = ", ".join(map(repr, labels[:5]))
            hint = f"the nearest label is {near[0]!r}" if near else f"labels are such as {shown}"
            raise DataError(f"{where}: the data has no label {name!r}; {hint}.")
    return tuple(names.get(label, UNNAMED) for label in labels)
