"""The part below a layer gives the layer's activation, with weights of its own that leave the model's alone."""

import contextlib

import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.errors import LayerError
from auditor.network.below_layer import BelowLayer, first_tensor


def images(n=3):
    return torch.rand(n, 1, 13, 17, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("layer", ["conv", "relu", "pool", "fc"])
def test_it_gives_the_layers_activation(tiny, layer):
    below = BelowLayer(tiny, layer)
    want = tiny.layout(layer).to_positions(tiny.activations(images(), [layer])[layer])
    torch.testing.assert_close(below(images()), want)
    assert set(below.weights) == ({"conv.weight", "conv.bias", "fc.weight", "fc.bias"} if layer == "fc" else {
        "conv.weight", "conv.bias"})  # fmt: skip
    assert not any(m._forward_hooks for m in tiny.module.modules())


def test_its_weights_are_copies_that_can_be_trained(tiny):
    before = {k: p.clone() for k, p in tiny.module.state_dict().items()}
    below = BelowLayer(tiny, "relu")
    with below.trainable() as weights:
        loss = below(images()).square().sum()
        gradients = torch.autograd.grad(loss, weights)
        assert all(bool(g.any()) for g in gradients)
        with torch.no_grad():
            for w in weights:
                w.mul_(2)
    assert not any(w.requires_grad for w in below.weights.values())
    torch.testing.assert_close(below(images()), 2 * BelowLayer(tiny, "relu")(images()))
    for k, p in tiny.module.state_dict().items():
        assert torch.equal(p, before[k])


def test_weights_stand_in_the_module_for_a_while(tiny):
    below = BelowLayer(tiny, "relu")
    below.weights = {k: 3 * v for k, v in below.weights.items()}
    before = tiny.activations(images(), ["relu"])["relu"]
    with contextlib.suppress(KeyError), below.in_place() as module:
        assert module is tiny.module
        torch.testing.assert_close(tiny.activations(images(), ["relu"])["relu"], 3 * before)
        raise KeyError
    assert torch.equal(tiny.activations(images(), ["relu"])["relu"], before)


def test_a_layer_without_weights_below_it():
    subject = Subject(nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(6, 2)), input_shape=(1, 2, 3))
    assert BelowLayer(subject, "0").weights == {}


def test_the_tensor_of_an_output():
    z = torch.zeros(2)
    assert first_tensor(z, "a") is z
    assert first_tensor((z, 1), "a") is z
    with pytest.raises(LayerError, match="layer 'a' puts out dict, not one tensor"):
        first_tensor({}, "a")
