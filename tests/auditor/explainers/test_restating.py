"""Concepts that are the classes under other names, by every kind with one list of concepts."""

import numpy as np
import pytest
import torch

from auditor import Subject, fit, open_data
from auditor.explainers.base import Explainer
from auditor.explainers.restating import restates_classes, restating
from tests.auditor.explainers.nmf.test_basis_choice import Colours

OPTIONS = {
    "nmf": {"refits": 1, "layer": "map"},
    "coupled": {"layer": "map", "pixels": False, "pool": 1, "lambda_table": False},
    "deepfacto": {"layer": "map", "epochs": 1, "head": "linear"},
}


def test_one_concept_of_each_class_restates_them():
    pure = torch.eye(4)[[0, 1, 2, 3] * 5] + 0.02
    assert restates_classes(pure, torch.tensor([2, 0, 3, 1] * 5))
    (text,) = restating(pure, torch.tensor([2, 0, 3, 1] * 5), "take a walk")
    assert text.startswith(
        "the 4 concepts are the 4 classes under other names, which explains nothing; go deeper: take"
    )
    assert "--set rank=12" in text


def test_concepts_that_are_shared_or_of_other_number_are_not():
    classes = torch.tensor([0, 1, 2, 3] * 5)
    assert not restates_classes(torch.eye(4)[classes] + 0.5, classes)  # seen everywhere
    assert not restates_classes(torch.eye(4)[classes][:, :3], classes)  # fewer concepts than classes
    twice = torch.eye(4)[classes]
    twice[:, 1] = twice[:, 0]
    assert not restates_classes(twice, classes)  # two concepts of one class
    assert restating(torch.rand(9, 3), torch.arange(9) % 4, "") == []


@pytest.mark.parametrize("kind", OPTIONS)
def test_every_kind_says_it_and_its_artifact_too(kind, tmp_path):
    rng = np.random.default_rng(0)
    images = np.full((40, 6, 6, 4), 0.05, np.float32)
    for i in range(40):
        images[i, ..., i % 4] = 0.3 + 0.6 * rng.random((6, 6), dtype=np.float32)
    np.savez(tmp_path / "x.npz", images=images, labels=np.arange(40) % 4)
    subject = Subject(Colours().eval(), input_shape=(4, 6, 6))
    four, three = (fit(kind, subject, open_data(tmp_path / "x.npz"), rank=n, **OPTIONS[kind]) for n in (4, 3))
    assert any("the 4 concepts are the 4 classes under other names" in remark for remark in four.remarks())
    assert any("bases=class" in remark for remark in four.remarks())
    assert not any("under other names" in remark for remark in three.remarks())
    four.save(tmp_path / "four")
    assert Explainer.load(tmp_path / "four", subject).remarks() == four.remarks()
