"""Table images: tensors, tables and flat rows as one source of images, and what is refused in one sentence."""

import io
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from auditor.errors import AuditError, DataError
from auditor.plugins.table_images import data_of, holds_images

BYTES = np.random.default_rng(0).integers(0, 256, (5, 13, 17), dtype=np.uint8)
IMAGES = BYTES[:, None].astype("float32") / 255
LABELS = np.array([0, 2, 1, 1, 0])


def png(pixels) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def dataset(features, labels=None):
    return SimpleNamespace(features_data=features, labels_data=labels, has_targets=labels is not None, name="d")


def read(features, subject, labels=None, column=None):
    (batch,) = data_of(dataset(features, labels), subject, column).batches(subject, 8)
    return batch


def table(form: str, folder) -> list:
    if form == "paths":
        for k, pixels in enumerate(BYTES):
            (folder / f"{k}.png").write_bytes(png(pixels))
    cells = {
        "arrays": lambda: list(IMAGES),
        "lists": lambda: IMAGES.tolist(),
        "grey": lambda: list(IMAGES[:, 0]),
        "numbers to 255": lambda: list(BYTES),
        "bytes": lambda: [png(pixels) for pixels in BYTES],
        "paths": lambda: [str(folder / f"{k}.png") for k in range(5)],
    }
    return cells[form]()


@pytest.mark.parametrize("form", ["arrays", "lists", "grey", "numbers to 255", "bytes", "paths"])
def test_every_form_of_a_table_is_the_same_images(tiny, tmp_path, form):
    frame = pd.DataFrame({"n": range(5), "picture": table(form, tmp_path)})
    assert holds_images(dataset(frame))
    for column in (None, "picture"):
        batch = read(frame, tiny, LABELS, column)
        np.testing.assert_allclose(batch.images.numpy(), IMAGES, atol=1e-6)  # k / 255 in float32
        assert batch.labels.tolist() == LABELS.tolist()


def test_tensors_and_flat_rows_are_the_same_images(tiny):
    for features in (IMAGES, IMAGES.reshape(5, -1), IMAGES[:, 0]):
        assert holds_images(dataset(features))
        np.testing.assert_array_equal(read(features, tiny).images.numpy(), IMAGES)
    with pytest.raises(DataError, match="220 numbers per row, but an image of this model has 1 x 13 x 17"):
        read(IMAGES.reshape(5, -1)[:, :220], tiny)


@pytest.mark.parametrize("labels", [LABELS, LABELS.astype(float), ["a", "c", "b", "b", "a"], LABELS.astype(np.uint8)])
def test_labels_are_numbers_or_names_of_classes(tiny, labels):
    assert read(IMAGES, tiny, labels).labels.tolist() == LABELS.tolist()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (LABELS + 1, "labels must be 0 to 2 for this model, got 1 to 3"),
        (LABELS - 1, "labels must be 0 to 2 for this model, got -1 to 1"),
        (LABELS + 0.5, "labels must be class numbers or names, got float64"),
        (LABELS[:4], "want one label per image, 5, got"),
        (["a", "b", "c", "a", "d"], "'d'"),
    ],
)
def test_labels_of_another_model_are_refused(tiny, labels, message):
    with pytest.raises(AuditError, match=message):
        read(IMAGES, tiny, labels)


def test_tables_that_do_not_say_which_column_are_refused(tiny):
    two = pd.DataFrame({"a": list(IMAGES), "b": list(IMAGES)})
    with pytest.raises(DataError, match=r"2 columns may hold images \(a, b\); name it"):
        read(two, tiny)
    np.testing.assert_array_equal(read(two, tiny, column="b").images.numpy(), IMAGES)
    with pytest.raises(DataError, match="image_column c: the table has no such column; there are: a, b"):
        read(two, tiny, column="c")
    for none in (pd.DataFrame({"a": [1.0, 2.0]}), pd.DataFrame({"a": ["no/such/file.png"]}), pd.DataFrame({"a": []})):
        assert not holds_images(dataset(none))
        with pytest.raises(DataError, match="no column holds images"):
            read(none, tiny)
    assert not holds_images(dataset(np.zeros(5)))


@pytest.mark.parametrize("cell", [b"no image at all", np.zeros((4, 5, 6, 7)), np.full((13, 17), np.nan)])
def test_a_row_that_is_no_image_is_named(tiny, cell):
    frame = pd.DataFrame({"x": [IMAGES[0], cell]})
    with pytest.raises(DataError, match="row 1: "):
        read(frame, tiny, column="x")
