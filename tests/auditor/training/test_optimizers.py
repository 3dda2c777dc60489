"""Every optimizer learns, answers bad input in one sentence, and is found by its name."""

import itertools

import pytest
import torch
from torch import nn

from auditor.errors import DataError, NumericsError, OptionError, ShapeError
from auditor.training.backprop import BackpropConfig, backprop
from auditor.training.block_coordinate_descent import bcd
from auditor.training.cycle import accuracy
from auditor.training.dladmm import DlAdmmConfig, dladmm
from auditor.training.full_admm import FullAdmmConfig, full_admm
from auditor.training.optimizers import METHODS, cycles
from tests.auditor.training.three_clouds import blobs, mlp, weights

N, WIDTH = 120, 13


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


OPTIMIZERS = {
    "full": lambda b, x, y: full_admm(b, x, y, FullAdmmConfig(beta=1.0, gamma=1.0)),
    "full-ce": lambda b, x, y: full_admm(b, x, y, FullAdmmConfig(loss="cross_entropy", start="forward")),
    "taylor": lambda b, x, y: full_admm(b, x, y, FullAdmmConfig(variant="taylor", beta=1.0, gamma=1.0)),
    "bcd": bcd,
    "dladmm": lambda b, x, y: dladmm(b, x, y, DlAdmmConfig(nu=1e-2, rho=1e-2, theta=1e-3)),
    "dladmm-exact": lambda b, x, y: dladmm(b, x, y, DlAdmmConfig(nu=1e-2, rho=1e-2, solver="exact")),
    "sgd": lambda b, x, y: backprop(b, x, y, BackpropConfig(lr=0.05, batch=30)),
    "adam": lambda b, x, y: backprop(b, x, y, BackpropConfig(optimizer="adam", lr=0.01, batch=30, decay_epochs=40)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_method_learns_three_clouds(name):
    x, y = blobs(N)
    blocks = mlp(WIDTH, 11, 3)
    cycles = list(itertools.islice(OPTIMIZERS[name](blocks, x, y), 40))
    assert [c.epoch for c in cycles] == list(range(1, 41))
    assert accuracy(blocks, x, y) > 0.95
    assert all(len(c.residuals) == (0 if name in ("sgd", "adam") else 2) for c in cycles)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bad_input_gets_one_sentence(name):
    x, y = blobs(N)
    with pytest.raises(DataError, match="only class 0"):
        next(OPTIMIZERS[name](mlp(WIDTH, 11, 3), x, torch.zeros(N, dtype=torch.long)))
    with pytest.raises(ShapeError, match="block 2"):
        next(OPTIMIZERS[name]([nn.Linear(WIDTH, 11), nn.Linear(12, 3)], x, y))
    if name not in ("sgd", "adam"):
        odd = [nn.Sequential(nn.Linear(WIDTH, 11), nn.Tanh()), nn.Linear(11, 3)]
        with pytest.raises(ShapeError, match="block 1 must be a Linear with bias and a ReLU"):
            next(OPTIMIZERS[name](odd, x, y))


@pytest.mark.parametrize("name", ["full", "bcd", "adam"])
def test_nan_keeps_the_last_good_weights(name):
    x, y = blobs(N)
    x[3, 2] = torch.nan
    blocks = mlp(WIDTH, 11, 3)
    with pytest.raises(NumericsError, match="not finite in epoch 1; the blocks hold the last good state"):
        next(OPTIMIZERS[name](blocks, x, y))
    assert all(p.isfinite().all() for block in blocks for p in block.parameters())


def test_settings_are_checked_by_name():
    blocks = [torch.nn.Linear(4, 3)]
    x, y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
    with pytest.raises(OptionError, match="not known"):
        cycles("nosuch", blocks, x, y)
    with pytest.raises(OptionError, match="optimizer sgd: lr: "):
        cycles("sgd", blocks, x, y, lr=-1)
    next(cycles("block-admm", blocks, x, y, epochs=3))
    assert accuracy(blocks, x, y) >= 0


@pytest.mark.parametrize("name", METHODS)
def test_every_name_yields_cycles_and_presets_may_be_overruled(name):
    x, y = blobs(30)
    first = next(cycles(name, mlp(WIDTH, 11, 3), x, y, epochs=4, seed=1))
    assert first.epoch == 1
    with pytest.raises(OptionError, match=f"optimizer {name}: nosuch: Extra inputs"):
        cycles(name, mlp(WIDTH, 11, 3), x, y, nosuch=1)


def rates(name, epochs, n, **settings):
    """How far the weights move in each of n cycles."""
    x, y = blobs(30)
    blocks = mlp(WIDTH, 11, 3)
    moved, before = [], weights(blocks)
    for _ in itertools.islice(cycles(name, blocks, x, y, epochs=epochs, batch=30, **settings), n):
        moved.append(float((weights(blocks) - before).norm()))
        before = weights(blocks)
    return moved


@pytest.mark.parametrize("name", ["adam", "block-admm"])
def test_the_rate_falls_to_zero_over_the_epochs_the_caller_means(name):
    assert rates(name, 3, 4)[3] == 0
    assert rates(name, None, 4)[3] > 0
    assert rates(name, 3, 4, decay_epochs=9)[3] > 0  # what the caller sets goes first


def test_sgd_keeps_its_rate():
    assert rates("sgd", 3, 4)[3] > 0
