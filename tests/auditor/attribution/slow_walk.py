"""Excitation backprop by explicit matrices and loops: plainly right, hopelessly slow."""

import torch
from torch import nn

from auditor.attribution.excitation_walk import Walk
from auditor.network.aten_graph import AtenGraph


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def dense_matrix(linear, shape):
    """Push every basis vector through a linear map without its bias."""
    n = int(torch.tensor(shape).prod())
    at_zero = linear(torch.zeros(1, *shape, dtype=torch.float64))
    return torch.stack([(linear(e.view(1, *shape)) - at_zero).flatten() for e in torch.eye(n, dtype=torch.float64)], 1)


def reference_rule(W, a, p, sign=1):
    """p_in[j] = sum_i  w_ij^+ a_j / sum_k w_ik^+ a_k  p[i], one parent after the other."""
    W = (sign * W).clamp(min=0)
    p_in = torch.zeros_like(a)
    for i in range(len(W)):
        share = W[i] * a
        if share.sum() > 0:
            p_in += share / share.sum() * p[i]
    return p_in


def walk_of(net, x, floor=0.0):
    graph = AtenGraph.trace(net, x if len(x) > 1 else torch.cat([x, x]))
    return Walk(graph, graph.run(x), frozenset(), torch.tensor(floor, dtype=x.dtype), {})


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x
        return self.relu(y)


def small_resnet():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(True), nn.MaxPool2d(2), Block(), Block(),
                        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))  # fmt: skip
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.normal_(m.weight)
            nn.init.normal_(m.bias)
            nn.init.normal_(m.running_mean, std=0.1)
            nn.init.uniform_(m.running_var, 0.5, 2)
    return net.eval()


def family(name):
    from torchvision import models

    torch.manual_seed(0)
    net = getattr(models, name)(weights=None).eval()
    for m in net.modules():
        if isinstance(m, nn.Linear) and not m.weight.any():
            nn.init.normal_(m.weight)  # torchvision starts some heads at zero
    return net
