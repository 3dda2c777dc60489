"""Full ADMM, Taylor, BCD, dlADMM and back-propagation: they learn, descend, stay feasible, and refuse bad input."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from auditor.training.backprop import BackpropConfig, backprop
from auditor.training.block_coordinate_descent import bcd
from auditor.training.dladmm import DlAdmm, DlAdmmConfig, dladmm
from auditor.errors import DataError, NumericsError, OptionError, ShapeError
from auditor.training.full_admm import FullAdmmConfig, full_admm
from auditor.training.cycle import accuracy

N, WIDTH = 120, 13


def blobs(n=N, width=WIDTH, classes=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    centres = 2 * torch.randn(classes, width, generator=g)
    return centres[y] + 0.5 * torch.randn(n, width, generator=g), y


def mlp(*widths, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    return [*(nn.Sequential(lin, nn.ReLU()) for lin in layers[:-1]), layers[-1]]


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


METHODS = {
    "full": lambda b, x, y: full_admm(b, x, y, FullAdmmConfig(beta=1.0, gamma=1.0)),
    "full-ce": lambda b, x, y: full_admm(b, x, y, FullAdmmConfig(loss="cross_entropy", start="forward")),
    "taylor": lambda b, x, y: full_admm(b, x, y, FullAdmmConfig(variant="taylor", beta=1.0, gamma=1.0)),
    "bcd": bcd,
    "dladmm": lambda b, x, y: dladmm(b, x, y, DlAdmmConfig(nu=1e-2, rho=1e-2, theta=1e-3)),
    "dladmm-exact": lambda b, x, y: dladmm(b, x, y, DlAdmmConfig(nu=1e-2, rho=1e-2, solver="exact")),
    "sgd": lambda b, x, y: backprop(b, x, y, BackpropConfig(lr=0.05, batch=30)),
    "adam": lambda b, x, y: backprop(b, x, y, BackpropConfig(optimizer="adam", lr=0.01, batch=30, decay_epochs=40)),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_three_clouds(name):
    x, y = blobs()
    blocks = mlp(WIDTH, 11, 3)
    cycles = list(itertools.islice(METHODS[name](blocks, x, y), 40))
    assert [c.epoch for c in cycles] == list(range(1, 41))
    assert accuracy(blocks, x, y) > 0.95
    assert all(len(c.residuals) == (0 if name in ("sgd", "adam") else 2) for c in cycles)


@pytest.mark.parametrize("name", METHODS)
def test_bad_input_gets_one_sentence(name):
    x, y = blobs()
    with pytest.raises(DataError, match="only class 0"):
        next(METHODS[name](mlp(WIDTH, 11, 3), x, torch.zeros(N, dtype=torch.long)))
    with pytest.raises(ShapeError, match="block 2"):
        next(METHODS[name]([nn.Linear(WIDTH, 11), nn.Linear(12, 3)], x, y))
    if name not in ("sgd", "adam"):
        odd = [nn.Sequential(nn.Linear(WIDTH, 11), nn.Tanh()), nn.Linear(11, 3)]
        with pytest.raises(ShapeError, match="block 1 must be a Linear with bias and a ReLU"):
            next(METHODS[name](odd, x, y))


@pytest.mark.parametrize("name", ["full", "bcd", "adam"])
def test_nan_keeps_the_last_good_weights(name):
    x, y = blobs()
    x[3, 2] = torch.nan
    blocks = mlp(WIDTH, 11, 3)
    with pytest.raises(NumericsError, match="not finite in epoch 1; the blocks hold the last good state"):
        next(METHODS[name](blocks, x, y))
    assert all(p.isfinite().all() for block in blocks for p in block.parameters())


def test_full_admm_has_duals_everywhere_and_taylor_on_the_last_layer_only():
    """With equal starts the first cycle agrees (duals are zero), the second does not."""
    x, y = blobs()
    losses = {}
    for variant in ("full", "taylor"):
        cycles = full_admm(mlp(WIDTH, 11, 3), x, y, FullAdmmConfig(variant=variant, start="forward"))
        losses[variant] = [c.loss for c in itertools.islice(cycles, 2)]
    assert losses["full"][0] == losses["taylor"][0]
    assert losses["full"][1] != losses["taylor"][1]


def slow_objective(run):
    """The augmented Lagrangian as the method page prints it, with plain loops over layers."""
    L, total = len(run.net), 0.0
    for layer in range(L):
        r = run.z[layer].double() - run.a[layer].double() @ run.net.W[layer].double().T - run.net.b[layer].double()
        if layer < L - 1:
            gap = run.a[layer + 1].double() - run.z[layer].double().relu()
            total += run.config.nu / 2 * float((r**2).sum() + (gap**2).sum())
        else:
            u = run.rho * run.d.double()
            total += float((u * r).sum()) + run.rho / 2 * float((r**2).sum())
    total += float(nn.functional.cross_entropy(run.z[-1].double(), run.y, reduction="sum"))
    if run.config.penalty == "l1":
        total += run.config.strength * sum(float(W.abs().double().sum()) for W in run.net.W)
    if run.config.penalty == "l2":
        total += run.config.strength * sum(float((W.double() ** 2).sum()) for W in run.net.W)
    return total


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"solver": "exact"},
        {"solver": "exact", "penalty": "l2", "strength": 1e-2},
        {"penalty": "l1", "strength": 1e-2},
        {"penalty": "l2", "strength": 1e-2},
        {"constraint": "orthonormal"},
        {"constraint": "unit_rows", "penalty": "l2", "strength": 1e-2},
        {"constraint": "nonnegative", "penalty": "l1", "strength": 1e-2, "constrain_last": True},
        {"constraint": "support"},
    ],
    ids=str,
)
def test_no_sub_update_of_dladmm_raises_the_objective(options):
    x, y = blobs()
    shapes = [(11, WIDTH), (7, 11), (3, 7)]
    masks = [(torch.arange(a * b) % 2 == 0).view(a, b) for a, b in shapes]
    config = DlAdmmConfig(nu=0.1, rho=0.1, theta=1e-2, **options)
    run = DlAdmm([b.double() for b in mlp(WIDTH, 11, 7, 3)], x.double(), y, config, masks)
    for _ in range(8):
        before = slow_objective(run)
        assert run.objective() == pytest.approx(before, rel=1e-9)
        names = []
        for name, layer in run.sweep():
            after = slow_objective(run)
            assert after <= before + 1e-9 * abs(before), (name, layer)  # float64 sums of 3,000 terms
            before = after
            names.append((name, layer))
        assert len(names) == 22
        assert run.violation() < 1e-12
        run.d.add_(run.z[-1] - run.net.affine(2, run.a[-1]))


@pytest.mark.parametrize("constraint", ["orthonormal", "unit_rows", "unit_columns", "nonnegative"])
def test_float32_weights_written_back_are_feasible_to_1e_6(constraint):
    from auditor.kernels.admm.weight_constraints import violation

    x, y = blobs()
    blocks = mlp(WIDTH, 17, 11, 3)  # 17 x 13: columns are orthonormal; 11 x 17: rows
    config = DlAdmmConfig(nu=1e-2, rho=1e-2, theta=1e-3, constraint=constraint)
    cycles = list(itertools.islice(DlAdmm(blocks, x, y, config), 20))
    assert cycles[-1].extra["violation"] < 1e-6
    for block in blocks[:-1]:
        assert violation(block[0].weight.detach(), constraint) < 1e-6
    assert accuracy(blocks, x, y) > 0.9


def test_one_layer_with_squared_loss_ends_at_least_squares():
    _, y = blobs()
    x = torch.randn(N, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    block = nn.Linear(WIDTH, 3).double()
    config = DlAdmmConfig(loss="squared", rho=1.0, theta=1.0, w_steps=3)
    for cycle in itertools.islice(dladmm([block], x, y, config), 60):
        last = cycle
    ones = np.hstack([x.numpy(), np.ones((N, 1))])
    wanted = np.linalg.lstsq(ones, np.eye(3)[y.numpy()], rcond=None)[0].T
    found = np.hstack([block.weight.detach().numpy(), block.bias.detach().numpy()[:, None]])
    np.testing.assert_allclose(found, wanted, atol=1e-3)
    assert last.residuals[0] < 1e-3


def test_bias_step_is_the_mean_residual():
    x, y = blobs()
    run = DlAdmm(mlp(WIDTH, 11, 3), x, y, DlAdmmConfig())
    r = run.z[0].numpy() - x.numpy() @ run.net.W[0].numpy().T - run.net.b[0].numpy()
    run.z[0] = run.z[0] + 0.7
    before = run.net.b[0].clone()
    run._step_b(0)
    np.testing.assert_allclose(run.net.b[0].numpy(), before.numpy() + r.mean(0) + 0.7, rtol=1e-5)


def test_options_that_exclude_each_other():
    x, y = blobs()
    with pytest.raises(OptionError, match="l1 with orthonormal has no closed prox"):
        DlAdmm(mlp(WIDTH, 11, 3), x, y, DlAdmmConfig(penalty="l1", constraint="orthonormal"))
    with pytest.raises(OptionError, match="needs a mask for layer 1"):
        DlAdmm(mlp(WIDTH, 11, 3), x, y, DlAdmmConfig(constraint="support"))
