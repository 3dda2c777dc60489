"""Products with a Jacobian and its largest singular value against the matrix written out."""

import itertools

import pytest
import torch
from torch import nn

from auditor.kernels.networks.jacobian_norm import forth_and_back, largest_singular_values, pull, push, unit


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
    norms = [largest_singular_values(network, x, torch.ones_like(x), n)[0] for n in (1, 2, 4, 8)]
    for few, more in itertools.pairwise(norms):
        assert bool((more >= few * (1 - 1e-12)).all())


def test_forth_and_back_are_the_matrix_and_its_transpose(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x, v = (torch.randn(2, 1, 6, 8, dtype=torch.float64, generator=generator) for _ in range(2))

    def check():
        moved, back = forth_and_back(network, x, v)
        for i in range(2):
            j = torch.autograd.functional.jacobian(network, x[i : i + 1]).reshape(7, 48)
            torch.testing.assert_close(moved[i], j @ v[i].flatten())
            torch.testing.assert_close(back[i].flatten(), j.T @ (j @ v[i].flatten()))

    def no_such_mode(*_args):
        raise NotImplementedError

    check()
    monkeypatch.setattr("auditor.kernels.networks.jacobian_norm.forward_ad.make_dual", no_such_mode)
    check()


@pytest.mark.parametrize("constant", [lambda x: torch.ones(2, 3), lambda x: x.detach() * 2, lambda x: 0 * x + 1])
@pytest.mark.parametrize("has_forward_mode", [True, False])
def test_a_constant_moves_nothing(constant, has_forward_mode, monkeypatch):
    def no_such_mode(*_args):
        raise NotImplementedError

    if not has_forward_mode:
        monkeypatch.setattr("auditor.kernels.networks.jacobian_norm.forward_ad.make_dual", no_such_mode)
    x = torch.ones(2, 3)
    assert not push(constant, x, x).any()
    assert not pull(constant, x, torch.ones_like).any()
    moved, back = forth_and_back(constant, x, x)
    assert not moved.any()
    assert not back.any()
    assert largest_singular_values(constant, x, x, 3)[0].tolist() == [0, 0]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_unit_rows_of_any_scale(scale):
    v = scale * torch.tensor([[[3.0, 0.0], [0.0, 4.0]], [[0.0, 0.0], [0.0, -2.0]], [[0.0, 0.0], [0.0, 0.0]]])
    torch.testing.assert_close(
        unit(v), torch.tensor([[[0.6, 0.0], [0.0, 0.8]], [[0.0, 0.0], [0.0, -1.0]], [[0.0, 0.0], [0.0, 0.0]]])
    )


def test_a_diagonal_needs_as_many_steps_as_it_has_values():
    d = torch.tensor([3.0, 1.0, 1.0, 2.0], dtype=torch.float64)
    x = torch.zeros(2, 4, dtype=torch.float64)
    v = torch.stack([torch.ones(4), torch.tensor([0.0, 1.0, 0.0, 1.0])]).double()
    one, _ = largest_singular_values(lambda z: z * d, x, v, 1)
    torch.testing.assert_close(one, torch.tensor([15**0.5 / 2, 2.5**0.5]).double())  # |D v| / |v|
    value, direction = largest_singular_values(lambda z: z * d, x, v, 20)
    torch.testing.assert_close(value, torch.tensor([3.0, 2.0]).double())  # the second start never sees the first axis
    torch.testing.assert_close(direction.abs(), torch.eye(4).double()[[0, 3]], rtol=0, atol=1e-7)
