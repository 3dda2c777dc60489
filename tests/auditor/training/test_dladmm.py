"""dlADMM: no sub-update raises its objective, weights stay feasible, one layer is least squares."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from auditor.errors import OptionError
from auditor.training.cycle import accuracy
from auditor.training.dladmm import DlAdmm, DlAdmmConfig, dladmm
from tests.auditor.training.three_clouds import blobs, mlp

N, WIDTH = 120, 13


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def slow_objective(run):
    """The augmented Lagrangian with plain loops over layers."""
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
    x, y = blobs(N)
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

    x, y = blobs(N)
    blocks = mlp(WIDTH, 17, 11, 3)  # 17 x 13: columns are orthonormal; 11 x 17: rows
    config = DlAdmmConfig(nu=1e-2, rho=1e-2, theta=1e-3, constraint=constraint)
    cycles = list(itertools.islice(DlAdmm(blocks, x, y, config), 20))
    assert cycles[-1].extra["violation"] < 1e-6
    for block in blocks[:-1]:
        assert violation(block[0].weight.detach(), constraint) < 1e-6
    assert accuracy(blocks, x, y) > 0.9


def test_one_layer_with_squared_loss_ends_at_least_squares():
    _, y = blobs(N)
    x = torch.randn(N, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    block = nn.Linear(WIDTH, 3).double()
    config = DlAdmmConfig(loss="squared", rho=1.0, theta=1.0, w_steps=3)
    for cycle in itertools.islice(dladmm([block], x, y, config), 60):
        last = cycle
    ones = np.hstack([x.numpy(), np.ones((N, 1))])
    expected = np.linalg.lstsq(ones, np.eye(3)[y.numpy()], rcond=None)[0].T
    weights = np.hstack([block.weight.detach().numpy(), block.bias.detach().numpy()[:, None]])
    np.testing.assert_allclose(weights, expected, atol=1e-3)
    assert last.residuals[0] < 1e-3


def test_bias_step_is_the_mean_residual():
    x, y = blobs(N)
    run = DlAdmm(mlp(WIDTH, 11, 3), x, y, DlAdmmConfig())
    r = run.z[0].numpy() - x.numpy() @ run.net.W[0].numpy().T - run.net.b[0].numpy()
    run.z[0] = run.z[0] + 0.7
    before = run.net.b[0].clone()
    run._step_b(0)
    np.testing.assert_allclose(run.net.b[0].numpy(), before.numpy() + r.mean(0) + 0.7, rtol=1e-5)


def test_options_that_exclude_each_other():
    x, y = blobs(N)
    with pytest.raises(OptionError, match="l1 with orthonormal has no closed prox"):
        DlAdmm(mlp(WIDTH, 11, 3), x, y, DlAdmmConfig(penalty="l1", constraint="orthonormal"))
    with pytest.raises(OptionError, match="needs a mask for layer 1"):
        DlAdmm(mlp(WIDTH, 11, 3), x, y, DlAdmmConfig(constraint="support"))


@pytest.mark.parametrize("penalty", ["none", "l2"])
def test_exact_steps_end_at_the_minimum_of_the_objective_in_their_variable(penalty):
    x, y = blobs(40, 7)
    config = DlAdmmConfig(nu=0.3, rho=0.2, solver="exact", penalty=penalty, strength=0.05, loss="squared")
    run = DlAdmm([b.double() for b in mlp(7, 6, 5, 3)], x.double(), y, config)
    run.d = 0.1 * torch.randn(run.d.shape, dtype=torch.float64)
    list(run.sweep())
    onehot = nn.functional.one_hot(y, 3).double()

    def objective(W, b, z, a):
        total = 0.5 * (z[2] - onehot).square().sum()
        for layer in range(3):
            r = z[layer] - a[layer] @ W[layer].T - b[layer]
            if layer < 2:
                total = total + 0.15 * (r.square().sum() + (a[layer + 1] - z[layer].relu()).square().sum())
            else:
                total = total + 0.1 * ((r + run.d).square().sum() - run.d.square().sum())
        if penalty == "l2":
            total = total + 0.05 * sum(w.square().sum() for w in W)
        return total

    assert float(objective(run.net.W, run.net.b, run.z, run.a)) == pytest.approx(run.objective(), rel=1e-9)
    for layer in (2, 1, 0):
        for values, step in ((run.net.W, run._step_w), (run.net.b, run._step_b)):
            step(layer)

            def of(value, values=values, layer=layer):
                tried = list(values)
                tried[layer] = value
                W, b = (tried, run.net.b) if values is run.net.W else (run.net.W, tried)
                return objective(W, b, run.z, run.a)

            value = values[layer].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(of(value), value)
            assert float(gradient.abs().max()) < 1e-5  # the solver lifts the Gram matrix by 1e-8 of its diagonal
    for layer in (1, 0):
        run._step_a(layer)
        value = run.a[layer + 1].clone().requires_grad_()
        tried = [*run.a[: layer + 1], value, *run.a[layer + 2 :]]
        (gradient,) = torch.autograd.grad(objective(run.net.W, run.net.b, run.z, tried), value)
        assert float(gradient.abs().max()) < 1e-6
    run._step_z(2)
    value = run.z[2].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(objective(run.net.W, run.net.b, [*run.z[:2], value], run.a), value)
    assert float(gradient.abs().max()) < 1e-12
    run._step_z(0)
    m = run.net.affine(0, run.a[0])
    grid = torch.linspace(-6, 6, 4801, dtype=torch.float64)[:, None, None]
    cost = (grid - m).square() + (run.a[1] - grid.relu()).square()
    reached = (run.z[0] - m).square() + (run.a[1] - run.z[0].relu()).square()
    assert bool((reached <= cost.amin(0) + 1e-12).all())


@pytest.mark.parametrize("theta", [1e-3, 1.0, 1e4])
def test_a_model_step_is_a_gradient_step_whose_length_doubling_chose(theta):
    x, y = blobs(40, 7)
    run = DlAdmm([b.double() for b in mlp(7, 3)], x.double(), y, DlAdmmConfig(rho=0.2, theta=theta))
    W, b = run.net.W[0].clone(), run.net.b[0]
    x = x.double()
    gradient = 0.2 * (x @ W.T + b - run.z[0]).T @ x
    run._step_w(0)
    used = run.theta_used[0]
    torch.testing.assert_close(run.net.W[0], W - gradient / used, rtol=0, atol=1e-12)
    curvature = 0.2 * float((gradient @ x.T).square().sum()) / float(gradient.square().sum())
    assert curvature <= used  # the model lies above
    assert used == theta or curvature > used / 2  # and no shorter step than that asks for
    assert np.log2(used / theta) == pytest.approx(round(np.log2(used / theta)), abs=1e-9)


def test_rho_rises_tenfold_when_the_loss_rises_three_times_and_the_multiplier_stays():
    x, y = blobs(N)
    run = DlAdmm(mlp(WIDTH, 11, 3), x, y, DlAdmmConfig(nu=1e-2, rho=1e-2, rho_max=0.05))
    losses = iter([5.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])
    real = run.loss.value
    state = {}

    def value(z, labels):
        if z.dtype == torch.float64:  # the objective
            return real(z, labels)
        return torch.tensor(next(losses) * len(labels))

    run.loss.value = value
    cycles = iter(run)
    rhos = []
    for _ in range(5):
        rhos.append(next(cycles).beta[0])
        state[len(rhos)] = run.rho * run.d.clone()
    assert rhos == [0.01] * 5
    duals = run.d.clone()
    cycle = next(cycles)  # three rises after the fall: rho changed between the fifth cycle and this one
    assert cycle.beta == (0.05, 0.05)  # tenfold, but no more than the most allowed
    assert run.rho == 0.05
    # d was scaled by 0.2, then gained the new residual
    gained = run.z[-1] - run.net.affine(1, run.a[-1])
    torch.testing.assert_close(run.d - gained, duals * 0.2, rtol=1e-3, atol=1e-5)


def test_weights_may_be_drawn_anew():
    x, y = blobs(N)
    one, other, third = (
        DlAdmm(mlp(WIDTH, 11, 3, seed=i), x, y, DlAdmmConfig(init=0.05, seed=seed)).net.W[0]
        for i, seed in enumerate((0, 0, 1))
    )
    assert torch.equal(one, other)
    assert not torch.equal(one, third)
    assert float(one.std()) == pytest.approx(0.05, rel=4 / (2 * one.numel()) ** 0.5)  # four standard errors


def test_it_starts_from_the_forward_pass_with_the_labels_on_top():
    x, y = blobs(N)
    blocks = mlp(WIDTH, 11, 3)
    run = DlAdmm(blocks, x, y, DlAdmmConfig())
    torch.testing.assert_close(run.a[1], blocks[0](x).detach())
    assert torch.equal(run.z[1].argmax(1), y)
    assert sorted(set(run.z[1].flatten().tolist())) == [-1.0, 1.0]
    assert float(run.d.abs().max()) == 0


def symmetric_halves(W):
    """The nearest matrix whose second half of columns repeats the first: a set that the package does not know."""
    half = W.shape[1] // 2
    mean = (W[:, :half] + W[:, half : 2 * half]) / 2
    return torch.cat([mean, mean, W[:, 2 * half :]], 1)


def test_any_constraint_from_outside_holds_by_its_projection():
    x, y = blobs()
    blocks = mlp(x.shape[1], 10, 8, 3)
    solver = DlAdmm(blocks, x, y, DlAdmmConfig(nu=1e-2, rho=1e-2), project=symmetric_halves)
    objectives = [cycle.objective for _, cycle in zip(range(12), solver, strict=False)]
    for block in blocks[:-1]:
        W = block[0].weight.detach()
        torch.testing.assert_close(symmetric_halves(W), W, rtol=1e-5, atol=1e-6)
    assert solver.violation() < 1e-5
    assert objectives[-1] < objectives[0]
    assert float((symmetric_halves(solver.net.W[-1]) - solver.net.W[-1]).abs().max()) > 1e-3  # the last is free


@pytest.mark.parametrize(
    ("options", "project", "said"),
    [
        ({"constraint": "orthonormal_rows"}, None, "layer 1 has 40 rows of 13 weights"),
        ({}, lambda W: W[:, 1:], r"of W's shape \(40, 13\) at layer 1, got \(40, 12\)"),
        ({}, lambda W: W + 1, "is no projection on a set"),
        ({}, lambda W: W / 0, "must give a finite matrix"),
        ({"constraint": "unit_rows"}, lambda W: W, "give one of them"),
        ({"penalty": "l1"}, lambda W: W, "l1 with a projection from outside has no closed prox"),
    ],
)
def test_constraints_that_cannot_hold_are_refused_before_the_work(options, project, said):
    x, y = blobs()
    with pytest.raises(OptionError, match=said):
        DlAdmm(mlp(x.shape[1], 40, 3), x, y, DlAdmmConfig(**options), project=project)
