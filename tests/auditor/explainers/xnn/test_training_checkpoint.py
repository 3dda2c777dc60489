"""A checkpoint of heads: what is written comes back bit by bit, and another training's is refused."""

import pytest
import torch

from auditor.errors import OptionError
from auditor.explainers.xnn.head_objective import Problem, SraeConfig, start_state
from auditor.explainers.xnn.head_training import Block, Run
from auditor.explainers.xnn.heads import XHeads
from auditor.explainers.xnn.training_checkpoint import read_checkpoint, write_checkpoint

CONFIG = SraeConfig(epochs=9, batch=8)


def begun(n_classes=3, epochs=2):
    """A run of which one class is done, and a block of the others after some epochs."""
    random = torch.Generator().manual_seed(0)
    heads = XHeads(n_classes, 4, (), 3, generator=random)
    run = Run.of(heads, list(range(n_classes)))
    rows = torch.arange(1, n_classes)
    Z, logits = torch.rand(40, 4, generator=random), torch.randn(n_classes, 40, generator=random)
    problem = Problem.of(Z, logits, torch.ones(n_classes, 40) / 40)
    block = Block.start(
        rows, start_state(heads.select(rows), problem.only(rows), CONFIG, run.classes[rows]), problem.only(rows), CONFIG
    )
    for _ in range(epochs):
        block.train(CONFIG)
    return run, block


def values(run, block):
    """Every number that a training goes on from."""
    state = block.state
    numbers = {"epochs": run.epochs, "reseeded": run.reseeded, "rows": block.rows, "loss": block.loss}
    numbers |= {"since": block.since, "Q": state.Q, "silent": state.silent, "broken": state.broken}
    numbers |= {"of the block": state.reseeded, "random": state.generator.get_state()}
    for name, heads in (("all", run.heads), ("now", state.heads), ("best", block.best)):
        numbers |= {f"{name}.{k}": v for k, v in heads.state_dict().items()}
    for i, p in enumerate(state.heads.parameters()):
        numbers |= {f"adam.{i}.{k}": v for k, v in state.adam.state[p].items()}
    return {k: v.clone() for k, v in numbers.items()} | {
        "counts": torch.tensor([run.finished, run.diverged, state.epoch])
    }


def test_what_was_written_comes_back_and_goes_on_alike(tmp_path):
    run, block = begun()
    run.finished, run.diverged, run.epochs[0], run.reseeded[0, 0] = 1, 1, 7, 4
    write_checkpoint(tmp_path / "new" / "half", "stamp", run, block)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["half"]  # nothing temporary is left
    wanted = values(run, block)
    again, fresh = begun(epochs=0)
    assert any(not torch.equal(wanted[k], v) for k, v in values(again, fresh).items() if k in wanted)
    read_checkpoint(tmp_path / "new" / "half", "stamp", again, fresh)
    came = values(again, fresh)
    assert came.keys() == wanted.keys()
    assert [k for k in wanted if not torch.equal(wanted[k], came[k])] == []
    block.train(CONFIG)
    fresh.train(CONFIG)
    assert torch.equal(block.loss, fresh.loss)


def test_classes_that_were_done_leave_the_block(tmp_path):
    run, block = begun(4)
    block.keep(torch.tensor([0, 2]))  # of the classes 1, 2 and 3
    write_checkpoint(tmp_path / "half", "stamp", run, block)
    again, fresh = begun(4, epochs=0)
    read_checkpoint(tmp_path / "half", "stamp", again, fresh)
    assert fresh.rows.tolist() == [1, 3]
    assert torch.equal(fresh.loss, block.loss)


def test_what_is_done_is_read_without_the_block(tmp_path):
    run, block = begun()
    run.finished = 2
    write_checkpoint(tmp_path / "half", "stamp", run, block)
    again, fresh = begun(epochs=0)
    before = fresh.loss.clone()
    read_checkpoint(tmp_path / "half", "stamp", again)
    assert again.finished == 2
    assert torch.equal(fresh.loss, before)


def test_a_checkpoint_of_another_training_and_a_broken_one_are_refused(tmp_path):
    run, block = begun()
    write_checkpoint(tmp_path / "half", "stamp", run, block)
    with pytest.raises(OptionError, match="half belongs to another model, data set or configuration"):
        read_checkpoint(tmp_path / "half", "other", run, block)
    content = (tmp_path / "half").read_bytes()
    (tmp_path / "half").write_bytes(content[:-5])
    with pytest.raises(OptionError, match=r"half is no checkpoint that can be read \(.+\); remove it"):
        read_checkpoint(tmp_path / "half", "stamp", run, block)
