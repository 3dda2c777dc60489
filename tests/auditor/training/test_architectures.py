"""Small networks by name: shapes, seeds, one block per part."""

import pytest
import torch
from torch import nn

from auditor.errors import OptionError
from auditor.training.architectures import architecture
from auditor.training.cycle import forward


@pytest.mark.parametrize(("spec", "blocks"), [("mlp:7", 2), ("mlp:9,5", 3), ("mlp", 3), ("cnn", 4), ("resnet20", 2)])
def test_blocks_chain_to_the_classes_and_depend_on_the_seed_alone(spec, blocks):
    arch = architecture(spec)
    shape = (arch.channels, 13, 17)
    made = arch.make(shape, 4, 3)
    assert len(made) == blocks
    x = torch.rand(2, *shape)
    for block in made:
        block.eval()
    assert forward(made, x).shape == (2, 4)
    state = torch.get_rng_state()
    again, other = arch.make(shape, 4, 3), arch.make(shape, 4, 4)
    assert torch.equal(state, torch.get_rng_state())
    first = [next(net[0].parameters()) for net in (made, again, other)]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])


def test_resnet20_has_twenty_layers_with_weights():
    layers = [m for block in architecture("resnet20").make((3, 32, 32), 10, 0) for m in block.modules()]
    weighted = [
        m for m in layers if isinstance(m, nn.Conv2d | nn.Linear) and getattr(m, "kernel_size", (3, 3)) == (3, 3)
    ]
    assert len(weighted) == 20


@pytest.mark.parametrize("spec", ["mlp:0", "mlp:3,x", "mlp:-2", "cnn:3", "vgg", ""])
def test_names_that_are_none(spec):
    with pytest.raises(OptionError):
        architecture(spec)
