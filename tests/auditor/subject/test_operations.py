"""Operations of a pass, against the products written out."""

import pytest
import torch

from auditor import Subject
from auditor.subject.operations import operations
from tests.conftest import Tiny


@pytest.mark.parametrize(("layer", "expected"), [(None, 2 * (5 * 9 * 13 * 17 + 5 * 3)), ("relu", 2 * 5 * 9 * 13 * 17)])
def test_two_operations_for_every_product(layer, expected):
    subject = Subject(Tiny().eval(), input_shape=(1, 13, 17))
    assert operations(subject, torch.rand(1, 1, 13, 17), layer) == expected
    assert not any(m._forward_hooks for m in subject.module.modules())
