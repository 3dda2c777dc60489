"""Losses of all ablations at once against one forward pass per neuron."""

import pytest
import torch
import torch.nn.functional as F

from auditor.kernels.networks.ablation import losses_below_logits, losses_below_relu


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def moves(n_images, n_neurons, dtype, size=1.0):
    """What ablation moves each activation by; a third of the neurons are silent."""
    d = -size * drawn(n_images, n_neurons, seed=1, dtype=dtype).abs()
    d[drawn(n_images, n_neurons, seed=2) < -0.4] = 0
    return d


SHAPES = [(1, 1, 1), (13, 17, 3), (7, 5, 2), (300, 4, 3)]


@pytest.mark.parametrize(("n_images", "n_neurons", "n_classes"), SHAPES)
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_below_the_logits(n_images, n_neurons, n_classes, dtype, tol):
    w, logits = drawn(n_classes, n_neurons, dtype=dtype), 5 * drawn(n_images, n_classes, seed=3, dtype=dtype)
    d, labels = moves(n_images, n_neurons, dtype), torch.arange(n_images) % n_classes
    got = losses_below_logits(d, w, logits, labels)
    for i in range(n_neurons):
        changed = (logits + d[:, i : i + 1] * w[:, i]).double()
        assert float(got[i]) == pytest.approx(
            float(F.cross_entropy(changed, labels, reduction="sum")), rel=tol, abs=tol
        )
    assert got.dtype == torch.float64


@pytest.mark.parametrize(("n_images", "n_neurons", "n_units"), SHAPES)
@pytest.mark.parametrize("size", [0.05, 3.0])
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-9), (torch.float32, 1e-3)])
def test_below_another_relu_layer(n_images, n_neurons, n_units, size, dtype, tol):
    w, v, c = (
        drawn(n_units, n_neurons, dtype=dtype),
        drawn(4, n_units, seed=5, dtype=dtype),
        drawn(4, seed=6, dtype=dtype),
    )
    z = drawn(n_images, n_units, seed=4, dtype=dtype)
    z[0, 0] = 0  # a unit on its kink
    d, labels = moves(n_images, n_neurons, dtype, size), torch.arange(n_images) % 4
    got = losses_below_relu(d, w, z, v, z.relu() @ v.T + c, labels)
    flips = 0
    for i in range(n_neurons):
        moved = z + d[:, i : i + 1] * w[:, i]
        flips += int(((moved > 0) != (z > 0)).sum())
        changed = (moved.relu() @ v.T + c).double()
        assert float(got[i]) == pytest.approx(
            float(F.cross_entropy(changed, labels, reduction="sum")), rel=tol, abs=tol
        )
    assert size < 1 or n_images == 1 or flips > n_images  # or this would test the linear part alone


def test_large_logits_do_not_overflow():
    w, d = torch.ones(2, 1).double(), torch.tensor([[-1.0]]).double()
    loss = losses_below_logits(d, w, torch.tensor([[900.0, -900.0]]).double(), torch.tensor([1]))
    assert float(loss) == pytest.approx(1800)


def test_a_unit_without_weights_never_flips():
    w, v = torch.zeros(2, 3).double(), drawn(4, 2)
    z, d = torch.tensor([[0.0, 1e-12]]).double(), -torch.ones(1, 3).double()
    logits = z.relu() @ v.T
    want = float(F.cross_entropy(logits, torch.tensor([2])))
    assert losses_below_relu(d, w, z, v, logits, torch.tensor([2])).tolist() == pytest.approx([want] * 3)
