"""Table images: what ``mlflow.models.evaluate`` hands to an evaluator, as an image source of an audit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from auditor.errors import AuditError, DataError
from auditor.plugins.image_dataset import Array

if TYPE_CHECKING:
    from auditor.subject.subject import Subject


def data_of(dataset: Any, subject: Subject, column: str | None = None) -> Any:
    """Return a data set's images and labels as a source: image tensors, a table with an image column, or flat rows."""
    features = dataset.features_data
    images = _from_table(features, subject, column) if hasattr(features, "columns") else _from_array(features, subject)
    labels = _class_numbers(dataset.labels_data, subject, len(images)) if dataset.has_targets else None
    from auditor.data.python_objects import Reading, arrays

    return arrays(images, labels, f"mlflow:{dataset.name or 'dataset'}", Reading(), {})


def holds_images(dataset: Any) -> bool:
    """Whether a data set can hold images at all: tensors, or a table with one column of them."""
    features = dataset.features_data
    if hasattr(features, "columns"):
        from auditor.data.tables import is_image_cell

        return any(is_image_cell(features[c].iloc[0]) for c in features.columns) if len(features) else False
    return np.ndim(features) in (2, 3, 4)


def _from_array(features: Any, subject: Subject) -> Array:
    images = np.asarray(features)
    c, h, w = subject.input_shape
    if images.ndim == 2:
        if images.shape[1] != c * h * w:
            raise DataError(
                f"data: {images.shape[1]} numbers per row, but an image of this model has {c} x {h} x {w}; "
                "flatten the images with images.reshape(len(images), -1)."
            )
        return images.reshape(-1, c, h, w)
    return images


def _from_table(frame: Any, subject: Subject, column: str | None) -> Array:
    from auditor.data.tables import image_column

    name = image_column(frame, column, "evaluator_config={'image_column': …}")
    return np.stack([_image(cell, subject, k) for k, cell in enumerate(frame[name])])


def _image(cell: Any, subject: Subject, k: int) -> Array:
    """Return one cell as float32 (channels, height, width) in [0, 1]."""
    from auditor.data.image_items import pixels_of

    try:
        return pixels_of(cell, subject.preprocessing, None, f"image {k}")
    except (AuditError, OSError, ValueError) as error:
        raise DataError(f"data: row {k}: {str(error)[:300]}") from None


def _class_numbers(labels: Any, subject: Subject, n: int) -> Array:
    """Return labels as class numbers of the model: numbers as they are, names looked up."""
    numbers = np.asarray(labels)
    if numbers.shape != (n,):
        raise DataError(f"data: want one label per image, {n}, got {numbers.shape}.")
    if numbers.dtype.kind in "OUS":
        return np.array([subject.class_index(str(label)) for label in numbers], dtype=np.int64)
    if numbers.dtype.kind == "f" and np.array_equal(numbers, np.round(numbers)):
        numbers = numbers.astype(np.int64)
    if numbers.dtype.kind not in "iu":
        raise DataError(f"data: labels must be class numbers or names, got {numbers.dtype}.")
    if numbers.min() < 0 or numbers.max() >= subject.n_classes:
        raise DataError(
            f"data: labels must be 0 to {subject.n_classes - 1} for this model, got {numbers.min()} to {numbers.max()}."
        )
    return numbers.astype(np.int64)
