"""Columns: which of a Parquet or Arrow schema holds the image and which its label, and what their cells say."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from auditor.data.item_labels import ItemLabels, read_labels
from auditor.data.label_matching import NO_CLASS
from auditor.data.python_objects import IMAGE_KEYS, LABEL_KEYS
from auditor.data.shards import Content
from auditor.data.store import LARGEST_IMAGE, Unreadable
from auditor.errors import DataError

IS = pa.types
NO_IMAGE = Unreadable("no image in this row", b"")
SHOWN = 12  # columns in a message


@dataclass(frozen=True, slots=True)
class Columns:
    """The image column, the label column or None, and the names of the classes where the file knows them."""

    image: str
    label: str | None
    names: tuple[str, ...] | None

    @property
    def all(self) -> list[str]:
        """Both columns."""
        return [self.image, *([] if self.label is None else [self.label])]


def choose_columns(schema: Any, image: str | None, label: str | None, spec: str) -> Columns:
    """Return the columns named, else those that are called and typed like an image and its label."""
    listed = ", ".join(f"{f.name} ({str(f.type)[:40]})" for f in list(schema)[:SHOWN])
    listed += f", and {len(schema) - SHOWN} more" if len(schema) > SHOWN else ""
    for name, what in ((image, "image"), (label, "label")):
        if name is not None and name not in schema.names:
            raise DataError(f"data {spec}: it has no column {name!r} to take the {what} from; its columns: {listed}.")
    able = [field.name for field in schema if _can_be_image(field.type)]
    if image is not None and image not in able:
        raise DataError(
            f"data {spec}: column {image!r} holds no images (files as bytes, arrays of numbers); its columns: {listed}."
        )
    if image is None:
        by_key = {name.lower(): name for name in reversed(able)}
        image = next((by_key[key] for key in IMAGE_KEYS if key in by_key), None)
        if image is None and len(able) == 1:
            image = able[0]
    if image is None and able:
        raise DataError(f"data {spec}: several columns may hold images ({', '.join(able)}); add ?image=COLUMN to it.")
    if image is None:
        raise DataError(
            f"data {spec}: none of its columns holds images (files as bytes, arrays of numbers); its columns: {listed}."
        )
    if label is None:
        fit = {f.name.lower(): f.name for f in schema if f.name != image and _can_be_label(f.type)}
        label = next((fit[key] for key in LABEL_KEYS if key in fit), None)
    return Columns(image, label, None if label is None else _class_names(schema, label))


def _can_be_image(kind: Any) -> bool:
    if IS.is_binary(kind) or IS.is_large_binary(kind) or IS.is_binary_view(kind):
        return True
    if IS.is_struct(kind):
        return any(field.name == "bytes" and _can_be_image(field.type) for field in kind)
    if isinstance(kind, pa.FixedShapeTensorType):
        return len(kind.shape) in (2, 3)
    depth = 0
    while _is_list(kind):
        kind, depth = kind.value_type, depth + 1
    return depth in (2, 3) and (IS.is_integer(kind) or IS.is_floating(kind))


def _is_list(kind: Any) -> bool:
    return bool(IS.is_list(kind) or IS.is_large_list(kind) or IS.is_fixed_size_list(kind))


def _can_be_label(kind: Any) -> bool:
    if _is_list(kind):
        kind = kind.value_type
    plain = kind.value_type if IS.is_dictionary(kind) else kind
    return bool(IS.is_integer(plain) or IS.is_boolean(plain) or _is_text(plain) or IS.is_floating(plain))


def _is_text(kind: Any) -> bool:
    return bool(IS.is_string(kind) or IS.is_large_string(kind) or IS.is_string_view(kind))


def _class_names(schema: Any, label: str) -> tuple[str, ...] | None:
    """Return the names of classes that Hugging Face's library writes into a schema."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        feature = features[label]
        feature = feature.get("feature", feature) if isinstance(feature, dict) else feature[0]
        names = feature["names"]
        return tuple(str(name) for name in names) if isinstance(names, list) and names else None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return None


def contents(column: Any, rows: Iterable[int]) -> Iterator[Content]:
    """Yield the image of each of these rows of a column."""
    tensors = column.to_numpy_ndarray() if isinstance(column.type, pa.FixedShapeTensorType) else None
    for row in rows:
        yield _content(column[row]) if tensors is None or not column[row].is_valid else np.array(tensors[row])


def _content(cell: Any) -> Content:
    if IS.is_struct(cell.type):
        if not cell.is_valid:
            return NO_IMAGE
        if not cell["bytes"].is_valid:
            return Unreadable("a path without the file's bytes", b"")
        cell = cell["bytes"]
    if not cell.is_valid:
        return NO_IMAGE
    value = cell.as_py()
    if isinstance(value, bytes):
        if len(value) <= LARGEST_IMAGE:
            return value
        return Unreadable(f"{len(value) / 2**20:.0f} MB is too large for an image", b"")
    try:
        array = np.array(value)
    except ValueError:
        return Unreadable("rows of different length", b"")
    if array.dtype.kind not in "buif":
        return Unreadable("gaps among its numbers", b"")
    integers = array.dtype.kind in "iu" and array.size and array.min() >= 0 and array.max() <= 255
    return array.astype(np.uint8) if integers else array.astype(np.float32)


class LabelColumn:
    """The labels of a column, put together from its parts in little memory: numbers as numbers, texts as numbers."""

    def __init__(self, names: tuple[str, ...] | None, spec: str) -> None:
        self.names, self.spec = names, spec
        self._parts: list[Any] = []
        self._texts: dict[str, int] = {}
        self._others: list[Any] | None = None
        self._types: set[str] = set()

    def add_none(self, n: int) -> None:
        """Add rows without a label."""
        self._add(np.full(n, NO_CLASS, dtype=np.int64), [None] * n)

    def add(self, column: Any) -> None:
        """Add the cells of a part of the column."""
        if IS.is_dictionary(column.type):
            column = column.dictionary_decode()
        if IS.is_integer(column.type) or IS.is_boolean(column.type):
            numbers = column.cast(pa.int64()).fill_null(NO_CLASS).to_numpy(zero_copy_only=False)
            self._add(np.array(numbers, dtype=np.int64), None, "numbers")
        else:
            self.add_values(column.to_pylist())

    def add_values(self, values: list[Any]) -> None:
        """Add labels as Python has them."""
        if all(value is None or isinstance(value, str) for value in values):
            codes = [NO_CLASS if v is None else self._texts.setdefault(v, len(self._texts)) for v in values]
            self._add(np.array(codes, dtype=np.int64), None, "names" if any(c >= 0 for c in codes) else None)
        elif all(value is None or type(value) is int for value in values):
            self._add(np.array([NO_CLASS if v is None else v for v in values], dtype=np.int64), None, "numbers")
        else:
            self._others = [] if self._others is None else self._others
            self._add(np.full(len(values), NO_CLASS, dtype=np.int64), values, "lists")

    def _add(self, numbers: Any, values: list[Any] | None, of_type: str | None = None) -> None:
        self._types |= {of_type} if of_type else set()
        if len(self._types) > 1:
            what = " and ".join(sorted(self._types))
            raise DataError(f"data {self.spec}: its labels are {what}; give all rows the same.")
        if values is not None and self._others is not None:
            self._others += values
        self._parts.append(numbers)

    def labels(self) -> ItemLabels:
        """Return the labels of all rows."""
        numbers = np.concatenate([np.zeros(0, dtype=np.int64), *self._parts])
        if self._others is not None:
            missing = len(numbers) - len(self._others)
            return read_labels([None] * missing + self._others, self.names, f"data {self.spec}")
        if self._texts:
            texts = list(self._texts)
            of_names = read_labels(texts, self.names, f"data {self.spec}")
            class_of_text = np.append(of_names.numbers, NO_CLASS)
            return ItemLabels(class_of_text[numbers], of_names.names)
        if len(numbers) and numbers.min() < NO_CLASS:
            raise DataError(f"data {self.spec}: labels must be class numbers from 0, or names, got {numbers.min()}.")
        if self.names is not None and len(numbers) and numbers.max() >= len(self.names):
            raise DataError(
                f"data {self.spec}: it has {len(self.names)} class names and a label {numbers.max()}; give one name "
                "per class."
            )
        return ItemLabels(numbers, self.names)
