"""What all optimizers share: checks of blocks and labels, accuracy, the snapshot, and the watch over residuals."""

import math

import pytest
import torch
from torch import nn

from auditor.errors import DataError, NumericsError, ShapeError
from auditor.training.cycle import Snapshot, Watch, accuracy, check_blocks, check_labels, forward
from tests.auditor.training.three_clouds import mlp, weights


def test_shapes_of_the_blocks_and_the_two_that_do_not_compose():
    blocks = [nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 11 * 15, 3)]
    x = torch.zeros(5, 1, 13, 17)
    assert check_blocks(blocks, x, "here") == [(4, 11, 15), (660,), (3,)]
    with pytest.raises(ShapeError, match=r"here: block 1 \(Linear\) does not take what the input gives, \(1, 13, 17\)"):
        check_blocks([nn.Linear(5, 3)], x, "here")
    with pytest.raises(ShapeError, match=r"block 3 \(Linear\) does not take what block 2 gives, \(660,\) per sample"):
        check_blocks([*blocks[:2], nn.Linear(661, 3)], x, "here")
    with pytest.raises(ShapeError, match="the list of blocks is empty"):
        check_blocks([], x, "here")


class Halves(nn.Module):
    def forward(self, x):
        return x[:1]


class Pair(nn.Module):
    def forward(self, x):
        return x, x


@pytest.mark.parametrize("block", [Halves(), Pair()])
def test_a_block_returns_a_row_per_sample(block):
    with pytest.raises(ShapeError, match=r"block 1 .* must return one tensor with a row per sample"):
        check_blocks([block], torch.zeros(4, 3), "here")


def test_checking_leaves_the_modes_and_running_statistics():
    blocks = [nn.BatchNorm1d(3).train(), nn.Dropout(0.5).eval()]
    check_blocks(blocks, torch.randn(4, 3), "here")
    assert [b.training for b in blocks] == [True, False]
    assert torch.equal(blocks[0].running_mean, torch.zeros(3))


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        ([0, 1, 2], "labels must be 4 whole numbers, one per sample, got torch.int64"),
        ([[0], [1], [0], [1]], r"got torch.int64 \(4, 1\)"),
        ([0.0, 1.0, 0.0, 1.0], "got torch.float32"),
        ([1, 1, 1, 1], "only class 1, and training needs two or more"),
        ([0, 1, -1, 1], r"no label \(-1\)"),
        ([0, 1, 2, 3], "class 3 is beyond the 3 outputs"),
    ],
)
def test_labels_that_do_not_fit(labels, sentence):
    with pytest.raises(DataError, match=sentence):
        check_labels(torch.tensor(labels), 4, 3, "here")


def test_labels_that_fit():
    check_labels(torch.tensor([0, 2, 1, 2]), 4, 3, "here")
    check_labels(torch.tensor([0, 9, 1, 2]), 4, None, "here")  # an embedding has no output per class
    with pytest.raises(DataError, match="has no class"):
        check_labels(torch.zeros(0, dtype=torch.long), 0, 3, "here")


@pytest.mark.parametrize("batch", [1, 3, 7, 100])
def test_accuracy_is_the_share_of_hits_whatever_the_batch(batch):
    block = nn.Identity().train()
    z = torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 1.0], [0.0, 5.0], [1.0, 0.0], [1.0, 2.0], [9.0, 0.0]])
    y = torch.tensor([0, 1, 1, 1, 0, 0, 1])
    assert accuracy([block], z, y, batch) == 4 / 7
    assert block.training


def test_accuracy_is_measured_in_eval_mode():
    block = nn.Dropout(1.0).train()  # in train mode every output is zero and class 0 would win
    assert accuracy([block], torch.tensor([[0.0, 1.0]]), torch.tensor([1])) == 1.0


def test_the_forward_pass_chains():
    blocks = mlp(5, 4, 3)
    x = torch.randn(6, 5)
    assert torch.equal(forward(blocks, x), nn.Sequential(*blocks)(x))


def test_a_snapshot_restores_what_was_taken_last():
    blocks = [nn.Linear(3, 2), nn.BatchNorm1d(2)]
    snapshot = Snapshot(blocks)
    first = weights(blocks).clone()
    with torch.no_grad():
        blocks[0].weight.add_(1)
        blocks[1].running_mean.add_(1)
    snapshot.take()
    second, mean = weights(blocks).clone(), blocks[1].running_mean.clone()
    assert not torch.equal(first, second)
    with torch.no_grad():
        blocks[0].weight.mul_(math.nan)
        blocks[1].running_mean.zero_()
    snapshot.restore()
    assert torch.equal(weights(blocks), second)
    assert torch.equal(blocks[1].running_mean, mean)


def test_a_run_that_goes_wrong_gets_its_last_good_weights_back():
    blocks = mlp(5, 4, 3)
    snapshot, good = Snapshot(blocks), weights(blocks).clone()
    for error, restored in ((NumericsError("not finite"), True), (KeyboardInterrupt(), False)):
        with torch.no_grad():
            blocks[0][0].weight.add_(1)
        with pytest.raises(type(error)), snapshot.restored_on_error():
            raise error
        assert torch.equal(weights(blocks), good) == restored
    changed = weights(blocks).clone()
    with snapshot.restored_on_error():
        pass
    assert torch.equal(weights(blocks), changed)


def steps(residuals, dual_step=0.8, sizes=()):
    """The dual step after every cycle with these residuals (one number or one per block)."""
    watch, after = Watch("here", dual_step), []
    for epoch, r in enumerate(residuals, 1):
        watch.judge(epoch, 1.0, r if isinstance(r, tuple) else (r,), sizes)
        after.append(watch.dual_step)
    return after


def test_the_dual_step_is_halved_when_a_residual_grows_three_cycles_in_a_row():
    assert steps([1, 1.1, 1.2, 1.3, 1.4]) == [0.8, 0.8, 0.8, 0.4, 0.4]
    assert steps([1, 1.1, 1.2, 1.0, 1.1, 1.2, 1.3]) == [0.8] * 6 + [0.4]  # a fall starts the count again
    assert steps([1, 1.0005, 1.001, 1.0015, 1.002]) == [0.8] * 5  # below a thousandth is standing still
    assert steps([(1, 5), (1, 5.1), (1, 5.2), (1, 5.3)]) == [0.8, 0.8, 0.8, 0.4]  # any block's residual


def test_the_dual_step_never_falls_below_an_eighth():
    growing = [1 + 0.1 * i for i in range(40)]
    assert min(steps(growing)) == pytest.approx(0.1)
    assert steps(growing)[:13] == pytest.approx([0.8] * 3 + [0.4] * 3 + [0.2] * 3 + [0.1] * 4)


def test_a_residual_ten_times_its_early_size_ends_the_run():
    with pytest.raises(
        NumericsError, match=r"here: the residual of block 1 grew from 2 to 20.1 by epoch 4; the blocks"
    ):
        steps([1, 1.5, 2, 20.1])
    assert len(steps([1, 1.5, 2, 19.9])) == 4
    with pytest.raises(NumericsError, match="grew from 2 to"):  # the fourth cycle no longer counts as early
        steps([1, 1.5, 2, 15, 21])
    with pytest.raises(NumericsError, match="block 2"):
        steps([(9, 1), (9, 2), (9, 3), (9, 31)])
    assert len(steps([1e-9, 9e-6])) == 2  # below ten millionths everything is rounding


def test_a_residual_below_the_size_of_its_variable_has_not_diverged():
    assert len(steps([1, 1.5, 2, 30], sizes=(31.0,))) == 4
    with pytest.raises(NumericsError, match="grew"):
        steps([1, 1.5, 2, 30], sizes=(29.0,))


def test_numbers_that_are_not_finite():
    watch = Watch("here")
    with pytest.raises(NumericsError, match=r"the loss was not finite in epoch 1.*Look for samples that are"):
        watch.judge(1, math.nan, (1.0,))
    watch.judge(1, 1.0, (1.0,))
    with pytest.raises(NumericsError, match=r"the consensus residual was not finite in epoch 2.* state\. Lower the"):
        watch.judge(2, 1.0, (math.inf,))
    with pytest.raises(NumericsError, match="the loss was"):
        watch.judge(2, math.inf, (math.nan,))


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 6])
def test_a_saved_watch_goes_on_as_the_whole_one(cut):
    residuals = [1, 1.1, 1.2, 1.3, 1.2, 1.3, 1.4, 1.5, 1.6]
    first, second = Watch("here", 0.8), Watch("here", 0.8)
    for epoch, r in enumerate(residuals[:cut], 1):
        first.judge(epoch, 1.0, (r,))
    second.from_json(first.to_json())
    for epoch, r in enumerate(residuals[cut:], cut + 1):
        second.judge(epoch, 1.0, (r,))
    assert second.dual_step == steps(residuals)[-1] == 0.2
    with pytest.raises(NumericsError, match=r"grew from 1\.2 to 12\.5"):
        second.judge(10, 1.0, (12.5,))
