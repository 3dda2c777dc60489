"""Tables of images: which column holds them, their labels, and what is said when none or several may be meant."""

import io

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from auditor import open_data
from auditor.data.tables import image_column, is_image_cell
from auditor.errors import DataError
from auditor.subject.preprocessing import Preprocessing

IMAGES = np.random.default_rng(2).integers(0, 256, (4, 5, 6), dtype=np.uint8)
PICTURES = [Image.fromarray(image) for image in IMAGES]
PRE = Preprocessing.of((1, 5, 6), (0.0,), (1.0,), "stretch")


def files():
    for picture in PICTURES:
        buffer = io.BytesIO()
        picture.save(buffer, "PNG")
        yield {"bytes": buffer.getvalue(), "path": None}


def labels_of(data):
    return [int(label) for batch in data.batches(PRE) for label in batch.labels]


@pytest.mark.parametrize(
    "cells",
    [PICTURES, list(IMAGES), [list(i) for i in IMAGES], list(files())],
    ids=["pictures", "arrays", "rows", "files"],
)
def test_the_only_column_of_images_is_found(cells):
    frame = pd.DataFrame({"note": list("wxyz"), "scan": cells, "label": list("baab")})
    assert image_column(frame) == "scan"
    data = open_data(frame)
    assert data.class_names == ("a", "b")
    assert labels_of(data) == [1, 0, 0, 1]
    (batch,) = data.batches(PRE)
    np.testing.assert_allclose(batch.images.numpy()[:, 0], IMAGES / 255, atol=1e-6)


def test_categories_keep_their_order_and_missing_labels_are_none():
    labels = pd.Categorical(["z", "a", None, "z"], categories=["z", "q", "a"])
    data = open_data(pd.DataFrame({"image": PICTURES, "target": labels}))
    assert data.class_names == ("z", "q", "a")
    assert labels_of(data) == [0, 2, -1, 0]
    numbers = open_data(pd.DataFrame({"image": PICTURES, "label": [1.0, np.nan, 0.0, 2.0]}))
    assert labels_of(numbers) == [1, -1, 0, 2]


def test_columns_by_name():
    frame = pd.DataFrame({"before": PICTURES, "after": PICTURES[::-1], "kind": [0, 1, 1, 0]})
    data = open_data(frame, image="after", label="kind")
    assert labels_of(data) == [0, 1, 1, 0]
    (batch,) = data.batches(PRE)
    np.testing.assert_allclose(batch.images.numpy()[:, 0], IMAGES[::-1] / 255, atol=1e-6)


def test_what_may_be_meant_is_said():
    both = pd.DataFrame({"before": PICTURES, "after": PICTURES})
    with pytest.raises(DataError, match=r"2 columns may hold images \(before, after\); name it"):
        open_data(both)
    with pytest.raises(DataError, match="no column holds images"):
        open_data(pd.DataFrame({"note": ["x", "y"]}))
    with pytest.raises(DataError, match="image_column scan: the table has no such column; there are: before, after"):
        open_data(both, image="scan")
    with pytest.raises(DataError, match="label column kind: the table has no such column"):
        open_data(both, image="after", label="kind")
    with pytest.raises(DataError, match="it has no rows"):
        open_data(both.iloc[:0])


def test_cells_that_can_be_images():
    assert is_image_cell([[1, 2], [3, 4]])
    assert is_image_cell(PICTURES[0])
    assert not is_image_cell([1, 2])
    assert not is_image_cell("a note")
