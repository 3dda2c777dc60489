"""Tables of images: a pandas frame with an image column, and Hugging Face's data sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from auditor.data.image_items import is_image
from auditor.data.item_data import Item, ItemData
from auditor.data.item_labels import ItemLabels, read_labels
from auditor.data.source import Data
from auditor.errors import DataError

if TYPE_CHECKING:
    from auditor.data.python_objects import ItemNames, Reading


def is_image_cell(cell: Any) -> bool:
    """Whether a cell of a table can be an image; nested lists are arrays that went through a file."""
    return is_image(cell) or (isinstance(cell, (list, tuple)) and np.ndim(cell) in (2, 3))


def image_column(frame: Any, name: Any = None, remedy: str = "open_data(…, image=…)") -> Any:
    """Return the column of a pandas frame that holds images: the one named, else the only one that can."""
    if name is not None:
        if name not in frame.columns:
            names = ", ".join(str(c) for c in frame.columns)
            raise DataError(f"image_column {name}: the table has no such column; there are: {names}.")
        return name
    columns = [c for c in frame.columns if len(frame) and is_image_cell(frame[c].iloc[0])]
    if len(columns) == 1:
        return columns[0]
    what = (
        f"{len(columns)} columns may hold images ({', '.join(map(str, columns))})"
        if columns
        else "no column holds images"
    )
    raise DataError(f"data: {what}; name it: {remedy}.")


def open_table(frame: Any, reading: Reading, options: Mapping[str, Any], label_keys: Sequence[str]) -> Data:
    """Open a pandas frame: cells are images, arrays, paths, encoded files or mappings with one of them."""
    if not len(frame):
        raise DataError("data DataFrame: it has no rows; give at least one.")
    column = image_column(frame, reading.image)
    label = _label_column(frame, column, reading.label, label_keys)
    spec = f"DataFrame({column!s}{'' if label is None else f', {label!s}'})"
    labels = ItemLabels.none(len(frame)) if label is None else _frame_labels(frame[label], spec)
    cells = list(frame[column])

    def read(rows: Sequence[int]) -> Iterator[Item]:
        return ((cells[i], None) for i in rows)

    return ItemData(spec, len(cells), read, labels=labels, applied=reading.applied, source=frame, **options)


def _label_column(frame: Any, image: Any, name: str | None, label_keys: Sequence[str]) -> Any:
    if name is not None:
        if name not in frame.columns:
            raise DataError(
                f"label column {name}: the table has no such column; there are: {', '.join(map(str, frame.columns))}."
            )
        return name
    by_name = {str(c).lower(): c for c in frame.columns if c != image}
    return next((by_name[key] for key in label_keys if key in by_name), None)


def _frame_labels(column: Any, spec: str) -> ItemLabels:
    categories = getattr(getattr(column, "cat", None), "categories", None)
    names = [str(c) for c in categories] if categories is not None and categories.dtype.kind in "OUST" else None
    values = [None if value is None or value != value else value for value in column]
    return read_labels(values, names, f"data {spec}")


def open_hugging_face(
    source: Any,
    reading: Reading,
    options: Mapping[str, Any],
    names_of_item: Callable[..., ItemNames],
    watched: Callable[..., Data],
) -> Data:
    """Open a Hugging Face data set: its image column, and its labels with the names of their classes."""
    n = len(source)
    spec = f"Dataset({', '.join(source.column_names)})"
    if n == 0:
        raise DataError(f"data {spec}: it is empty; give at least one image.")
    names = names_of_item(source[0], reading, spec)
    feature = source.features.get(names.label) if names.label is not None else None
    feature = getattr(feature, "feature", feature)  # of a list of labels
    classes = getattr(feature, "names", None)
    labels = ItemLabels.none(n)
    if names.label is not None and names.label in source.column_names and options.get("label_table") != {}:
        labels = read_labels(list(source.with_format(None)[names.label]), classes, f"data {spec}")

    def read(rows: Sequence[int]) -> Iterator[Item]:
        return (names.of(source[int(i)]) for i in rows)

    data = ItemData(spec, n, read, labels=labels, applied=reading.applied, source=source, **options)
    return watched(data, None, reading, options)
