"""The second device behaves as a GPU does: no meeting with the CPU, no numpy, gradients all the same."""

import pytest
import torch
from torch import nn

from tests.other_device import ELSEWHERE, Elsewhere, other_device


@pytest.fixture(autouse=True)
def _device():
    with other_device():
        yield


def test_tensors_of_two_devices_never_meet():
    there, here = torch.rand(3, 4).to(ELSEWHERE), torch.rand(3, 4)
    for operation in (torch.add, torch.matmul, lambda a, b: torch.cat([a, b]), lambda a, b: a.index_copy(0, b, a)):
        with pytest.raises(RuntimeError, match="same device"):
            operation(there, here)
    with pytest.raises(TypeError, match=r"Tensor.cpu\(\) first"):
        there.numpy()
    with pytest.raises(RuntimeError, match="same device"):
        here[(there > 0.5)]
    torch.testing.assert_close((there.cpu() + here) - here, there.cpu())
    assert float((there * 2 + 1).sum()) == pytest.approx(float(there.sum()) * 2 + 12)  # single numbers may


def test_what_is_made_like_a_tensor_is_where_it_is():
    there = torch.rand(3, 4).to(ELSEWHERE)
    made = [there.new_zeros(2), torch.zeros_like(there), torch.arange(3, device=there.device), there[[0, 2]]]
    made += [torch.tensor([1.0], device=there.device), there[torch.tensor([1])], there[there > 0.5], there.T]
    assert all(isinstance(tensor, Elsewhere) for tensor in made)
    there[[0, 1]] = 5.0
    assert there[:2].tolist() == [[5.0] * 4] * 2


def test_a_module_moves_and_gives_the_gradients_it_gives_here():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(30, 2)), torch.rand(2, 1, 7, 5)
    expected = torch.autograd.functional.jacobian(lambda x: net(x).sum(), x)
    there = x.to(ELSEWHERE).requires_grad_()
    (gradient,) = torch.autograd.grad(net.to(ELSEWHERE)(there).sum(), there)
    assert isinstance(gradient, Elsewhere)
    torch.testing.assert_close(gradient.cpu(), expected)
