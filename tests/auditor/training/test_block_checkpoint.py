"""A resumed Block-ADMM run is the same run; a checkpoint of another is refused."""

import json

import pytest
import torch

from auditor.errors import ArtifactError, OptionError
from auditor.training.block_admm import PRINTED, BlockAdmm, BlockAdmmConfig
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


@pytest.mark.parametrize(
    "options", [{}, {"start": "kept", "z_optimizer": "gradient"}, {"average": 0.9}, {**PRINTED, "z_lr": 0.05}]
)
@pytest.mark.parametrize("mapped", [False, True])
def test_a_resumed_run_is_the_same_run(tmp_path, options, mapped):
    x, y = blobs()
    options = {**options, "penalty_factor": 0.5, "penalty_bound": 0.01}
    whole = mlp(WIDTH, 11, 3)
    solver, expected = run(whole, x, y, 5, **options)
    first = mlp(WIDTH, 11, 3)
    folder = {"variables": tmp_path / "a"} if mapped else {}
    half, _ = run(first, x, y, 3, **options, **folder)
    half.save(tmp_path / "kept")
    half.save(tmp_path / "kept")  # replaces the one before
    assert len(list((tmp_path / "kept").glob("*.safetensors"))) == 1
    again = mlp(WIDTH, 11, 3, seed=9)
    folder = {"variables": tmp_path / "b"} if mapped else {}
    rest = BlockAdmm(again, x, y, BlockAdmmConfig(**{"batch": 30, "lr": 0.01, **options, **folder})).resume(
        tmp_path / "kept"
    )
    cycles = [cycle for _, cycle in zip(range(2), rest, strict=False)]
    assert cycles == expected[3:]
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


def test_a_checkpoint_from_before_an_option_was_there_is_taken_up(tmp_path):
    x, y = blobs()
    solver, _ = run(mlp(WIDTH, 11, 3), x, y, 1)
    solver.save(tmp_path)
    state = json.loads((tmp_path / "state.json").read_text())
    del state["stamp"]["configuration"]["dual_start"]
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert BlockAdmm(mlp(WIDTH, 11, 3), x, y, solver.config).resume(tmp_path).epoch == 1
    other = BlockAdmmConfig(batch=30, lr=0.01, dual_start=0.5)
    with pytest.raises(OptionError, match="made with another configuration"):
        BlockAdmm(mlp(WIDTH, 11, 3), x, y, other).resume(tmp_path)
