"""Weight layers: every linear map once, as rows, however it is written."""

import torch
import torch.nn.functional as F
from torch import nn

from auditor.network.aten_graph import AtenGraph
from auditor.network.weight_layers import weight_layers


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.up = nn.ConvTranspose2d(4, 6, 2, groups=2)
        self.shared = nn.Linear(6, 6)
        self.free = nn.Parameter(torch.randn(6, 5))

    def forward(self, x):
        z = F.relu(self.up(self.conv(x))).mean((2, 3))
        return torch.addmm(torch.ones(5), self.shared(self.shared(z)), self.free * 2.0)


def traced():
    torch.manual_seed(0)
    net = Several()
    return net, AtenGraph.trace(net, torch.rand(2, 2, 5, 6))


def test_rows_are_neurons_and_weights_used_twice_are_one_layer():
    net, graph = traced()
    layers = {layer.name: layer for layer in weight_layers(graph)}
    assert [(x.kind, tuple(x.rows.shape), len(x.nodes)) for x in layers.values()] == [
        ("conv", (4, 18), 1), ("conv_transpose", (6, 8), 1), ("linear", (6, 6), 2), ("linear", (5, 6), 1)]  # fmt: skip
    assert torch.equal(layers["conv"].rows, net.conv.weight.detach().flatten(1))
    assert torch.equal(layers["conv"].bias, net.conv.bias.detach())
    assert (layers["conv"].channel_dim, layers["shared"].channel_dim) == (1, -1)
    up = net.up.weight.detach()
    for neuron in range(6):  # the rows of neuron o of group g are the weights of the inputs of its group
        group, o = divmod(neuron, 3)
        assert torch.equal(layers["up"].rows[neuron], up[2 * group : 2 * group + 2, o].flatten())
    last = list(layers.values())[-1]
    assert torch.equal(last.rows, (net.free.detach() * 2).T)
    assert torch.equal(last.bias, torch.ones(5))


def test_two_projections_under_one_name_are_distinguished():
    net = nn.MultiheadAttention(6, 1, batch_first=True)

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net

        def forward(self, x):
            return self.inner(x, x, x, need_weights=False)[0].mean(1)

    names = [x.name for x in weight_layers(AtenGraph.trace(Attend().eval(), torch.rand(2, 4, 6)))]
    assert names == ["inner", "inner:2"] or names == ["inner", "inner.out_proj"]
