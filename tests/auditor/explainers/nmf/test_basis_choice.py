"""When one shared basis is not enough: it loses classes, or its concepts are the classes."""

import torch

from auditor.explainers.nmf.basis_choice import objection, restates_classes, some_columns


def test_too_few_classes_kept_is_said_with_figures():
    text = objection(0.21, torch.rand(64, 10), torch.zeros(64))
    assert text == "one shared basis of 10 concepts keeps the model's class on 21% of 64 images (90% wanted)"
    assert objection(0.95, torch.rand(64, 10), torch.arange(64) % 3) == ""


def test_concepts_that_are_the_classes_are_said():
    pure = torch.eye(4)[[0, 1, 2, 3] * 5] + 0.02
    classes = torch.tensor([2, 0, 3, 1] * 5)
    assert restates_classes(pure, classes)
    assert "the 4 shared concepts are the 4 classes under other names" in objection(1.0, pure, classes)


def test_concepts_that_are_shared_or_of_other_number_are_not():
    classes = torch.tensor([0, 1, 2, 3] * 5)
    assert not restates_classes(torch.eye(4)[classes] + 0.5, classes)  # seen everywhere
    assert not restates_classes(torch.eye(4)[classes][:, :3], classes)  # fewer concepts than classes
    twice = torch.eye(4)[classes]
    twice[:, 1] = twice[:, 0]
    assert not restates_classes(twice, classes)  # two concepts of one class


def test_columns_are_spread_evenly():
    X = torch.arange(100.0).repeat(2, 1)
    assert some_columns(X, 4)[0].tolist() == [0.0, 33.0, 66.0, 99.0]
    assert some_columns(X, 200) is X
