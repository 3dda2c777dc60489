"""Attribute fidelity of any layer of a subject: its units quantised, as the paper does with its baselines.

A layer's output is one number per unit and image (flattened where that is small, else averaged over positions), and
each unit has codes of ``bits`` bits over its own range on these images.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from auditor.data.source import Data
from auditor.errors import DataError
from auditor.explainers.layer_activations import harvest
from auditor.explainers.tree.attribute_fidelity import Distance, Fidelity, distance, fidelity
from auditor.explainers.tree.quantised_features import Backbone
from auditor.kernels.trees.quantiser import quantise, range_of
from auditor.metrics.attribute_probe import Attributes, read_attributes
from auditor.progress import Progress, silent
from auditor.subject.subject import Subject


@dataclass(frozen=True, slots=True)
class LayerFidelity:
    """Fidelity of a layer by F1, by accuracy and by distance, and per attribute the unit that stands for it."""

    layer: str
    bits: int
    units: int
    images: int
    by_f1: Fidelity
    by_accuracy: Fidelity
    by_distance: Distance  # of the units' own values, each over its range on these images
    names: tuple[str, ...]  # of the attributes that vary, in the order of the arrays
    frequency: tuple[float, ...]
    codes: NDArray[np.uint8]  # (images, units)
    marks: NDArray[np.bool_]  # (images, attributes), of those that vary
    ids: tuple[str, ...]

    def says(self, i: int) -> NDArray[np.bool_]:
        """Return for which images the unit and code that stand for the i-th attribute say yes."""
        f = self.by_f1
        said: NDArray[np.bool_] = (self.codes[:, f.best_feature[i]] == f.best_code[i]) == f.is_equal[i]
        return said

    def unit_words(self, i: int) -> str:
        """Return which unit and code stand for the i-th attribute."""
        sign = "is" if self.by_f1.is_equal[i] else "is not"
        return f"unit {self.by_f1.best_feature[i]} {sign} {self.by_f1.best_code[i]}"

    def to_json(self) -> dict[str, Any]:
        """Return plain Python for JSON."""
        rows = [
            {
                "attribute": name,
                "frequency": self.frequency[i],
                "f1": float(self.by_f1.per_attribute[i]),
                "accuracy": float(self.by_accuracy.per_attribute[i]),
                "distance": float(self.by_distance.per_attribute[i]),
                "unit": int(self.by_f1.best_feature[i]),
                "code": int(self.by_f1.best_code[i]),
                "is_equal": bool(self.by_f1.is_equal[i]),
            }
            for i, name in enumerate(self.names)
        ]

        def scores(f: Fidelity | Distance) -> dict[str, float]:
            return {k: getattr(f, k) for k in ("score", "floor", "honest", "honest_floor")}

        return {
            "layer": self.layer,
            "bits": self.bits,
            "units": self.units,
            "images": self.images,
            "f1": scores(self.by_f1),
            "accuracy": scores(self.by_accuracy),
            "distance": scores(self.by_distance),
            "attributes": rows,
            "constant": self.by_f1.n_constant,
        }


def layer_fidelity(
    subject: Subject,
    data: Data,
    layer: str,
    attributes: str | Path,
    *,
    bits: int = 4,
    threshold: float = 50.0,
    seed: int = 0,
    progress: Progress = silent,
) -> LayerFidelity:
    """Quantise a layer on all images of ``data`` and compare its units with a CSV of attributes."""
    layer = subject.layer(layer).name
    backbone = Backbone(subject, layer)
    inputs, labels, ids = [], [], []
    for batch, _, _, z in harvest(subject, data, layer, batch_size=32, progress=progress):
        inputs.append(backbone.pool(z).float().cpu())
        labels.append(batch.labels)
        ids += batch.ids
    x = torch.cat(inputs)
    marks: Attributes = read_attributes(attributes, ids, torch.cat(labels), subject.class_names, threshold)
    if not (x.amax(0) > x.amin(0)).any():
        raise DataError(f"fidelity: layer {layer} is constant on these {len(x)} images; take another layer or data.")
    low, high = x.amin(0), x.amax(0)
    values = ((x - low) / (high - low).clamp_min(1e-30)).double().numpy()
    codes = quantise(x, bits, range_of(x, per_feature=True)).to(torch.uint8).numpy()
    by_f1 = fidelity(codes, marks.values, bits, seed=seed)
    by_accuracy = fidelity(codes, marks.values, bits, by="accuracy", seed=seed)
    by_distance = distance(values, marks.values, seed=seed)
    varying = by_f1.attributes.tolist()
    frequency = tuple(float(marks.values[:, k].mean()) for k in varying)
    names = tuple(marks.names[k] for k in varying)
    is_there = marks.values[:, varying].astype(bool)
    return LayerFidelity(
        layer, bits, x.shape[1], len(x), by_f1, by_accuracy, by_distance, names, frequency, codes, is_there, tuple(ids)
    )
