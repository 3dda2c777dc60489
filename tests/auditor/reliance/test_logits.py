"""Logits with channels last are the logits; a network that cannot take them so is asked the other way."""

import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.reliance.logits import logits_of


class Rows(nn.Module):
    """Views its maps as rows, which needs channels first; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.formats = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4 * 12 * 12, 3), []

    def forward(self, x):
        self.formats.append(x.is_contiguous())
        return self.fc(self.conv(x).view(len(x), -1))


class Pooled(Rows):
    def forward(self, x):
        self.formats.append(x.is_contiguous())
        return self.fc(self.conv(x).flatten(1))


@pytest.mark.parametrize(("network", "formats"), [(Pooled, [False, False]), (Rows, [False, True, True])])
def test_logits_are_those_of_the_subject_in_the_order_the_network_takes(network, formats):
    torch.manual_seed(0)
    module = network()
    subject = Subject(module, input_shape=(3, 12, 12))
    x = torch.rand(5, 3, 12, 12)
    expected = subject.logits(x)
    module.formats.clear()
    for _ in range(2):
        torch.testing.assert_close(logits_of(subject, x), expected)
    assert module.formats == formats


def test_an_error_of_the_network_itself_is_raised():
    subject = Subject(Pooled(), input_shape=(3, 12, 12))
    subject.module.fc = nn.Linear(5, 3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        logits_of(subject, torch.rand(5, 3, 12, 12))


def test_gradients_reach_the_pixels():
    torch.manual_seed(0)
    subject = Subject(Pooled(), input_shape=(3, 12, 12))
    x = torch.rand(5, 3, 12, 12, requires_grad=True)
    gradients = [
        torch.autograd.grad(f(x).square().sum(), x)[0] for f in (subject.logits, lambda x: logits_of(subject, x))
    ]
    torch.testing.assert_close(*gradients)
