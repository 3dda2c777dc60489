"""A factorization as a block: its updates against scipy and slow references, one visit by hand, bad input."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, nnls
from torch import nn

from auditor.errors import LayerError, NumericsError, OptionError, ShapeError
from auditor.kernels.factorization.deepfacto import decoupled
from auditor.training.block_admm import BlockAdmm, BlockAdmmConfig
from auditor.training.block_calculus import AutogradCalculus
from auditor.training.cycle import accuracy, forward
from auditor.training.factorization import FactorCalculus, Factorization, Lift, check_nonnegative

CHANNELS, RANK = 7, 3


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def basis(channels=CHANNELS, rank=RANK, seed=0):
    M = torch.rand(channels, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return M / M.norm(dim=0)


def maps(n=4, channels=CHANNELS, height=3, width=5, seed=1):
    return torch.rand(n, channels, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("shape", "axis"), [((4, 7, 3, 5), 1), ((4, 3, 5, 7), -1), ((4, 11, 7), -1), ((4, 7), 1)])
def test_scores_are_nnls_of_every_position_in_the_shape_of_the_input(shape, axis):
    z = torch.randn(shape, dtype=torch.float64)  # some below zero: Z + V may be
    M = basis()
    S = Factorization(M, axis)(z)
    expected = list(shape)
    expected[axis] = RANK
    assert list(S.shape) == expected
    columns, scores = z.movedim(axis, -1).reshape(-1, CHANNELS), S.movedim(axis, -1).reshape(-1, RANK)
    at_bound = 0
    for x, s in zip(columns, scores, strict=True):
        exact = nnls(M.numpy(), x.numpy())[0]
        np.testing.assert_allclose(s.numpy(), exact, atol=1e-6)
        at_bound += (exact == 0).any()
    assert at_bound


def test_the_lift_starts_as_the_product():
    z = maps()
    for shaped, axis in ((z, 1), (z.permute(0, 2, 3, 1), -1), (z[:, :, 0, 0], 1)):
        block = Factorization(basis(), axis)
        S = block(shaped)
        product = block.native(block.basis @ block.positions(S), shaped)
        torch.testing.assert_close(Lift(block.basis, axis)(S).detach(), product, rtol=1e-10, atol=1e-12)


def test_an_exact_product_is_found_again():
    """A separable M0 (a block of the identity): the factorization shows the layer to rounding."""
    M0 = torch.cat([torch.eye(RANK, dtype=torch.float64), basis(4, RANK)])
    S0 = torch.rand(5, RANK, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    S0[:, :, 0] = torch.eye(RANK, dtype=torch.float64)[torch.arange(5) % RANK]  # some positions show one factor alone
    z = (M0 @ S0).float()
    block = Factorization.of(z, RANK)
    missed = z - block.basis @ block.positions(block(z))
    assert float(missed.norm() / z.norm()) < 1e-3  # HALS stops after 200 sweeps
    torch.testing.assert_close(block.basis.norm(dim=0), torch.ones(RANK))


def test_the_variable_below_has_the_closed_form():
    """beta 1, gamma 3, f - U = 2, M S - V = 6: Z = 5; and the move of `solved` leads there from anywhere."""
    assert float(decoupled((1.0, torch.tensor(2.0)), (3.0, torch.tensor(6.0)))) == 5.0
    block = Factorization(basis())
    z, V, f_less_U = maps(), 0.1 * maps(seed=3), maps(seed=4)
    at = FactorCalculus(block, reconstruction=1.0).around(z, V)
    S = at.out + 0.3
    move = at.solved(z - f_less_U, at.goal(S - at.out), 1.0, 3.0)
    product = block.native(block.basis @ block.positions(S), z)
    torch.testing.assert_close(z + move, (f_less_U + 3 * (product - V)) / 4, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("above", [0.2, 3.0])
def test_scores_below_a_linear_block_reach_the_least_squares_of_both_terms(above):
    """gamma/2 |Z - M S + V|^2 + beta/2 |W S - target|^2, S >= 0: the stacked problem, column by column, by scipy."""
    M, W, gamma = basis(), torch.randn(4, RANK, dtype=torch.float64), 1.7
    block, lin = Factorization(M), nn.Linear(RANK, 4, bias=False).double()
    with torch.no_grad():
        lin.weight.copy_(W)
    z, V = maps()[:, :, 0, 0], 0.1 * maps(seed=3)[:, :, 0, 0]
    goal = torch.randn(4, 4, dtype=torch.float64)  # what the outputs should change by
    at = FactorCalculus(block).around(z, V)
    upper = AutogradCalculus(lin).around(at.out)
    S = at.out + at.own_move(upper, torch.zeros_like(at.out), goal, gamma, above, steps=300)
    stacked = np.vstack([gamma**0.5 * M.numpy(), above**0.5 * W.numpy()])
    for i in range(len(z)):
        target = upper.out[i] + goal[i]
        exact = nnls(stacked, np.concatenate([gamma**0.5 * (z + V)[i].numpy(), above**0.5 * target.numpy()]))[0]
        np.testing.assert_allclose(S[i].numpy(), exact, atol=1e-3)  # a step may rise by 1e-6 of the value
    assert float((S - at.out).abs().max()) > 0.05  # the block above did ask for something


def test_scores_below_a_curved_block_descend_to_a_minimum_with_bounds():
    M, gamma, above = basis(), 1.0, 2.0
    block, net = Factorization(M), nn.Sequential(nn.Linear(RANK, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    z, goal = maps(1)[:, :, 0, 0], torch.tensor([[0.5, -0.4]], dtype=torch.float64)
    at = FactorCalculus(block).around(z)
    upper = AutogradCalculus(net).around(at.out)

    def objective(S):
        S = torch.as_tensor(S, dtype=torch.float64)[None]
        with torch.no_grad():
            out = net(S)
        return float(0.5 * gamma * (z - S @ M.T).square().sum() + 0.5 * above * (out - upper.out - goal).square().sum())

    values = [
        objective((at.out + at.own_move(upper, torch.zeros_like(at.out), goal, gamma, above, steps=k))[0].numpy())
        for k in (1, 3, 10, 200)
    ]
    assert objective(at.out[0].numpy()) > values[0]
    assert all(b <= a + 1e-9 for a, b in itertools.pairwise(values))
    best = minimize(objective, at.out[0].numpy(), bounds=[(0, None)] * RANK, method="L-BFGS-B", tol=1e-12)
    assert values[-1] == pytest.approx(best.fun, rel=1e-3)


def test_a_basis_step_is_hals_on_the_sums():
    block = Factorization(basis())
    calculus = FactorCalculus(block)
    z, S = maps(), torch.rand(4, RANK, 3, 5, dtype=torch.float64)
    X, R = block.positions(z).permute(1, 0, 2).flatten(1), block.positions(S).permute(1, 0, 2).flatten(1)
    expected = block.basis.clone()
    for c in range(RANK):
        rest = X @ R[c] - expected @ (R @ R[c]) + expected[:, c] * (R[c] @ R[c])
        expected[:, c] = (rest / (R[c] @ R[c])).clamp_min(0)
    expected = expected / expected.norm(dim=0).clamp_min(1)
    calculus.fit_basis(z, None, S, forget=0.9)
    torch.testing.assert_close(block.basis, expected, rtol=1e-8, atol=1e-10)
    assert float(block.basis.norm(dim=0).max()) <= 1 + 1e-12


def two_blocks(n=48, seed=0):
    """A convolution with a ReLU, a factorization, and a block of two layers above it; labels that the image shows."""
    y = torch.arange(n) % 2
    x = 0.3 * torch.randn(n, 1, 6, 7, generator=torch.Generator().manual_seed(seed))
    x[y == 1, :, :3] += 1
    x[y == 0, :, 3:] += 1
    below = nn.Sequential(nn.Conv2d(1, CHANNELS, 3, padding=1), nn.ReLU())
    with torch.no_grad():
        block = Factorization.of(below(x), RANK)
    top = nn.Sequential(Lift(block.basis), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(CHANNELS * 9, 2))
    return [below, block, top], x, y


def test_one_visit_is_the_printed_order_of_updates():
    """Z_T, S, Z, blocks, M, V: recomputed term by term for one mini-batch, in double precision."""
    blocks, x, y = two_blocks(12)
    blocks, x = [b.double() for b in blocks], x.double()
    below, block, top = blocks
    config = BlockAdmmConfig(
        batch=12, dual_step=0.5, z_steps=2, gamma=1.5, beta=2.0, optimizer="sgd", lr=1e-30, basis_steps=0
    )
    solver = BlockAdmm(blocks, x, y, config)
    solver._fill()
    rows = torch.arange(12)
    before = solver.maps[1].curvature
    V = 0.01 * torch.rand(12, CHANNELS, 6, 7, dtype=torch.float64)
    solver.variables.write("V2", rows, V)
    with torch.no_grad():
        f = below(x)
    X = block.positions(f + V)
    S0 = block(f + V)
    out = top(S0).detach()
    Z_T = solver.loss.prox(out, y, 2.0)
    at = FactorCalculus(block)
    at.curvature = before
    around = at.around(f, V)
    upper = AutogradCalculus(top).around(S0)
    move = around.own_move(upper, torch.zeros_like(S0), Z_T - out, 1.5, 2.0, 2)
    S = S0 + move
    product = block.native(block.basis @ block.positions(S), f)
    goal = product - V  # reconstruction 1: all of it
    Z = (2.0 * f + 1.5 * goal) / 3.5
    solver.visit(rows)
    torch.testing.assert_close(solver.variables.read("U1", rows), 0.5 * (Z - f), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(solver.variables.read("V2", rows), V + 0.5 * (Z - product), rtol=1e-8, atol=1e-10)
    with torch.no_grad():
        missed_top = Z_T - top(S)
    torch.testing.assert_close(solver.variables.read("U3", rows), 0.5 * missed_top, rtol=1e-6, atol=1e-8)
    assert float(move.abs().max()) > 1e-3
    assert X.shape == (12, CHANNELS, 42)


def relative_error(blocks, x):
    with torch.no_grad():
        z = blocks[0](x)
        block = blocks[1]
        return float((z - block.native(block.basis @ block.positions(block(z)), z)).norm() / z.norm())


def test_joint_training_draws_the_layer_into_the_factors_and_solves_the_task():
    blocks, x, y = two_blocks()
    was = relative_error(blocks, x)
    solver = BlockAdmm(blocks, x, y, BlockAdmmConfig(batch=16, lr=0.01, z_steps=3, loss="cross_entropy"))
    cycles = list(itertools.islice(solver, 12))
    assert accuracy(blocks, x, y) > 0.95
    assert relative_error(blocks, x) < 0.5 * was
    assert cycles[-1].loss < 0.5 * cycles[0].loss
    assert float(blocks[1].basis.min()) >= 0
    assert float(blocks[1](blocks[0](x)).min()) >= 0


def test_two_factorizations_in_one_network():
    blocks, x, y = two_blocks()
    below, block, _ = blocks
    with torch.no_grad():
        middle = nn.Sequential(Lift(block.basis), nn.ReLU(), nn.MaxPool2d(2))
        second = Factorization.of(middle(block(below(x))), 4)
    chain = [below, block, middle, second, nn.Sequential(Lift(second.basis), nn.Flatten(), nn.Linear(CHANNELS * 9, 2))]
    solver = BlockAdmm(chain, x, y, BlockAdmmConfig(batch=16, lr=0.01, z_steps=3, loss="cross_entropy"))
    cycles = list(itertools.islice(solver, 12))
    assert len(cycles[-1].residuals) == 5
    assert set(solver.variables) == {"U1", "V2", "U3", "V4", "U5"}
    assert accuracy(chain, x, y) > 0.9
    assert forward(chain[:4], x).shape == (48, 4, 3, 3)


def test_a_run_with_a_factorization_goes_on_where_it_stopped(tmp_path):
    runs = []
    for stop in (False, True):
        torch.manual_seed(3)
        blocks, x, y = two_blocks(24)
        solver = BlockAdmm(blocks, x, y, BlockAdmmConfig(batch=8, lr=0.01, loss="cross_entropy"))
        list(itertools.islice(solver, 2))
        if stop:
            solver.save(tmp_path / "run")
            torch.manual_seed(5)
            fresh, _, _ = two_blocks(24)
            solver = BlockAdmm(fresh, x, y, solver.config).resume(tmp_path / "run")
            blocks = fresh
        list(itertools.islice(solver, 1))
        runs.append(blocks[1].basis)
    torch.testing.assert_close(*runs, rtol=1e-5, atol=1e-6)


def test_a_factor_that_no_sample_shows_starts_anew():
    blocks, x, y = two_blocks()
    block, lift = blocks[1], blocks[2][0]
    with torch.no_grad():
        block.basis[:, 1] = 0
        lift.weight[:, 1] = 3.0
    solver = BlockAdmm(blocks, x, y, BlockAdmmConfig(batch=16, lr=1e-6, loss="cross_entropy", basis_steps=0))
    next(iter(solver))
    assert solver.revived == 1
    assert float(block.basis[:, 1].norm()) == pytest.approx(1.0, rel=1e-5)
    assert not lift.weight.detach()[:, 1].any()  # the block above hears nothing of it yet


def test_bad_input_is_one_sentence():
    blocks, x, y = two_blocks(8)
    below, block, top = blocks
    with pytest.raises(ShapeError, match="the last block is a factorization; give a block after it"):
        BlockAdmm([nn.Flatten(), nn.Linear(42, CHANNELS), Factorization(basis().float())], x, y)
    with pytest.raises(LayerError, match=r"gives values down to -\d.*cut after a ReLU"):
        BlockAdmm([below[0], block, top], x, y)
    with pytest.raises(LayerError, match="values that are not finite"):
        check_nonnegative(torch.tensor([[1.0, float("nan")]]))
    with pytest.raises(NumericsError, match="values that are not finite; lower the learning rate"):
        Factorization(basis())(maps() / 0.0)
    with pytest.raises(ShapeError, match="the basis has 5 channels, the block below gives 7"):
        BlockAdmm([below, Factorization(basis(5).float()), top], x, y)
    with pytest.raises(OptionError, match="not negative, got"):
        Factorization(-basis())
    with pytest.raises(OptionError, match="rank 9 needs as many channels"):
        Factorization.of(maps(), 9)
    with pytest.raises(OptionError, match="a factorization counts as one"):
        BlockAdmm(blocks, x, y, BlockAdmmConfig(lr_factors=(1.0, 1.0)))
