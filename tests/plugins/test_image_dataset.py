"""Image data sets for MLflow: what they hold, what they refuse, and what MLflow keeps of them."""

import json

import numpy as np
import pytest

from auditor import open_data
from auditor.errors import DataError
from auditor.plugins import ImageDataset

RANDOM = np.random.default_rng(0)
IMAGES, LABELS = RANDOM.random((60, 1, 13, 17), dtype="float32"), RANDOM.integers(0, 3, 60)


def test_the_digest_is_over_every_pixel_and_label():
    digest = ImageDataset(IMAGES, LABELS).digest
    assert digest == ImageDataset(IMAGES.copy(), list(LABELS), name="other").digest
    changed = IMAGES.copy()
    changed[30, 0, 4, 4] += 0.01  # MLflow's own digest looks at the first and last five rows only
    other = LABELS.copy()
    other[30] += 1
    digests = {digest, ImageDataset(changed, LABELS).digest, ImageDataset(IMAGES, other).digest}
    assert len(digests | {ImageDataset(IMAGES).digest}) == 4


def test_it_is_what_mlflow_asks_of_a_data_set():
    data = ImageDataset(IMAGES, LABELS.tolist(), name="sixty", source="a camera")
    document = data.to_dict()
    assert (document["name"], document["digest"], len(document["digest"])) == ("sixty", data.sha256[:32], 32)
    assert json.loads(document["profile"]) == {"n_images": 60, "shape": [1, 13, 17], "sha256": data.sha256}
    assert "a camera" in document["source"]
    (features,) = data.schema.inputs
    assert (features.shape, features.type) == ((-1, 1, 13, 17), np.dtype("float32"))
    assert json.loads(document["schema"])["mlflow_tensorspec"]["features"] == data.schema.to_json()
    inputs = data.to_pyfunc()
    np.testing.assert_array_equal(inputs.inputs, IMAGES)
    np.testing.assert_array_equal(inputs.outputs, LABELS)
    assert data.targets.dtype == np.int64
    assert data.predictions is None


@pytest.mark.parametrize("labels", [LABELS, None])
def test_the_view_of_an_evaluator_has_labels_only_where_they_are_given(labels):
    data = ImageDataset(IMAGES, labels, name="seen")
    view = data.to_evaluation_dataset("folder")
    assert (view.has_targets, view.has_predictions, view.path) == (labels is not None, False, "folder")
    assert (view.name, view.hash) == ("seen", data.digest)
    np.testing.assert_array_equal(view.features_data, IMAGES)
    notes = []

    class Client:
        def set_tag(self, run_id, key, value):
            notes.append((run_id, key, json.loads(value)))

    view._log_dataset_tag(Client(), "run", None)
    view._log_dataset_tag(Client(), "run", "m-1")
    entry = {"name": "seen", "hash": data.digest}
    assert notes == [("run", "mlflow.datasets", [entry]), ("run", "mlflow.datasets", [{**entry, "model": "m-1"}])]


def test_arrays_are_streamed_in_order_and_without_labels_as_unknown(tiny):
    batches = list(open_data(ImageDataset(IMAGES, LABELS)).batches(tiny, 25))
    assert [len(b.images) for b in batches] == [25, 25, 10]
    np.testing.assert_allclose(np.concatenate([b.images.numpy() for b in batches]), IMAGES)
    assert [n for b in batches for n in b.labels.tolist()] == LABELS.tolist()
    (whole,) = open_data(ImageDataset(IMAGES)).batches(tiny, 60)
    assert set(whole.labels.tolist()) == {-1}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((np.zeros((3, 4)),), "want images as numbers of shape"),
        ((np.zeros((0, 1, 4, 4)),), "want images as numbers of shape"),
        ((np.full((2, 4, 4), "a"),), "want images as numbers of shape"),
        ((IMAGES, LABELS[:5]), "want 60 whole numbers"),
        ((IMAGES, LABELS + 0.5), "want 60 whole numbers"),
        ((IMAGES, [str(n) for n in LABELS]), "want 60 whole numbers"),
    ],
)
def test_what_is_no_image_or_no_label_is_refused(args, message):
    with pytest.raises(DataError, match=message):
        ImageDataset(*args)
