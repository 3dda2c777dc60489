"""When one shared basis is not enough: it loses classes, or its concepts are the classes."""

import numpy as np
import torch
from torch import nn

from auditor import Subject, fit, open_data
from auditor.explainers.nmf.basis_choice import objection, some_columns


def test_too_few_classes_kept_is_said_with_figures():
    text = objection(0.21, torch.rand(64, 10), torch.zeros(64))
    assert text == "one shared basis of 10 concepts keeps the model's class on 21% of 64 images (90% wanted)"
    assert objection(0.95, torch.rand(64, 10), torch.arange(64) % 3) == ""


def test_concepts_that_are_the_classes_are_said():
    pure = torch.eye(4)[[0, 1, 2, 3] * 5] + 0.02
    classes = torch.tensor([2, 0, 3, 1] * 5)
    assert "the 4 shared concepts are the 4 classes under other names" in objection(1.0, pure, classes)


class Colours(nn.Module):
    """Four classes, each a channel of its own: four concepts can only be the classes."""

    def __init__(self):
        super().__init__()
        self.map, self.pool, self.head = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Linear(4, 4)
        self.head.weight.data, self.head.bias.data = torch.eye(4) * 9, torch.zeros(4)

    def forward(self, x):
        return self.head(self.pool(self.map(x - 0.1)).flatten(1))


def test_a_rank_that_was_asked_for_and_restates_the_classes_is_said(tmp_path):
    rng = np.random.default_rng(0)
    images = np.full((40, 6, 6, 4), 0.05, np.float32)
    for i in range(40):
        images[i, ..., i % 4] = 0.3 + 0.6 * rng.random((6, 6), dtype=np.float32)
    np.savez(tmp_path / "x.npz", images=images)
    subject = Subject(Colours().eval(), input_shape=(4, 6, 6))
    fitted = fit("nmf", subject, open_data(tmp_path / "x.npz"), rank=4, refits=1, layer="map")
    assert fitted.metrics["f_cls"] == 1
    assert any("the 4 concepts are the 4 classes under other names" in remark for remark in fitted.remarks())
    assert any("--set bases=class" in remark for remark in fitted.remarks())
    three = fit("nmf", subject, open_data(tmp_path / "x.npz"), rank=3, refits=1, layer="map")
    assert not any("under other names" in remark for remark in three.remarks())


def test_columns_are_spread_evenly():
    X = torch.arange(100.0).repeat(2, 1)
    assert some_columns(X, 4)[0].tolist() == [0.0, 33.0, 66.0, 99.0]
    assert some_columns(X, 200) is X
