"""Stability: closed forms, the batch against its images, the kernel against explicit Jacobians."""

import itertools

import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.errors import OptionError
from auditor.kernels.networks.jacobian_norm import largest_singular_values, pull, push
from auditor.stability.model import measured
from auditor.stability.decision import stabilities, stability


def diagonal() -> Subject:
    """diag(3, 1, 1, …) in front of a head."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 6, bias=False), nn.Linear(6, 2)).double()
    with torch.no_grad():
        net[1].weight.copy_(torch.diag(torch.tensor([3.0, 1, 1, 1, 1, 1])))
        net[2].weight.copy_(torch.linspace(-1, 1, 12).view(2, 6))
        net[2].bias.copy_(torch.tensor([100.0, 0.0]))  # one class throughout
    return Subject(net, input_shape=(1, 2, 3))


def test_diagonal_network_known_answer():
    subject = diagonal()
    x = torch.rand(3, 1, 2, 3, generator=torch.Generator().manual_seed(0))
    for s in stabilities(subject, x, "1", [0, 1, 1], mode="full"):
        assert s.c1 == pytest.approx(3, abs=1e-9)
        assert s.bound == pytest.approx(3, abs=1e-6)
        assert s.c2 == pytest.approx(0, abs=1e-9)
        assert s.score == pytest.approx(1)
    for s in stabilities(subject, x, "1", [0, 1, 1]):
        assert 1 <= s.c1 <= 3
    found = measured(subject, "2", x)
    assert float(found.c1_sampled.max()) == pytest.approx(3, abs=1e-9)
    assert float(found.c1_local.max()) == pytest.approx(3, abs=1e-9)


@pytest.mark.parametrize("mode", ["fast", "full"])
def test_a_batch_equals_its_images_one_by_one(trained, images, mode, monkeypatch):
    subject, layer = trained[0], trained[0].default_layer()
    targets = [1, 2, 3, 4, 5, 6, 7]
    whole = stabilities(subject, images, layer, targets, mode=mode)
    one = [stabilities(subject, images[i : i + 1], layer, [t], mode=mode)[0] for i, t in enumerate(targets)]
    monkeypatch.setattr("auditor.stability.decision.MOST_NUMBERS", 2000)
    chunked = stabilities(subject, images, layer, targets, mode=mode)
    assert len({s.c1 for s in whole}) == 7
    for a, b, c in zip(whole, one, chunked, strict=True):
        for other in (b, c):
            assert other.c1 == pytest.approx(a.c1, rel=1e-4)
            assert other.c2 == pytest.approx(a.c2, rel=1e-3)
            assert other.score == pytest.approx(a.score, abs=1e-4)
        assert a.c1 <= a.bound


def test_full_finds_at_least_what_fast_does(trained, images):
    subject, layer = trained[0], trained[0].default_layer()
    fast = stabilities(subject, images, layer, [0] * 7)
    full = stabilities(subject, images, layer, [0] * 7, mode="full")
    for a, b in zip(fast, full, strict=True):
        assert b.c1 > 1.5 * a.c1  # noise hardly ever points the worst way
        assert b.c2 >= a.c2 * (1 - 1e-6)
    single = stability(subject, images[0], layer, 0)
    assert single.c1 == pytest.approx(fast[0].c1, rel=1e-5)


def test_bad_options_are_refused(tiny):
    x = torch.rand(2, 1, 13, 17)
    with pytest.raises(OptionError, match="want one target per image, got 1 for 2"):
        stabilities(tiny, x, "relu", [0])
    with pytest.raises(OptionError, match="mode must be fast or full, got 'slow'"):
        stabilities(tiny, x, "relu", [0, 1], mode="slow")
    with pytest.raises(OptionError, match="samples >= 1"):
        stabilities(tiny, x, "relu", [0, 1], samples=0)
    assert stabilities(tiny, x[:0], "relu", []) == []


def test_a_constant_model_moves_nothing():
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    nn.init.zeros_(net[1].weight)
    subject = Subject(net, input_shape=(1, 2, 3))
    for mode in ("fast", "full"):
        (s,) = stabilities(subject, torch.rand(1, 1, 2, 3), "1", [0], mode=mode)
        assert (s.c1, s.c2, s.score, s.bound) == (0, 0, 1, 0)


def network(x):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 7)).double()(x)


def test_products_with_the_jacobian_and_its_norm():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 1, 6, 8, dtype=torch.float64, generator=generator)
    v = torch.randn(3, 1, 6, 8, dtype=torch.float64, generator=generator)
    u = torch.randn(3, 7, dtype=torch.float64, generator=generator)
    jacobians = [torch.autograd.functional.jacobian(network, x[i : i + 1]).reshape(7, 48) for i in range(3)]
    forth, back = push(network, x, v), pull(network, x, lambda _: u)
    value, direction = largest_singular_values(network, x, v, 20)
    for i, j in enumerate(jacobians):
        torch.testing.assert_close(forth[i], j @ v[i].flatten())
        torch.testing.assert_close(back[i].flatten(), j.T @ u[i])
        truth = float(torch.linalg.matrix_norm(j, 2))
        assert float(value[i]) == pytest.approx(truth, rel=1e-9)  # rank 7: all directions are tried
        assert float((j @ direction[i].flatten()).norm()) == pytest.approx(truth, rel=1e-9)
        assert float(direction[i].norm()) == pytest.approx(1)


def test_without_forward_mode_two_backward_passes_do(monkeypatch):
    x = torch.rand(2, 1, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    forward = largest_singular_values(network, x, torch.ones_like(x), 5)

    def no_such_mode(*_args):
        raise NotImplementedError

    monkeypatch.setattr("auditor.kernels.networks.jacobian_norm.forward_ad.make_dual", no_such_mode)
    backward = largest_singular_values(network, x, torch.ones_like(x), 5)
    torch.testing.assert_close(forward, backward)


def test_more_steps_never_find_less():
    x = torch.rand(2, 1, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = [largest_singular_values(network, x, torch.ones_like(x), n)[0] for n in (1, 2, 4, 8)]
    for few, more in itertools.pairwise(found):
        assert bool((more >= few * (1 - 1e-12)).all())
