"""A subject with weights from blocks: the trained network while the context lasts, its own before and after."""

import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.errors import ModelError
from auditor.network.network_blocks import split
from auditor.network.trained_twin import trained_weights, with_weights


@pytest.fixture
def subject(tiny):
    return tiny


def test_the_network_answers_with_the_weights_of_its_blocks(subject):
    x = torch.rand(4, 1, 13, 17, generator=torch.Generator().manual_seed(0))
    before = subject.logits(x)
    blocks = split(subject, ["relu"])
    with torch.no_grad():
        for block in blocks:
            for parameter in block.parameters():
                parameter.mul_(1.5).add_(0.1)
        z = x
        for block in blocks:
            z = block(z)
    with with_weights(subject, trained_weights(blocks)) as other:
        torch.testing.assert_close(other.logits(x), z)
        assert other.class_names == subject.class_names
        assert other.input_shape == subject.input_shape
        assert not other.module.training
    assert not torch.allclose(before, z)
    assert torch.equal(subject.logits(x), before)


def test_its_own_weights_come_back_after_an_error(subject):
    before = {k: v.clone() for k, v in subject.module.state_dict().items()}
    with pytest.raises(RuntimeError, match="in between"), with_weights(subject, {"fc.bias": torch.ones(3)}):
        raise RuntimeError("in between")
    assert all(torch.equal(v, before[k]) for k, v in subject.module.state_dict().items())


class Shared(nn.Module):
    """One linear map, used below and above a layer."""

    def __init__(self):
        super().__init__()
        self.flat, self.linear, self.relu = nn.Flatten(), nn.Linear(4, 4), nn.ReLU()

    def forward(self, x):
        return self.linear(self.relu(self.linear(self.flat(x))))


def test_a_tensor_that_was_trained_apart_on_both_sides_is_refused():
    torch.manual_seed(0)
    subject = Subject(Shared(), input_shape=(1, 2, 2))
    blocks = split(subject, ["relu"])
    assert set(trained_weights(blocks)) == {"linear.weight", "linear.bias"}  # still equal
    with torch.no_grad():
        next(blocks[0].parameters()).add_(1)
    with pytest.raises(ModelError, match=r"parameter 'linear\.\w+' is used on both sides of a cut .* cut elsewhere\."):
        trained_weights(blocks)
