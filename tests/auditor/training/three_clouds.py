"""What the optimizers are tried on: well separated clouds of points and a small multilayer perceptron."""

import itertools

import torch
from torch import nn


def blobs(n=90, width=13, classes=3, seed=0):
    """Three well separated clouds."""
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    centres = 2 * torch.randn(classes, width, generator=g)
    return centres[y] + 0.5 * torch.randn(n, width, generator=g), y


def mlp(*widths, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    return [*(nn.Sequential(lin, nn.ReLU()) for lin in layers[:-1]), layers[-1]]


def weights(blocks):
    return torch.cat([p.detach().flatten() for block in blocks for p in block.parameters()])
