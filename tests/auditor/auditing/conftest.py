"""The linear model and twelve of its images."""

import pytest
import torch

from auditor import Subject
from auditor.auditing.images import AuditImages
from tests.auditor.auditing.linear_case import SHAPE, WEIGHTS, Linear


@pytest.fixture
def linear():
    return Subject(Linear(), input_shape=SHAPE, class_names=["yes", "no"])


@pytest.fixture
def chosen(linear):
    # bright where the weights speak for a class, so that noise in their place matters
    bright = torch.stack([WEIGHTS > 0.15, WEIGHTS < 0]).float().view(2, *SHAPE).repeat(6, 1, 1, 1)
    x = 0.8 * bright + 0.2 * torch.rand(12, *SHAPE, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits = linear.logits(x)
    return AuditImages(x, logits, logits.argmax(1), [str(i) for i in range(12)])
