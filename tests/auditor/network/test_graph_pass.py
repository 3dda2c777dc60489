"""A pass by the network's graph gives the model's logits, layer and gradients, and only where it was compared."""

import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.network.aten_graph import graph_of, is_traced
from auditor.network.graph_pass import graph_pass_of


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(inplace=True)]
    layers += [nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1, groups=16), nn.GELU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
    for norm in (net[1], net[4]):
        nn.init.uniform_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2)
    return net.eval()


@pytest.fixture(scope="module")
def subject() -> Subject:
    made = Subject(network(), input_shape=(3, 9, 11), mean=0.4, std=0.3)
    graph_of(made)
    return made


@pytest.mark.parametrize("layer", ["2", "5", "7"])
def test_gives_logits_layer_and_gradient(subject, layer):
    x = torch.rand(3, 3, 9, 11, generator=torch.Generator().manual_seed(1))
    by_graph = graph_pass_of(subject, layer)
    assert by_graph is not None
    assert graph_pass_of(subject, layer) is by_graph
    ours, theirs = x.clone().requires_grad_(True), x.clone().requires_grad_(True)
    logits, z = by_graph(ours)
    expected, taken = subject.run(theirs, [layer])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(z, taken[layer], rtol=1e-4, atol=1e-5)
    (a,), (b,) = torch.autograd.grad(logits[:, 1].sum(), ours), torch.autograd.grad(expected[:, 1].sum(), theirs)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_there_is_none_before_the_graph_is_traced_or_for_a_layer_it_has_not(subject):
    fresh = Subject(network(), input_shape=(3, 9, 11))
    assert not is_traced(fresh)
    assert graph_pass_of(fresh, "2") is None
    assert graph_pass_of(subject, "nowhere") is None


def test_there_is_none_where_the_graph_gives_other_logits():
    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.turn = network(), 1.0

        def forward(self, x):
            return self.net(x) * self.turn  # a number in Python is frozen into the graph

    net = Moody().eval()
    subject = Subject(net, input_shape=(3, 9, 11))
    graph_of(subject)
    net.turn = 2.0
    assert graph_pass_of(subject, "net.5") is None
