"""The shuffled twin has the same values in another order, answers to the same digest, and everything comes back."""

import contextlib

import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.network.shuffled_twin import shuffled, stages, weighted_layers


def deep() -> Subject:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
                        nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 2))  # fmt: skip
    return Subject(net, input_shape=(1, 5, 6), class_names=["a", "b"], mean=0.1, std=0.3, name="m", version="3")


def test_layers_with_a_matrix_in_the_order_in_which_they_run():
    assert weighted_layers(deep()) == ["0", "2", "6", "8"]


@pytest.mark.parametrize(("n", "depths"), [(1, [4]), (2, [1, 4]), (3, [1, 2, 4]), (4, [1, 2, 3, 4]), (9, [1, 2, 3, 4])])
def test_stages_go_from_the_top_alone_to_all(n, depths):
    result = stages(deep(), n)
    assert [len(stage) for stage in result] == depths
    assert all(stage == ["8", "6", "2", "0"][: len(stage)] for stage in result)
    if n == 3:
        assert stages(deep()) == result


def test_values_are_moved_and_come_back():
    subject, x = deep(), torch.rand(2, 1, 5, 6)
    before = {k: v.clone() for k, v in subject.module.state_dict().items()}
    logits, digest = subject.logits(x), subject.digest
    with contextlib.suppress(KeyError), shuffled(subject, ["8", "2"], seed=1) as twin:
        inside = {k: v.clone() for k, v in twin.module.state_dict().items()}
        assert twin is not subject
        assert twin.digest == digest
        assert (twin.class_names, twin.preprocessing) == (subject.class_names, subject.preprocessing)
        assert (twin.name, twin.version) == ("m", "3")
        assert not torch.equal(twin.logits(x), logits)
        assert torch.is_grad_enabled()
        raise KeyError
    for k, v in before.items():
        assert torch.equal(inside[k].flatten().sort().values, v.flatten().sort().values)
        assert torch.equal(subject.module.state_dict()[k], v)
    assert not torch.equal(inside["8.weight"], before["8.weight"])
    assert not torch.equal(inside["2.weight"], before["2.weight"])
    assert torch.equal(inside["0.weight"], before["0.weight"])
    assert torch.equal(subject.logits(x), logits)
    with shuffled(subject, ["8", "2"], seed=1) as twin:
        assert torch.equal(twin.module[8].weight, inside["8.weight"])  # seeded
