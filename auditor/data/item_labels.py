"""Item labels: what data objects say of their images, as class numbers, as names, or as one truth value per label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from auditor.data.label_matching import NO_CLASS
from auditor.errors import DataError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class ItemLabels:
    """Labels of n images: class numbers (n,), -1 without one, or 0 and 1 (n, labels); and their names where known."""

    numbers: Array
    names: tuple[str, ...] | None = None

    @property
    def single(self) -> Array:
        """Return one class number per image; -1 for those with none or several."""
        if self.numbers.ndim == 1:
            return self.numbers
        return np.where(self.numbers.sum(1) == 1, self.numbers.argmax(1), NO_CLASS)

    def text(self, row: int) -> str:
        """Return the label of an image, by its name where it has one."""
        number = self.numbers[row]
        if self.names is None or self.numbers.ndim == 2 or number < 0:
            return label_text(number)
        return self.names[int(number)]

    @classmethod
    def none(cls, n: int) -> ItemLabels:
        """Return the labels of images without any."""
        return cls(np.full(n, NO_CLASS, dtype=np.int64))


def read_labels(values: Sequence[Any], names: Sequence[str] | None, where: str) -> ItemLabels:
    """Return labels as programs hold them: numbers, names, rows of 0 and 1, lists of the numbers that are true.

    >>> read_labels(["dog", "cat", None], None, "here").numbers.tolist()
    [1, 0, -1]
    >>> read_labels([[0, 1, 0], [1, 0, 0]], None, "here").numbers.tolist()
    [1, 0]
    """
    plain = [_plain(value) for value in values]
    if any(isinstance(value, list) for value in plain):
        return _sets(plain, names, where)
    if any(isinstance(value, str) for value in plain):
        return _named(plain, names, where)
    numbers = np.array([NO_CLASS if v is None else v for v in plain], dtype=np.float64)
    if numbers.size and (not np.array_equal(numbers, np.floor(numbers)) or numbers.min() < NO_CLASS):
        wrong = next(v for v in plain if v is not None and (v != np.floor(v) or v < NO_CLASS))
        raise DataError(f"{where}: labels must be class numbers from 0, names, or rows of 0 and 1, got {wrong}.")
    whole = numbers.astype(np.int64)
    if names is not None and whole.size and whole.max() >= len(names):
        raise DataError(f"{where}: it has {len(names)} class names and a label {whole.max()}; give one name per class.")
    return ItemLabels(whole, _text(names))


def label_text(value: Any) -> str:
    """Return a label for a digest."""
    return str(_plain(value))


def _plain(value: Any) -> Any:
    """Return a label as None, a number, a text or a list of numbers."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if hasattr(value, "tolist"):  # numpy's, torch's and pandas' scalars and rows
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        flat = [_plain(v) for v in value]
        return flat[0] if len(flat) == 1 and not isinstance(flat[0], list) else flat
    return None if isinstance(value, float) and np.isnan(value) else value


def _named(plain: list[Any], names: Sequence[str] | None, where: str) -> ItemLabels:
    texts = [None if v is None else str(v) for v in plain]
    of_data = tuple(sorted({t for t in texts if t is not None}))
    class_names = tuple(map(str, names)) if names is not None else of_data
    unknown = [name for name in of_data if name not in class_names]
    if unknown:
        raise DataError(f"{where}: label {unknown[0]!r} is none of its class names ({', '.join(class_names[:5])}, …).")
    number = {name: i for i, name in enumerate(class_names)}
    return ItemLabels(np.array([NO_CLASS if t is None else number[t] for t in texts], dtype=np.int64), class_names)


def _sets(plain: list[Any], names: Sequence[str] | None, where: str) -> ItemLabels:
    """Return rows of 0 and 1, or lists of the numbers that are true; rows with a single 1 each are class numbers."""
    rows = [[] if v is None else v if isinstance(v, list) else [v] for v in plain]
    if any(isinstance(v, (str, list)) or v is None for row in rows for v in row):
        raise DataError(f"{where}: labels of several classes must be numbers, got {rows[0][:3]}.")
    widths = {len(row) for row in rows}
    values = {v for row in rows for v in row}
    if len(widths) == 1 and values <= {0, 1}:
        truth = np.array(rows, dtype=np.int64)
    else:
        if any(v != int(v) or v < 0 for v in values):
            raise DataError(f"{where}: several labels per image must be class numbers, or 0 and 1 per label.")
        width = len(names) if names is not None else int(max(values, default=0)) + 1
        if values and max(values) >= width:
            raise DataError(f"{where}: it has {width} class names and a label {int(max(values))}.")
        truth = np.zeros((len(rows), width), dtype=np.int64)
        for i, row in enumerate(rows):
            truth[i, [int(v) for v in row]] = 1
    return ItemLabels(truth.argmax(1) if bool((truth.sum(1) == 1).all()) else truth, _text(names))


def _text(names: Sequence[Any] | None) -> tuple[str, ...] | None:
    """Return names as text; synonyms in a tuple, as ImageNet's, are joined by commas."""
    if not names:
        return None
    return tuple(", ".join(map(str, name)) if isinstance(name, (tuple, list)) else str(name) for name in names)
