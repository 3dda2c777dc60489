"""Label matching: which class of the model each label of the data is, by name or by a table that a person wrote.

Names are compared as they are, then without case, spaces, underscores and hyphens, then without a number in front
(``001.Black_footed_Albatross`` is ``Black footed albatross``), then up to a comma. A label that is no class of the
model stays apart: it is never given a class by its number. Only a model without class names takes labels in order.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from auditor.errors import DataError

NO_CLASS = -1
WITHOUT = ("", "-", "none")  # what a table says of a label that is no class
MOST_LABELS = 100_000  # lines of a table
SHOWN = 5  # names in a message


@dataclass(frozen=True, slots=True)
class LabelMatching:
    """Class number of every label of the data, -1 for those that are no class of the model."""

    classes: tuple[int, ...]
    by: Literal["name", "table", "order", "nothing"]
    unmatched: tuple[str, ...] = ()  # labels that no table marks as no class


LabelTable = Mapping[str, str]  # label of the data -> class by name or number; "" or "-": no class


def match_labels(labels: Sequence[str], classes: Sequence[str], table: LabelTable | None = None) -> LabelMatching:
    """Match the labels of data to the classes of a model; ``table`` decides for the labels it names.

    >>> match_labels(["002.Laysan_Albatross", "sooty albatross"], ["Sooty Albatross", "Laysan Albatross"]).classes
    (1, 0)
    >>> match_labels(["round", "straight"], ["0", "1", "2"])
    LabelMatching(classes=(-1, -1), by='nothing', unmatched=('round', 'straight'))
    """
    names = list(classes) if len(classes) > 1 else _two_sides(labels, classes)
    if table:
        return _by_table(labels, names, table)
    numbers = _by_name(labels, names)
    unmatched = tuple(label for label, number in zip(labels, numbers, strict=True) if number == NO_CLASS)
    if not unmatched:
        return LabelMatching(tuple(numbers), "name")
    if has_no_names(names) and len(labels) == len(names):
        return LabelMatching(tuple(range(len(labels))), "order")
    return LabelMatching(tuple(numbers), "nothing" if len(unmatched) == len(labels) else "name", unmatched)


def has_no_names(classes: Sequence[str]) -> bool:
    """Whether the classes are called by their numbers only, as they are when no names were given.

    >>> has_no_names(["0", "1"]), has_no_names(["1", "0"])
    (True, False)
    """
    return list(classes) == [str(i) for i in range(len(classes))]


def read_label_table(path: str | Path) -> dict[str, str]:
    """Read a CSV with one line per label: label of the data, class of the model by name or number ("-": no class)."""
    path = Path(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            rows = [[cell.strip() for cell in row] for row in csv.reader(stream) if any(cell.strip() for cell in row)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"labels {path}: cannot be read ({error}); give a CSV with lines: folder,class.") from None
    if rows and [cell.casefold() for cell in rows[0]] in (["folder", "class"], ["label", "class"]):
        rows = rows[1:]
    if not 1 <= len(rows) <= MOST_LABELS:
        raise DataError(f"labels {path}: want 1 to {MOST_LABELS} lines folder,class, got {len(rows)}.")
    table: dict[str, str] = {}
    for number, row in enumerate(rows, 1):
        if len(row) != 2:
            raise DataError(
                f"labels {path}, row {number}: want two cells, folder,class, got {len(row)} ({','.join(row)[:60]})."
            )
        if table.setdefault(row[0], row[1]) != row[1]:
            raise DataError(f"labels {path}: {row[0]!r} is given two classes, {table[row[0]]!r} and {row[1]!r}.")
    return table


def mismatch(labels: Sequence[str], classes: Sequence[str], unmatched: Sequence[str]) -> str:
    """Return the names side by side: labels that are no class, each with the nearest class, and the way out."""
    near = [_nearest(label, classes) for label in unmatched[:SHOWN]]
    pairs = [f"{label!r}" + (f" (near {name!r})" if name else "") for label, name in zip(unmatched, near, strict=False)]
    more = f" and {len(unmatched) - SHOWN} more" if len(unmatched) > SHOWN else ""
    some = ", ".join(repr(name) for name in classes[:SHOWN]) + (", …" if len(classes) > SHOWN else "")
    counted = f"{len(unmatched)} of its {len(labels)} labels are"
    if has_no_names(classes):
        of_model = f"the model's {len(classes)} classes have no names"
        remedy = "name them (auditor describe --classes), or say which is which"
    else:
        of_model = f"the model has {len(classes)} classes: {some}"
        remedy = "say which is which"
    return (
        f"{counted} no class of the model: {', '.join(pairs)}{more}; {of_model}. Match the names, or {remedy}: "
        "--labels map.csv with lines folder,class (class by name or number, - for none); --labels none leaves them out."
    )


def _by_table(labels: Sequence[str], classes: Sequence[str], table: LabelTable) -> LabelMatching:
    if not any(label in table for label in labels):
        named, of_data = (", ".join(map(repr, list(names)[:SHOWN])) for names in (table, labels))
        raise DataError(f"labels: the table names no label of the data: it has {named}, the data {of_data}.")
    rest = [label for label in labels if label not in table]
    by_name = dict(zip(rest, _by_name(rest, classes), strict=True))
    numbers = [_class_of(table[x], classes) if x in table else by_name[x] for x in labels]
    unmatched = tuple(x for x in rest if by_name[x] == NO_CLASS)
    return LabelMatching(tuple(numbers), "table", unmatched)


def _class_of(text: str, classes: Sequence[str]) -> int:
    if text.casefold() in WITHOUT and text not in classes:
        return NO_CLASS
    (number,) = _by_name([text], classes)
    if number == NO_CLASS and text.isdecimal() and int(text) < len(classes):
        number = int(text)
    if number == NO_CLASS:
        near = _nearest(text, classes)
        raise DataError(
            f"labels: the table names class {text!r}, which the model does not have"
            + (f"; near is {near!r}." if near else f"; give a name, or a number from 0 to {len(classes) - 1}.")
        )
    return number


def _by_name(labels: Sequence[str], classes: Sequence[str]) -> list[int]:
    """Return the class of every label by the strictest comparison that gives one, and only one for each side."""
    numbers = [NO_CLASS] * len(labels)
    for key in COMPARED:
        of_key: dict[str, list[int]] = {}
        for number, name in enumerate(classes):
            of_key.setdefault(key(name), []).append(number)
        open_labels = [i for i, number in enumerate(numbers) if number == NO_CLASS]
        keys = [key(labels[i]) for i in open_labels]
        for i, k in zip(open_labels, keys, strict=True):
            candidates = of_key.get(k, [])
            if k and len(candidates) == 1 and keys.count(k) == 1 and candidates[0] not in numbers:
                numbers[i] = candidates[0]
    return numbers


def _plain(name: str) -> str:
    return re.sub(r"[\s_\-]+", " ", name).strip().casefold()


def _without_number(name: str) -> str:
    """Return the plain name without a number in front; a name that is nothing but a number stays."""
    return re.sub(r"^\d+[\s._\-]+(?=\S*[^\W\d])", "", _plain(name))


def _first_synonym(name: str) -> str:
    """Return the name up to a comma: ``tench, Tinca tinca`` is ``tench``."""
    return _without_number(name).partition(",")[0].strip()


COMPARED: tuple[Callable[[str], str], ...] = (str, _plain, _without_number, _first_synonym)


def _two_sides(labels: Sequence[str], classes: Sequence[str]) -> list[str]:
    """Return the two classes of a single logit: it is that of label 1, so the label of its name is the second."""
    if len(labels) == 2 and _by_name(labels, classes).count(0) == 1:
        here = _by_name(labels, classes).index(0)
        return [labels[1 - here], labels[here]]
    return ["0", "1"]


def _nearest(label: str, names: Sequence[str]) -> str:
    keys = {_without_number(name): name for name in names}
    near = get_close_matches(_without_number(label), list(keys), n=1, cutoff=0.6)
    return keys[near[0]] if near else ""
