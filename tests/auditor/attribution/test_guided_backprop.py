"""Guided backprop against the chain rule by hand, Captum, and the same network exported."""

import warnings

import pytest
import torch
from torch import nn
from torch.export import Dim, unflatten

from auditor import Subject
from auditor.attribution.baselines import attribution
from auditor.attribution.guided_backprop import guided_backprop
from auditor.errors import LayerError


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(40, 6), nn.ReLU(),
        nn.Linear(6, 3),
    ).eval()  # fmt: skip


X = torch.rand(3, 2, 7, 12, generator=torch.Generator().manual_seed(1))
TARGETS = torch.tensor([0, 2, 1])


def test_a_relu_passes_what_is_positive_above_and_below():
    net = nn.Sequential(nn.Flatten(), nn.Linear(3, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False))
    net[1].weight.data = torch.tensor([[1.0, 2, -1], [1, -1, 1]])
    net[3].weight.data = torch.tensor([[3.0, -1], [1, 2]])
    subject = Subject(net, input_shape=(1, 1, 3))
    x = torch.tensor([0.5, 0.1, 0.6]).view(1, 1, 1, 3)  # hidden .1 and 1: both fire
    assert guided_backprop(subject, x, torch.tensor([0])).flatten().tolist() == pytest.approx([3, 6, -3])  # -1 is cut
    assert guided_backprop(subject, x, torch.tensor([1])).flatten().tolist() == pytest.approx([3, 0, 1])


def test_captum_agrees_and_an_exported_network_gives_the_same():
    subject = Subject(network(), input_shape=(2, 7, 12))
    ours = guided_backprop(subject, X, TARGETS)
    assert ours.std() > 0
    exported = Subject(
        unflatten(torch.export.export(network(), (X,), dynamic_shapes=({0: Dim.AUTO},))), input_shape=(2, 7, 12)
    )
    torch.testing.assert_close(guided_backprop(exported, X, TARGETS), ours)
    pytest.importorskip("captum")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Captum says that it sets hooks
        theirs = attribution("captum:GuidedBackprop")(subject, X, TARGETS)
    torch.testing.assert_close(ours, theirs)


def test_without_relu_there_is_nothing_to_guide():
    subject = Subject(nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)), input_shape=(1, 2, 3))
    with pytest.raises(LayerError, match="no ReLU"):
        guided_backprop(subject, torch.rand(1, 1, 2, 3), torch.tensor([0]))
