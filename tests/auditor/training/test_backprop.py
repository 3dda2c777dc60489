"""Back-propagation against a loop written out by hand."""

import itertools
import math

import pytest
import torch
from torch import nn

from auditor.errors import NumericsError
from auditor.training.backprop import BackpropConfig, backprop
from tests.auditor.training.three_clouds import blobs, mlp, weights


def slow_sgd(x, y, W, b, config, epochs):
    """SGD with momentum and weight decay on 1/2 |W x + b - onehot(y)|^2, gradient by formula; yields mean losses."""
    generator = torch.Generator().manual_seed(config.seed)
    n_batches = max(1, round(len(x) / config.batch))
    velocity, visited = [torch.zeros_like(W), torch.zeros_like(b)], 0
    for _ in range(epochs):
        total = 0.0
        for rows in torch.tensor_split(torch.randperm(len(x), generator=generator), n_batches):
            error = x[rows] @ W.T + b - torch.eye(len(b), dtype=x.dtype)[y[rows]]
            total += 0.5 * float((error**2).sum())
            grads = [error.T @ x[rows] / len(rows), error.mean(0)]
            lr = config.lr
            if config.decay_epochs is not None:
                lr *= 0.5 * (1 + math.cos(math.pi * min(1, visited / (config.decay_epochs * n_batches))))
            for i, p in enumerate((W, b)):
                velocity[i] = config.momentum * velocity[i] + grads[i] + config.weight_decay * p
                p -= lr * velocity[i]
            visited += 1
        yield total / len(x)


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.6}, {"weight_decay": 0.1}, {"decay_epochs": 3}, {"batch": 7, "seed": 2}, {"batch": 1000}],
    ids=str,
)
def test_sgd_is_the_loop_written_out(options):
    x, y = blobs()
    x, block = x.double(), nn.Linear(13, 3).double()
    W, b = block.weight.detach().clone(), block.bias.detach().clone()
    config = BackpropConfig(**{"lr": 0.02, "batch": 30, **options})
    cycles = list(itertools.islice(backprop([block], x, y, config), 5))
    expected = list(slow_sgd(x, y, W, b, config, 5))
    assert [c.epoch for c in cycles] == [1, 2, 3, 4, 5]
    assert [c.loss for c in cycles] == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(block.weight.detach(), W, rtol=0, atol=1e-9)
    torch.testing.assert_close(block.bias.detach(), b, rtol=0, atol=1e-9)


def test_the_learning_rate_ends_at_zero():
    x, y = blobs()
    blocks = mlp(13, 3)
    cycles = backprop(blocks, x, y, BackpropConfig(lr=0.1, batch=30, decay_epochs=2))
    next(cycles)
    next(cycles)
    before = weights(blocks)
    next(cycles)
    assert torch.equal(weights(blocks), before)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_first_step_is_that_of_the_optimizer(optimizer):
    x, y = blobs()
    blocks, twin = mlp(13, 11, 3), mlp(13, 11, 3)
    next(backprop(blocks, x, y, BackpropConfig(optimizer=optimizer, lr=0.01, batch=90, weight_decay=0.3)))
    chained = nn.Sequential(*twin)
    make = torch.optim.AdamW if optimizer == "adam" else torch.optim.SGD
    plain = make(chained.parameters(), lr=0.01, weight_decay=0.3)
    (0.5 * (chained(x) - nn.functional.one_hot(y)).square().sum() / 90).backward()
    plain.step()
    torch.testing.assert_close(weights(blocks), weights(twin), rtol=0, atol=1e-6)


def test_blocks_train_in_train_mode_and_are_measured_in_eval_mode():
    x, y = blobs()
    norm = nn.BatchNorm1d(13).eval()
    next(backprop([norm, nn.Linear(13, 3)], x, y))
    assert not norm.training
    assert not torch.equal(norm.running_mean, torch.zeros(13))  # so it was in train mode meanwhile


def test_frozen_parameters_stay():
    x, y = blobs()
    blocks = mlp(13, 11, 3)
    blocks[0][0].weight.requires_grad_(False)
    before = blocks[0][0].weight.clone()
    next(backprop(blocks, x, y, BackpropConfig(lr=0.1)))
    assert torch.equal(blocks[0][0].weight, before)


def test_an_embedding_may_be_narrower_than_the_classes():
    x, y = blobs(classes=5)
    cycle = next(backprop(mlp(13, 2), x, y, BackpropConfig(loss="triplet")))
    assert math.isfinite(cycle.loss)


def test_a_rate_that_explodes_leaves_the_last_good_weights():
    x, y = blobs()
    blocks = mlp(13, 11, 3)
    cycles = backprop(blocks, x * 100, y, BackpropConfig(lr=1e3, batch=10))
    with pytest.raises(NumericsError, match=r"sgd: the loss was not finite"):
        list(itertools.islice(cycles, 30))
    assert weights(blocks).isfinite().all()
