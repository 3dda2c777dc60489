"""Image data set: image tensors for ``mlflow.models.evaluate``, which takes only flat tables otherwise.

MLflow's own digest looks at the first and last five rows; this one is over every pixel and label.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from mlflow.data.code_dataset_source import CodeDatasetSource
from mlflow.data.dataset import Dataset
from mlflow.data.pyfunc_dataset_mixin import PyFuncConvertibleDatasetMixin, PyFuncInputsOutputs

from auditor.errors import DataError

DIGEST_LENGTH = 32  # MLflow's database keeps 36 characters

Array = np.ndarray[Any, Any]


class ImageDataset(Dataset, PyFuncConvertibleDatasetMixin):
    """Images with labels for ``mlflow.models.evaluate(…, evaluators="auditor")``.

    ``images`` is (n, channels, height, width) or (n, height, width[, channels]): floats in [0, 1] or bytes, before mean
    and std. ``labels`` are n class numbers, or None.

    >>> data = ImageDataset(np.zeros((3, 1, 8, 8), "float32"), [0, 1, 2], name="blank")
    >>> data.name, len(data.digest), len(data)
    ('blank', 32, 3)
    """

    def __init__(self, images: Any, labels: Any = None, *, name: str = "images", source: str = "") -> None:
        self._images = np.asarray(images)
        if self._images.ndim not in (3, 4) or not len(self._images) or self._images.dtype.kind not in "buif":
            raise DataError(
                "ImageDataset: want images as numbers of shape (n, channels, height, width), "
                f"got {self._images.dtype} {self._images.shape}."
            )
        self._labels = None if labels is None else _labels(labels, len(self._images))
        super().__init__(CodeDatasetSource(tags={"source": source} if source else {}), name)

    def __len__(self) -> int:
        return len(self._images)

    @property
    def images(self) -> Array:
        """The images as given."""
        return self._images

    def as_images_and_labels(self) -> tuple[Array, Array | None, str]:
        """Return what ``auditor.open_data`` opens: images, labels and a name."""
        return self._images, self._labels, f"mlflow:{self.name}"

    @property
    def targets(self) -> Array | None:
        """The labels; MLflow asks for them by this name."""
        return self._labels

    @property
    def predictions(self) -> None:
        """Nothing: predictions are the model's."""
        return

    @property
    def sha256(self) -> str:
        """Digest over all content, the same as an audit of this data names."""
        from auditor.data.source import open_data

        return open_data(self).digest

    def _compute_digest(self) -> str:
        return self.sha256[:DIGEST_LENGTH]

    @property
    def profile(self) -> dict[str, Any]:
        """Size of the set, and its full digest."""
        return {"n_images": len(self), "shape": list(self._images.shape[1:]), "sha256": self.sha256}

    @property
    def schema(self) -> Any:
        """The images as a tensor of MLflow's types."""
        from mlflow.types import Schema, TensorSpec

        return Schema([TensorSpec(self._images.dtype, (-1, *self._images.shape[1:]))])

    def to_dict(self) -> dict[str, str]:
        """Return what MLflow keeps of it: name, digest, source, schema and profile."""
        schema = json.dumps({"mlflow_tensorspec": {"features": self.schema.to_json()}})
        return {**super().to_dict(), "schema": schema, "profile": json.dumps(self.profile)}

    def to_pyfunc(self) -> PyFuncInputsOutputs:
        """Return the images and labels as they are."""
        return PyFuncInputsOutputs(self._images, self._labels)  # type: ignore[arg-type]

    def to_evaluation_dataset(self, path: str | None = None, feature_names: Any = None) -> Any:
        """Return the view that an evaluator gets."""
        return ImageView(self, path)


class ImageView:
    """What MLflow's evaluation asks of a data set, over image tensors (MLflow's own class takes flat tables only)."""

    def __init__(self, dataset: ImageDataset, path: str | None = None) -> None:
        self.features_data = dataset.images
        self.labels_data = dataset.targets
        self.has_targets = dataset.targets is not None
        self.name, self.hash, self.path = dataset.name, dataset.digest, path
        self.feature_names = ["image"]
        self.targets_name = "label"
        self.predictions_data, self.predictions_name, self.has_predictions = None, None, False

    def _log_dataset_tag(self, client: Any, run_id: str, model_uuid: str | None) -> None:
        """Note the data set on the run, as MLflow does for its own."""
        entry = {"name": self.name, "hash": self.hash, **({"model": model_uuid} if model_uuid else {})}
        client.set_tag(run_id, "mlflow.datasets", json.dumps([entry]))


def _labels(labels: Any, n: int) -> Array:
    numbers = np.asarray(labels)
    if numbers.shape != (n,) or numbers.dtype.kind not in "iu":
        raise DataError(
            f"ImageDataset: want {n} whole numbers as labels, one per image, got {numbers.dtype} {numbers.shape}."
        )
    return numbers.astype(np.int64)
