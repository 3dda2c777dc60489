"""Threads and processes change nothing but the time, and leave nothing behind."""

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

from auditor.errors import AuditError
from auditor.training.block_admm import BlockAdmm, BlockAdmmConfig
from tests.auditor.training.three_clouds import blobs, mlp, weights

N, WIDTH = 90, 13


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def run(blocks, x, y, epochs, **options):
    solver = BlockAdmm(blocks, x, y, BlockAdmmConfig(**{"batch": 30, "lr": 0.01, **options}))
    return solver, [cycle for _, cycle in zip(range(epochs), solver, strict=False)]


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


@pytest.mark.slow
def test_processes_change_nothing_and_can_be_saved(tmp_path):
    x, y = blobs()
    x = x.double()
    options = {"batch": 30, "lr": 0.01, "theta_steps": 2}
    plain = [b.double() for b in mlp(WIDTH, 11, 9, 3)]
    serial, expected = run(plain, x, y, 4, **options)
    blocks = [b.double() for b in mlp(WIDTH, 11, 9, 3)]
    solver = BlockAdmm(blocks, x, y, BlockAdmmConfig(workers=2, parallel="processes", **options))
    cycles = iter(solver)
    results = [next(cycles), next(cycles)]
    solver.save(tmp_path)  # the optimizers' state comes from the processes
    assert len(ours()) == 2
    results += [next(cycles), next(cycles)]
    cycles.close()
    assert not ours()
    for one, other in zip(results, expected, strict=True):
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
from auditor.training.block_admm import BlockAdmm, BlockAdmmConfig

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
