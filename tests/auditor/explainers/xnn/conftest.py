"""A small classifier of digits with explanation heads of one class, fitted once for this folder."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from auditor import Subject, fit
from auditor.data.source import open_data


@pytest.fixture(scope="package")
def digits():
    return open_data("sklearn:digits")


@pytest.fixture(scope="package")
def subject(digits):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 24), nn.ReLU(), nn.Linear(24, 10),
    )  # fmt: skip
    it = Subject(net, input_shape=(1, 8, 8))
    batches = list(digits.batches(it, 128))
    adam = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(8):
        for b in batches:
            adam.zero_grad()
            nn.functional.cross_entropy(net(b.images), b.labels).backward()
            adam.step()
    return Subject(net, input_shape=(1, 8, 8))


@pytest.fixture(scope="package")
def images(subject, digits):
    return next(iter(digits.batches(subject, 12))).images


@pytest.fixture(scope="package")
def fitted(subject, digits):
    return fit("xnn", subject, digits, target=3, max_epochs=40)
