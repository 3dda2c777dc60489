"""Stability: closed forms, the batch against its images, the kernel against explicit Jacobians."""

import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.errors import OptionError
from auditor.stability.decision import stabilities


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


def test_bad_options_are_refused(tiny):
    x = torch.rand(2, 1, 13, 17)
    with pytest.raises(OptionError, match="want one target per image, got 1 for 2"):
        stabilities(tiny, x, "relu", [0])
    with pytest.raises(OptionError, match="mode must be fast or full, got 'slow'"):
        stabilities(tiny, x, "relu", [0, 1], mode="slow")
    with pytest.raises(OptionError, match="samples >= 1"):
        stabilities(tiny, x, "relu", [0, 1], noise_samples=0)
    assert stabilities(tiny, x[:0], "relu", []) == []


def test_a_constant_model_moves_nothing():
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    nn.init.zeros_(net[1].weight)
    subject = Subject(net, input_shape=(1, 2, 3))
    for mode in ("fast", "full"):
        (s,) = stabilities(subject, torch.rand(1, 1, 2, 3), "1", [0], mode=mode)
        assert (s.c1, s.c2, s.score, s.bound) == (0, 0, 1, 0)
