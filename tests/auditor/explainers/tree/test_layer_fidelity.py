"""Fidelity of a layer whose first unit is an attribute, by construction."""

import numpy as np
import pytest
import torch
from torch import nn

from auditor import Subject, open_data
from auditor.errors import DataError
from auditor.explainers.tree.layer_fidelity import layer_fidelity


class FirstPixel(nn.Module):
    """Units: the first pixel of each of two channels, and one that is always the same."""

    def __init__(self):
        super().__init__()
        self.pool = nn.Conv2d(2, 3, (7, 5))
        self.relu, self.fc = nn.ReLU(), nn.Linear(3, 2)
        with torch.no_grad():
            self.pool.weight.zero_()
            self.pool.bias.copy_(torch.tensor([0.0, 0.0, 1.0]))
            self.pool.weight[0, 0, 0, 0] = self.pool.weight[1, 1, 0, 0] = 1.0

    def forward(self, x):
        return self.fc(self.relu(self.pool(x)).flatten(1))


@pytest.fixture
def case(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.uniform(0.1, 0.4, (40, 2, 7, 5)).astype(np.float32)
    has = np.arange(40) % 3 == 0
    images[has, 0, 0, 0] = 0.9
    np.savez(tmp_path / "data.npz", images=images, labels=np.arange(40) % 2)
    data = open_data(tmp_path / "data.npz")
    subject = Subject(FirstPixel(), input_shape=(2, 7, 5))
    ids = next(data.batches(subject, 40)).ids
    noise = rng.random(40) < 0.4
    rows = [f"{i},{90 if h else 5},{80 if x else 0},7" for i, h, x in zip(ids, has, noise, strict=True)]
    (tmp_path / "attributes.csv").write_text("\n".join(["image,bright,noise,never", *rows]) + "\n")
    return subject, data, tmp_path / "attributes.csv"


def test_the_unit_that_is_the_attribute_is_named(case):
    result = layer_fidelity(case[0], case[1], "relu", case[2])
    assert (result.layer, result.units, result.images) == ("relu", 3, 40)
    assert result.names == ("bright", "noise")  # the third never varies
    assert result.frequency[0] == pytest.approx(14 / 40)
    assert result.by_f1.n_constant == 1
    assert result.by_f1.per_attribute[0] == result.by_accuracy.per_attribute[0] == 1
    assert result.by_f1.per_attribute[1] < 1
    assert result.unit_words(0) == "unit 0 is 15"
    assert result.says(0).tolist() == result.marks[:, 0].tolist()
    rows = result.to_json()["attributes"]
    near = rows[0].pop("distance")
    assert 0 < near < 14 / 40  # of the unit's own values, which are 0.1 to 0.4 where it is not bright
    assert rows[0] == {
        "attribute": "bright",
        "frequency": 14 / 40,
        "f1": 1.0,
        "accuracy": 1.0,
        "unit": 0,
        "code": 15,
        "is_equal": True,
    }
    above = layer_fidelity(case[0], case[1], "relu", case[2], threshold=6.0)
    assert above.names == ("bright", "noise")
    assert layer_fidelity(case[0], case[1], "relu", case[2], bits=2).unit_words(0) == "unit 0 is 3"


def test_bad_input(case, tmp_path):
    subject, data, _ = case
    (tmp_path / "other.csv").write_text("image,a\nnosuch.png,1\n")
    with pytest.raises(DataError, match="names neither the images"):
        layer_fidelity(subject, data, "relu", tmp_path / "other.csv")
    with torch.no_grad():
        subject.module.pool.weight.zero_()
    with pytest.raises(DataError, match="layer relu is constant on these 40 images"):
        layer_fidelity(subject, data, "relu", case[2])
