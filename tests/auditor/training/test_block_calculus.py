"""The formulas of affine blocks against autograd and plain differences."""

import pytest
import torch
from torch import nn

from auditor.training.block_calculus import AffineCalculus, AutogradCalculus, calculus_of


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("relu", [True, False])
def test_formula_equals_autograd(relu):
    block = nn.Sequential(nn.Flatten(), nn.Linear(15, 7), *([nn.ReLU()] if relu else []))
    z, target = torch.randn(4, 3, 5), torch.randn(4, 7)
    fast, slow = calculus_of(block), AutogradCalculus(block)
    assert isinstance(fast, AffineCalculus)
    for one, other in zip(fast.pull(z, target), slow.pull(z, target), strict=True):
        torch.testing.assert_close(one, other)
    grads = []
    for f in (fast, slow):
        out = f.learn(z, target, 0.3)
        grads.append([p.grad.clone() for p in block.parameters()] + [out, f.out(z)])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
    W = block[1].weight.detach()
    torch.testing.assert_close(fast.gram(), W.T @ W)


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("size", [0.01, 3.0])
def test_a_move_changes_what_the_difference_of_outputs_says(relu, size):
    """Large moves switch units on and off; in double precision the plain difference is right."""
    block = nn.Sequential(nn.Flatten(), nn.Linear(15, 17), *([nn.ReLU()] if relu else [])).double()
    z, move = torch.randn(6, 3, 5).double(), size * torch.randn(6, 3, 5).double()
    expected = torch.randn(6, 17).double()
    fast, slow = calculus_of(block).around(z), AutogradCalculus(block).around(z)
    torch.testing.assert_close(fast.change(move), block(z + move).detach() - block(z).detach())
    for m in (move, None):
        for one, other in zip(fast.pull(m, expected), slow.pull(m, expected), strict=True):
            torch.testing.assert_close(one, other)
    if relu and size > 1:
        assert ((block(z) > 0) != (block(z + move) > 0)).any()


def test_other_blocks_go_by_autograd():
    frozen = nn.Linear(3, 3)
    frozen.weight.requires_grad_(False)
    for block in (nn.Tanh(), nn.Sequential(nn.Linear(3, 3), nn.Tanh()), frozen, nn.Conv2d(1, 1, 3)):
        assert isinstance(calculus_of(block), AutogradCalculus)


def test_learning_takes_an_exact_error_when_it_is_given():
    """out - target in float32 is rounding; the gradient must follow the error that is passed along."""
    block = nn.Sequential(nn.Linear(5, 4), nn.ReLU())
    z = torch.randn(6, 5)
    f = calculus_of(block)
    out = f.out(z)
    error = 1e-12 * torch.randn(6, 4)
    assert torch.equal(f.learn(z, out - error, 0.5, out, error), out)
    expected = 0.5 * (error * (out > 0)).double()
    torch.testing.assert_close(block[0].weight.grad.double(), expected.T @ z.double(), rtol=1e-4, atol=1e-18)
    torch.testing.assert_close(block[0].bias.grad.double(), expected.sum(0), rtol=1e-4, atol=1e-18)


def test_learning_by_autograd_is_in_train_mode_and_leaves_eval_mode():
    block = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 4)).eval()
    f = calculus_of(block)
    z, target = torch.randn(6, 5), torch.randn(6, 4)
    f.learn(z, target, 0.5)
    assert not block.training
    assert not torch.equal(block[0].running_mean, torch.zeros(5))


def test_autograd_learning_scales_the_gradient():
    block = nn.Sequential(nn.Linear(5, 4), nn.Tanh()).eval()
    z, target = torch.randn(6, 5), torch.randn(6, 4)
    made = calculus_of(block).learn(z, target, 0.3)
    gradients = [p.grad.clone() for p in block.parameters()]
    for p in block.parameters():
        p.grad = None
    out = block(z)
    (0.5 * 0.3 * (out - target).square().sum()).backward()
    torch.testing.assert_close(made, out.detach())
    for one, p in zip(gradients, block.parameters(), strict=True):
        torch.testing.assert_close(one, p.grad)


def test_which_blocks_are_affine():
    plain, hooked, no_bias = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    hooked.register_forward_hook(lambda *_: None)
    assert isinstance(calculus_of(plain), AffineCalculus)
    assert calculus_of(no_bias).bias() is None
    with_relu = calculus_of(nn.Sequential(nn.Flatten(), plain, nn.ReLU()))
    assert (with_relu.has_relu, with_relu.flatten) == (True, True)
    assert (calculus_of(plain).has_relu, calculus_of(plain).flatten) == (False, False)
    others = [hooked, nn.Sequential(nn.Flatten(2), plain), nn.Sequential(plain, plain), nn.Sequential()]
    others.append(nn.Sequential(nn.Flatten(1, 2), plain))
    assert all(isinstance(calculus_of(block), AutogradCalculus) for block in others)
    assert AutogradCalculus(plain).gram() is None


def test_an_in_place_block_does_not_change_its_input():
    z = torch.randn(6, 5)
    before = z.clone()
    f = calculus_of(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 4)))
    f.pull(z, torch.zeros(6, 4))
    f.learn(z, torch.zeros(6, 4), 1.0)
    assert torch.equal(z, before)
    same = calculus_of(nn.Identity()).out(z)
    assert same is not z
