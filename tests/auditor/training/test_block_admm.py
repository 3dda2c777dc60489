"""Block-ADMM: known fixed points, the calculus against autograd, resume, mapped variables, threads, bad input."""

import itertools
import math
import multiprocessing
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from auditor.training.block_admm import BlockAdmm, block_admm
from auditor.training.block_calculus import AffineCalculus, AutogradCalculus, calculus_of
from auditor.block_config import BlockAdmmConfig
from auditor.errors import ArtifactError, AuditError, DataError, NumericsError, OptionError, ShapeError
from auditor.training.cycle import accuracy, forward

N, WIDTH = 90, 13


def blobs(n=N, width=WIDTH, classes=3, seed=0):
    """Three well separated clouds."""
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


def weights(blocks):
    return torch.cat([p.detach().flatten() for block in blocks for p in block.parameters()])


def run(blocks, x, y, epochs, **options):
    solver = BlockAdmm(blocks, x, y, BlockAdmmConfig(**{"batch": 30, "lr": 0.01, **options}))
    return solver, [cycle for _, cycle in zip(range(epochs), solver, strict=False)]


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
    wanted = torch.randn(6, 17).double()
    fast, slow = calculus_of(block).around(z), AutogradCalculus(block).around(z)
    torch.testing.assert_close(fast.change(move), block(z + move).detach() - block(z).detach())
    for m in (move, None):
        for one, other in zip(fast.pull(m, wanted), slow.pull(m, wanted), strict=True):
            torch.testing.assert_close(one, other)
    if relu and size > 1:
        assert ((block(z) > 0) != (block(z + move) > 0)).any()


def test_the_first_of_twenty_blocks_sees_more_than_rounding():
    """Its error is far below the spacing of float32 at the size of Z; the gradient must be that of float64."""
    x, y = blobs(classes=10)
    grads = {}
    for dtype in (torch.float32, torch.float64):
        blocks = mlp(WIDTH, *[32] * 19, 10)
        for i, block in enumerate(blocks):
            lin = block[0] if isinstance(block, nn.Sequential) else block
            nn.init.orthogonal_(lin.weight, 2**0.5, generator=torch.Generator().manual_seed(i))
            block.to(dtype)
        config = BlockAdmmConfig(beta=10, beta_ratio=3, dual_step=0, batch=N, optimizer="sgd", lr=1e-30)
        solver = BlockAdmm(blocks, x.to(dtype), y, config)
        solver.visit(torch.arange(N))
        grads[dtype] = blocks[0][0].weight.grad.double()
        assert solver.beta[0] > 1e9
    one, other = grads.values()
    assert float((one * other).sum() / (one.norm() * other.norm())) > 0.99


def test_other_blocks_go_by_autograd():
    frozen = nn.Linear(3, 3)
    frozen.weight.requires_grad_(False)
    for block in (nn.Tanh(), nn.Sequential(nn.Linear(3, 3), nn.Tanh()), frozen, nn.Conv2d(1, 1, 3)):
        assert isinstance(calculus_of(block), AutogradCalculus)


def test_one_linear_block_ends_at_least_squares():
    """Fixed point: Z = f(X), U = (Y - f(X)) / beta, X'U = 0, so W is numpy's lstsq."""
    _, y = blobs()
    x = torch.randn(N, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    block = nn.Linear(WIDTH, 3).double()
    solver, cycles = run([block], x, y, 100, batch=N, optimizer="sgd", lr=0.5, theta_steps=3, dual_step=1.0)
    ones = np.hstack([x.numpy(), np.ones((N, 1))])
    wanted = np.linalg.lstsq(ones, np.eye(3)[y.numpy()], rcond=None)[0].T
    found = np.hstack([block.weight.detach().numpy(), block.bias.detach().numpy()[:, None]])
    np.testing.assert_allclose(found, wanted, atol=1e-3)
    fitted = block(x).detach()
    torch.testing.assert_close(solver.variables["U1"], nn.functional.one_hot(y) - fitted, rtol=0, atol=1e-3)
    assert cycles[-1].residuals[0] < 1e-3 < cycles[0].residuals[0]


def test_two_scalar_blocks_multiply_to_the_target():
    a, b = nn.Linear(1, 1, bias=False).double(), nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        a.weight.fill_(0.5)
        b.weight.fill_(0.7)
    # class 0 of a single output asks for 1: x = 1/2 asks the product to be 2; the other sample sits at its target
    x, y = torch.tensor([[0.5], [0.5]], dtype=torch.float64), torch.tensor([0, 1])
    run_ = BlockAdmm([a, b], x, y, BlockAdmmConfig(loss="triplet", batch=2, lr=0.02, theta_steps=3))
    run_.loss = ToOne()
    for cycle in run_:
        if cycle.epoch == 600:
            break
    assert (a.weight * b.weight).item() == pytest.approx(2.0, abs=1e-3)
    assert max(cycle.residuals) < 1e-3


class ToOne:
    """1/2 |z - 1|^2 whatever the label."""

    def value(self, z, y):
        return 0.5 * (z - 1).square().sum()

    def prox(self, v, y, beta):
        return (1 + beta * v) / (1 + beta)


@pytest.mark.parametrize("z_optimizer", ["newton", "gradient", "adam", "sgd"])
@pytest.mark.parametrize("start", ["forward", "kept"])
def test_every_way_to_move_the_variables_learns(z_optimizer, start):
    x, y = blobs()
    blocks = mlp(WIDTH, 11, 3)
    step = {"adam": 0.05, "sgd": 0.1}.get(z_optimizer, 1.0)
    _, cycles = run(blocks, x, y, 30, z_optimizer=z_optimizer, start=start, z_lr=step)
    assert accuracy(blocks, x, y) > 0.95
    assert cycles[-1].loss < 0.5 * cycles[0].loss


@pytest.mark.parametrize("loss", ["squared", "cross_entropy", "triplet"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_losses_fall(loss, optimizer):
    x, y = blobs()
    options = {"lr": 0.05, "momentum": 0.9} if optimizer == "sgd" else {}
    _, cycles = run(mlp(WIDTH, 11, 3), x, y, 20, loss=loss, optimizer=optimizer, **options)
    assert cycles[-1].loss < 0.5 * cycles[0].loss


def test_convolutions_and_batch_norm_train_by_autograd():
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        nn.Sequential(nn.MaxPool2d(2), nn.Flatten()),  # no parameters
        nn.Linear(4 * 3 * 4, 2),
    ]
    y = torch.arange(60) % 2
    x = torch.randn(60, 1, 8, 11) * 0.3 + (y * 2.0 - 1)[:, None, None, None]
    before = blocks[0][1].running_mean.clone()
    _, cycles = run(blocks, x, y, 8, batch=20)
    assert accuracy(blocks, x, y) > 0.95
    assert not torch.equal(before, blocks[0][1].running_mean)
    assert len(cycles[-1].residuals) == 3


def test_one_step_without_duals_is_back_propagation_per_layer():
    """With a huge beta the aims are f - g / beta: the gradient of a block is that of plain back-propagation."""
    x, y = blobs(width=7)
    blocks = [b.double() for b in mlp(7, 5, 3)]
    config = BlockAdmmConfig(beta=1e7, dual_step=0, z_steps=1, z_optimizer="gradient", carry=True, batch=N, lr=1e-12)
    solver = BlockAdmm(blocks, x.double(), y, config)
    value = solver.loss.value(forward(blocks, x.double()), y) / N
    wanted = torch.autograd.grad(value, [p for b in blocks for p in b.parameters()])
    solver.visit(torch.arange(N))
    for p, g in zip((p for b in blocks for p in b.parameters()), wanted, strict=True):
        cosine = float((p.grad * g).sum() / (p.grad.norm() * g.norm()))
        assert cosine > 1 - 1e-6


@pytest.mark.parametrize("z_steps", [5, 50])
def test_duals_lower_the_residual_at_equal_cycles(z_steps):
    """Known answer 8: where data cannot be fitted the penalty keeps a gap, however many steps; duals close it."""
    _, y = blobs()
    x = torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(1))
    gap = {}
    for dual in (0.0, 0.5):
        blocks = [nn.Linear(WIDTH, 3)]
        options = {"batch": N, "optimizer": "sgd", "lr": 0.1, "dual_step": dual, "z_steps": z_steps}
        _, cycles = run(blocks, x, y, 100, **options)
        gap[dual] = cycles[-1].residuals[-1]
    assert gap[0.5] < 0.2 * gap[0.0]


@pytest.mark.parametrize("options", [{}, {"start": "kept", "z_optimizer": "gradient"}, {"average": 0.9}])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_resumed_run_is_the_same_run(tmp_path, options, mapped):
    x, y = blobs()
    options = {**options, "penalty_factor": 0.5, "penalty_bound": 0.01}
    whole = mlp(WIDTH, 11, 3)
    solver, wanted = run(whole, x, y, 5, **options)
    first = mlp(WIDTH, 11, 3)
    folder = {"variables": tmp_path / "a"} if mapped else {}
    half, _ = run(first, x, y, 3, **options, **folder)
    half.save(tmp_path / "kept")
    half.save(tmp_path / "kept")  # replaces the one before
    assert len(list((tmp_path / "kept").glob("*.safetensors"))) == 1
    again = mlp(WIDTH, 11, 3, seed=9)
    folder = {"variables": tmp_path / "b"} if mapped else {}
    rest = BlockAdmm(again, x, y, BlockAdmmConfig(batch=30, lr=0.01, **options, **folder)).resume(tmp_path / "kept")
    cycles = [cycle for _, cycle in zip(range(2), rest, strict=False)]
    assert cycles == wanted[3:]
    assert torch.equal(weights(again), weights(whole))
    with rest.averaged(), solver.averaged():
        assert torch.equal(weights(again), weights(whole))
    if mapped:
        assert (tmp_path / "b" / "U1.bin").stat().st_size == N * 11 * 4
        rest.variables.close()
        assert not (tmp_path / "b").exists()


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    x, y = blobs()
    solver, _ = run(mlp(WIDTH, 11, 3), x, y, 1)
    solver.save(tmp_path)
    with pytest.raises(OptionError, match="made with another configuration"):
        BlockAdmm(mlp(WIDTH, 11, 3), x, y, BlockAdmmConfig(beta=3)).resume(tmp_path)
    with pytest.raises(OptionError, match="another data"):
        BlockAdmm(mlp(WIDTH, 11, 3), x + 1, y, solver.config).resume(tmp_path)
    with pytest.raises(ArtifactError, match="no checkpoint that can be read"):
        solver.resume(tmp_path / "nowhere")


def test_threads_change_nothing():
    x, y = blobs()
    results = []
    for workers in (1, 3):
        blocks = mlp(WIDTH, 11, 9, 3)
        run(blocks, x, y, 4, workers=workers)
        results.append(weights(blocks))
    assert torch.equal(*results)


def ours():
    return [p for p in multiprocessing.active_children() if p.name.startswith("block-admm")]


def test_processes_change_nothing_and_can_be_saved(tmp_path):
    x, y = blobs()
    x = x.double()
    options = {"batch": 30, "lr": 0.01, "theta_steps": 2}
    plain = [b.double() for b in mlp(WIDTH, 11, 9, 3)]
    serial, wanted = run(plain, x, y, 4, **options)
    blocks = [b.double() for b in mlp(WIDTH, 11, 9, 3)]
    solver = BlockAdmm(blocks, x, y, BlockAdmmConfig(workers=2, parallel="processes", **options))
    cycles = iter(solver)
    found = [next(cycles), next(cycles)]
    solver.save(tmp_path)  # the optimizers' state comes from the processes
    assert len(ours()) == 2
    found += [next(cycles), next(cycles)]
    cycles.close()
    assert not ours()
    for one, other in zip(found, wanted, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-9)
        assert one.residuals == pytest.approx(other.residuals, rel=1e-9)
    torch.testing.assert_close(weights(blocks), weights(plain), rtol=0, atol=1e-9)
    moment = [o.state_dict()["state"][0]["exp_avg"] for o in (solver.optimizers[1], serial.optimizers[1])]
    torch.testing.assert_close(*moment, rtol=0, atol=1e-9)
    again = [b.double() for b in mlp(WIDTH, 11, 9, 3, seed=5)]
    rest = BlockAdmm(again, x, y, BlockAdmmConfig(**options)).resume(tmp_path)  # and goes on without processes
    list(itertools.islice(rest, 2))
    torch.testing.assert_close(weights(again), weights(plain), rtol=0, atol=1e-9)


class Moody(nn.Linear):
    """Fails where it learns, in a process of its own."""

    def forward(self, z):
        if self.training and self.mood == "raise":
            raise RuntimeError("not today")
        if self.training and self.mood == "die" and multiprocessing.parent_process() is not None:
            os._exit(7)
        return super().forward(z)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mood", "sentence"),
    [("raise", "worker process failed on blocks 1, 3: RuntimeError: not today"), ("die", "ended with exit code 7")],
)
def test_a_worker_that_fails_ends_the_run_and_the_others(mood, sentence):
    x, y = blobs()
    blocks = [Moody(WIDTH, 11), nn.Linear(11, 9), nn.Linear(9, 3)]
    blocks[0].mood = mood
    before = weights(blocks).clone()
    solver = BlockAdmm(blocks, x, y, BlockAdmmConfig(batch=30, workers=2, parallel="processes"))
    with pytest.raises(AuditError, match=sentence):
        next(iter(solver))
    assert not ours()
    assert torch.equal(weights(blocks), before)


SCRIPT = """
import itertools, multiprocessing, torch
from torch import nn
from auditor.training.block_admm import BlockAdmm
from auditor.block_config import BlockAdmmConfig

if __name__ == "__main__":
    x, y = torch.randn(90, 13), torch.arange(90) % 3
    blocks = [nn.Linear(13, 11), nn.Linear(11, 3)]
    try:
        for cycle in BlockAdmm(blocks, x, y, BlockAdmmConfig(workers=2, parallel="processes", lr=1e-9)):
            if cycle.epoch == 1:
                print(*(p.pid for p in multiprocessing.active_children()), flush=True)
    except KeyboardInterrupt:
        print("left", len(multiprocessing.active_children()), flush=True)
"""


@pytest.mark.slow
def test_control_c_leaves_no_process(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "train.py")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            pids = [int(p) for p in process.stdout.readline().split()]
            assert len(pids) == 2
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to parent and workers
            out, err = process.communicate(timeout=300)
        finally:
            process.kill()
    assert out == "left 0\n", err
    assert "Traceback" not in err
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_penalty_grows_and_the_multipliers_stay():
    x, y = blobs()
    solver = BlockAdmm(mlp(WIDTH, 11, 3), x, y, BlockAdmmConfig(batch=30, penalty_factor=0.5, penalty_bound=1e-9))
    cycles = iter(solver)
    next(cycles)
    assert solver.beta == [2.0, 2.0]
    before = [b * solver.variables[f"U{t}"].clone() for t, b in enumerate(solver.beta, 1)]
    solver._adapt_penalty(2, 1.0)
    assert solver.beta == [4.0, 4.0]
    for t, kept in enumerate(before, 1):
        torch.testing.assert_close(4.0 * solver.variables[f"U{t}"], kept)
    for _ in range(20):
        solver._adapt_penalty(2, 1.0)
    assert solver.beta == [100.0, 100.0]


def test_modes_are_put_back_and_averages_too():
    x, y = blobs()
    blocks = mlp(WIDTH, 11, 3)
    for block in blocks:
        block.train()
    cycles = block_admm(blocks, x, y, BlockAdmmConfig(batch=30))
    next(cycles)
    cycles.close()
    assert all(block.training for block in blocks)


def test_bad_input_gets_one_sentence(tmp_path):
    x, y = blobs()
    with pytest.raises(ShapeError, match=r"block 2 \(Linear\) does not take what block 1 gives, \(11,\) per sample"):
        BlockAdmm([nn.Linear(WIDTH, 11), nn.Linear(12, 3)], x, y)
    with pytest.raises(ShapeError, match="empty"):
        BlockAdmm([], x, y)
    with pytest.raises(DataError, match="only class 1"):
        BlockAdmm(mlp(WIDTH, 3), x, torch.ones(N, dtype=torch.long))
    with pytest.raises(DataError, match="class 2 is beyond the 2 outputs"):
        BlockAdmm(mlp(WIDTH, 2), x, y)
    with pytest.raises(DataError, match="labels must be 90 whole numbers"):
        BlockAdmm(mlp(WIDTH, 3), x, y[:5])
    with pytest.raises(DataError, match="no label"):
        BlockAdmm(mlp(WIDTH, 3), x, y - 1)
    with pytest.raises(OptionError, match=r"need \d+\.\d KiB and 1\.0 KiB are free in the memory of cpu"):
        BlockAdmm(mlp(WIDTH, 11, 3), x, y, BlockAdmmConfig(memory_limit=1000))
    with pytest.raises(OptionError, match="on the disk of"):
        BlockAdmm(mlp(WIDTH, 11, 3), x, y, BlockAdmmConfig(memory_limit=1000, variables=tmp_path))
    BlockAdmm(mlp(WIDTH, 11, 3), x, y, BlockAdmmConfig(memory_limit=1000, dual_step=0))  # nothing to keep


def test_memory_is_predicted_to_the_byte():
    x, y = blobs()
    both = BlockAdmm(mlp(WIDTH, 11, 3), x, y, BlockAdmmConfig(start="kept"))
    assert both.bytes_needed == 2 * N * (11 + 3) * 4
    assert both.bytes_needed == sum(both.variables[name].nbytes for name in both.variables)


def test_nan_stops_the_run_with_the_last_good_state():
    x, y = blobs()
    blocks = mlp(WIDTH, 11, 3)
    solver = BlockAdmm(blocks, x, y, BlockAdmmConfig(batch=30))
    cycles = iter(solver)
    next(cycles)
    good = weights(blocks)
    solver.x = x * math.nan
    with pytest.raises(NumericsError, match="not finite in epoch 2; the blocks hold the last good state"):
        next(cycles)
    assert torch.equal(weights(blocks), good)
    assert solver.epoch == 1


def test_a_residual_that_runs_away_stops_the_run():
    x, y = blobs()
    blocks = mlp(WIDTH, 11, 3)
    cycles = block_admm(blocks, x, y, BlockAdmmConfig(batch=30, z_optimizer="sgd", z_lr=30.0, start="kept"))
    with pytest.raises(NumericsError, match=r"grew from .* to|not finite"):
        list(itertools.islice(cycles, 50))
    assert weights(blocks).isfinite().all()
