"""Steps on variables: Adam's moments against torch, every rule against the minimum of its two terms."""

import pytest
import torch
from torch import nn

from auditor.training.block_admm import BlockAdmmConfig
from auditor.training.block_calculus import calculus_of
from auditor.training.variable_steps import Moments, StepRule, stepped


def test_moments_are_those_of_adam():
    target = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    z = torch.zeros(4, 3, requires_grad=True)
    adam, mine, moments = torch.optim.Adam([z], lr=0.05), torch.zeros(4, 3), Moments()
    for _ in range(7):
        adam.zero_grad()
        (0.5 * (z - target).square().sum()).backward()
        adam.step()
        mine = mine - stepped(mine - target, moments, 0.05)
        torch.testing.assert_close(mine, z.detach(), rtol=1e-5, atol=1e-6)


def test_one_fresh_step_of_adam_is_a_sign_step():
    grad = torch.tensor([[3.0, -0.01, 40.0]])
    torch.testing.assert_close(stepped(grad, Moments(), 0.1), 0.1 * grad.sign(), rtol=1e-4, atol=0)
    assert torch.equal(stepped(grad, None, 0.1), 0.1 * grad)


def problem(relu, seed=0):
    torch.manual_seed(seed)
    block = nn.Sequential(nn.Linear(5, 4), nn.ReLU()) if relu else nn.Linear(5, 4)
    around = calculus_of(block.double()).around(torch.randn(6, 5, dtype=torch.float64))
    gap, goal = torch.randn(6, 5, dtype=torch.float64), 0.3 * torch.randn(6, 4, dtype=torch.float64)

    def value(move):
        return float(0.5 * 1.3 * (gap + move).square().sum() + 0.5 * 0.7 * (around.change(move) - goal).square().sum())

    return block, around, gap, goal, value


@pytest.mark.parametrize("rule", ["newton", "gradient"])
def test_affine_blocks_reach_the_least_squares_solution(rule):
    block, around, gap, goal, value = problem(relu=False)
    steps = StepRule(BlockAdmmConfig(z_optimizer=rule, z_steps=1 if rule == "newton" else 400), around.calculus)
    move = steps.descend(around, gap, goal, 1.3, 0.7, batch=0)
    W = block.weight.detach()
    exact = (0.7 * goal @ W - 1.3 * gap) @ torch.linalg.inv(1.3 * torch.eye(5).double() + 0.7 * W.T @ W)
    torch.testing.assert_close(move, exact, rtol=1e-5, atol=1e-6)
    assert value(move) < value(torch.zeros_like(move))


@pytest.mark.parametrize("rule", ["newton", "gradient", "sgd", "adam"])
@pytest.mark.parametrize("seed", range(3))
def test_every_rule_descends_through_a_relu(rule, seed):
    _, around, gap, goal, value = problem(relu=True, seed=seed)
    config = BlockAdmmConfig(z_optimizer=rule, z_steps=20, z_lr=1.0 if rule in ("newton", "gradient") else 0.05)
    moments = Moments() if rule == "adam" else None
    move = StepRule(config, around.calculus).descend(around, gap, goal, 1.3, 0.7, batch=0, moments=moments)
    assert value(move) < 0.9 * value(torch.zeros_like(move))


def test_any_other_module_descends_by_backtracking():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
    around = calculus_of(block).around(torch.randn(6, 5))
    gap, goal = torch.zeros(6, 5), 0.5 * torch.randn(6, 4)
    rule = StepRule(BlockAdmmConfig(z_steps=1), around.calculus)
    values, move = [], torch.zeros(6, 5)
    for steps in (1, 4, 16):
        rule = StepRule(BlockAdmmConfig(z_steps=steps), around.calculus)
        move = rule.descend(around, gap, goal, 1.0, 1.0, batch=0)
        values.append(float(0.5 * move.square().sum() + 0.5 * (around.change(move) - goal).square().sum()))
    assert values[0] < 0.5 * float(goal.square().sum())
    assert values == sorted(values, reverse=True)
