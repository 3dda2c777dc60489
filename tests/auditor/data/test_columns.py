"""Columns: the image among them, its label, and cells of every type that holds an image."""

import json

import numpy as np
import pyarrow as pa
import pytest

from auditor.data.columns import LabelColumn, choose_columns, contents
from auditor.data.store import Unreadable
from auditor.errors import DataError
from tests.stores import picture

BYTES = pa.binary()
FEATURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
HUGGING = json.dumps({"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}})


@pytest.mark.parametrize(
    ("fields", "image", "label"),
    [
        ([("image", BYTES), ("label", pa.int64())], "image", "label"),
        ([("IMG", BYTES), ("thumb", BYTES), ("y", pa.string())], "IMG", "y"),
        ([("id", pa.int64()), ("content", pa.large_binary())], "content", None),
        ([("image", FEATURE), ("fine_label", pa.int8())], "image", "fine_label"),
        ([("pixels", pa.list_(pa.list_(pa.uint8()))), ("target", pa.int16())], "pixels", "target"),
    ],
)
def test_image_and_label_are_found_by_name_and_type(fields, image, label):
    columns = choose_columns(pa.schema(fields), None, None, "here")
    assert (columns.image, columns.label) == (image, label)


def test_what_is_asked_for_is_taken_or_the_columns_are_listed():
    schema = pa.schema([("a", BYTES), ("b", BYTES), ("n", pa.int64()), ("text", pa.string())])
    assert choose_columns(schema, "b", "n", "here").all == ["b", "n"]
    with pytest.raises(DataError, match=r"several columns may hold images \(a, b\); add \?image=COLUMN"):
        choose_columns(schema, None, None, "here")
    with pytest.raises(DataError, match=r"no column 'x' to take the image from; its columns: a .binary., b"):
        choose_columns(schema, "x", None, "here")
    with pytest.raises(DataError, match=r"column 'text' holds no images .*; its columns: a \(binary\)"):
        choose_columns(schema, "text", None, "here")
    with pytest.raises(DataError, match=r"none of its columns holds images .*; its columns: n \(int64\), text"):
        choose_columns(pa.schema([("n", pa.int64()), ("text", pa.string())]), None, None, "here")


def test_the_class_names_of_hugging_face_are_read():
    schema = pa.schema([("image", FEATURE), ("label", pa.int64())], metadata={"huggingface": HUGGING})
    assert choose_columns(schema, None, None, "here").names == ("cat", "dog")
    damaged = schema.with_metadata({"huggingface": "{"})
    assert choose_columns(damaged, None, None, "here").names is None


def test_cells_of_every_type_give_their_image():
    file, rows = picture(1), [[[1, 2], [3, 4]], None]
    assert next(contents(pa.array([file, None], BYTES), [0])) == file
    assert isinstance(next(contents(pa.array([None], BYTES), [0])), Unreadable)
    (image, nothing) = contents(pa.array([{"bytes": file, "path": "a"}, {"bytes": None, "path": "b"}], FEATURE), [0, 1])
    assert image == file
    assert nothing == Unreadable("a path without the file's bytes", b"")
    (array, none) = contents(pa.array(rows, pa.list_(pa.list_(pa.int64()))), [0, 1])
    assert array.dtype == np.uint8
    assert array.tolist() == rows[0]
    assert none.why == "no image in this row"
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))
    assert [a.tolist() for a in contents(tensors, [1])] == [np.arange(12, 24).reshape(3, 4).tolist()]
    (ragged,) = contents(pa.array([[[1], [2, 3]]], pa.list_(pa.list_(pa.int64()))), [0])
    assert ragged.why == "rows of different length"


def labels_of(*columns, names=None):
    labels = LabelColumn(names, "here")
    for column in columns:
        labels.add(pa.array(column) if isinstance(column, list) else column)
    return labels.labels()


def test_labels_of_all_parts_are_put_together():
    assert labels_of([2, None], [0]).numbers.tolist() == [2, -1, 0]
    by_name = labels_of(["owl", "cat"], [None, "dog"])
    assert by_name.names == ("cat", "dog", "owl")
    assert by_name.numbers.tolist() == [2, 0, -1, 1]
    coded = pa.array(["b", "a", None, "b"]).dictionary_encode()
    assert labels_of(coded).numbers.tolist() == [1, 0, -1, 1]
    assert labels_of([1, 0], names=("no", "yes")).text(0) == "yes"
    sets = labels_of([[0, 1], [1]], [[2]])
    assert sets.numbers.tolist() == [[1, 1, 0], [0, 1, 0], [0, 0, 1]]


def test_labels_that_cannot_be_are_said():
    with pytest.raises(DataError, match="its labels are names and numbers; give all rows the same"):
        labels_of([1], ["cat"])
    with pytest.raises(DataError, match="labels must be class numbers from 0, or names, got -3"):
        labels_of([-3, 1])
    with pytest.raises(DataError, match="it has 2 class names and a label 2"):
        labels_of([2], names=("a", "b"))
