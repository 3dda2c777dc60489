"""The part above a layer, run alone, gives what the whole network gives; contributions stay what they were."""

import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.explainers.contributions import contributions
from auditor.network.above_layer import AboveLayer, above_layer_of, prepare_above_layer
from tests.conftest import Tiny


def fresh(net: nn.Module, shape=(1, 13, 17)) -> Subject:
    return Subject(net, input_shape=shape)


@pytest.fixture
def bent() -> Subject:
    """A network whose head bends: flatten, linear, ReLU, linear."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        head = [nn.Flatten(), nn.Linear(4 * 5 * 7, 9), nn.ReLU(), nn.Linear(9, 3)]
        return fresh(
            nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d((1, 1)), *head),
            (1, 11, 15),
        )


def test_tail_gives_the_models_logits_and_gradients(bent):
    tail = prepare_above_layer(bent, "2")
    assert isinstance(tail, AboveLayer)
    assert not tail.is_affine
    z = bent.activations(torch.rand(5, 1, 11, 15, generator=torch.Generator().manual_seed(0)), ["2"])["2"]
    z = z.detach().requires_grad_(True)
    for n in (1, 5):
        a, b = tail(z[:n]), bent.forward_from("2", z[:n])
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        (ga,), (gb,) = (torch.autograd.grad(v[:, 1].sum(), z, retain_graph=True) for v in (a, b))
        torch.testing.assert_close(ga, gb, rtol=1e-5, atol=1e-6)


def test_pooling_and_a_linear_head_are_affine(tiny):
    tail = prepare_above_layer(tiny, "relu")
    assert tail is not None
    assert tail.is_affine
    assert above_layer_of(tiny, "relu") is tail
    assert above_layer_of(tiny, "conv") is None  # not prepared


@pytest.mark.parametrize("layer", ["relu", "2"])
def test_contributions_are_the_same_with_a_tail(layer, tiny, bent):
    subject = tiny if layer == "relu" else bent
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(4, *subject.input_shape, generator=generator)
    with torch.no_grad():
        logits, layer_outputs = subject.run(x, [layer])
    z, layout = layer_outputs[layer], subject.layout(layer)
    W = torch.rand(layout.channels, 3, generator=generator)
    S = torch.rand(4, 3, layout.n_positions, generator=generator)
    targets = [0, 2, 2, 1]
    plain = contributions(subject, layer, layout, z, logits, W, S, targets)
    assert prepare_above_layer(subject, layer) is not None
    quick = contributions(subject, layer, layout, z, logits, W, S, targets)
    assert float(plain.contributions.abs().max()) > 0.01
    for name in ("bias", "contributions", "residual", "logits_hat"):
        torch.testing.assert_close(getattr(quick, name), getattr(plain, name), rtol=1e-4, atol=1e-5)
    if layer == "relu":
        assert float(quick.error.max()) < 1e-5  # exact: one slope for all images


def test_a_model_that_cannot_be_traced_has_no_tail():
    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Tiny()

        def forward(self, x):
            z = self.net.relu(self.net.conv(x))
            if float(z.sum()) > -1:  # a branch on data: export cannot follow
                z = z * 1.0
            return self.net.fc(self.net.pool(z).flatten(1))

    subject = fresh(Moody())
    assert prepare_above_layer(subject, "net.relu") is None
    assert above_layer_of(subject, "net.relu") is None
