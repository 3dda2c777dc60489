"""Curves: every optimizer leaves its trace, one that breaks down keeps what it had, and the command draws them all."""

import json
import math

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from auditor.cli import auditor
from auditor.training.cycle import accuracy
from auditor.training.learning_curves import curves_picture, learning_curves, open_arrays, stack
from auditor.training.optimizers import METHODS, cycles


@pytest.fixture(scope="module")
def arrays():
    return open_arrays("sklearn:digits", None, 400, None)


@pytest.fixture(scope="module")
def curves(arrays):
    return learning_curves(*arrays, hidden=(20,), epochs=8)


def test_digits_come_with_their_own_test_split(arrays):
    (x, y), (held, labels) = arrays
    assert x.shape == (400, 1, 8, 8)
    assert len(held) == len(labels) > 300
    assert len(y) == 400


def test_other_sources_keep_their_last_fifth(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (41, 13, 13), dtype=np.uint8)
    np.savez(tmp_path / "tiny.npz", images=images, labels=np.arange(41) % 3)
    (x, _), (held, y) = open_arrays(str(tmp_path / "tiny.npz"), None, None, 13)
    assert (len(x), len(held)) == (33, 8)
    assert y.tolist() == [i % 3 for i in range(33, 41)]


def test_every_optimizer_leaves_a_whole_curve(curves):
    assert [c.method for c in curves] == list(METHODS)
    for curve in curves:
        assert not curve.stopped
        assert len(curve.accuracy) == len(curve.seconds) == len(curve.residuals) == 8
        assert curve.seconds == sorted(curve.seconds)
        assert all(0 <= a <= 1 for a in curve.accuracy)
        assert all(math.isfinite(v) for v in curve.loss)
        expected = 0 if curve.method in ("sgd", "adam") else 2
        assert all(len(r) == expected for r in curve.residuals)
    for curve in curves:
        if curve.method != "gotmare":  # the weak baseline: too slow to tell in eight epochs
            assert curve.accuracy[-1] > 0.2  # ten classes


def test_all_start_from_the_same_weights(arrays):
    (x, y), held = arrays
    one, other = (learning_curves((x, y), held, methods=["sgd"], hidden=(20,), epochs=1, seed=3)[0] for _ in range(2))
    assert one.loss == other.loss


def test_a_broken_run_keeps_what_it_had(arrays):
    (x, y), held = arrays
    bad = x.clone()
    bad[0] = math.nan
    (curve,) = learning_curves((bad, y), held, methods=["sgd"], hidden=(20,), epochs=3)
    assert curve.accuracy == []
    assert "not finite in epoch 1" in curve.stopped


def test_picture_is_a_png(curves, tmp_path):
    path = curves_picture(curves, tmp_path / "sub" / "curves.png", "digits")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def command(*args):
    return CliRunner().invoke(auditor, ["curves", *map(str, args)], catch_exceptions=False)


def test_command_writes_the_picture_and_prints_a_summary(tmp_path):
    out = tmp_path / "c.png"
    options = ["--limit", "200", "--epochs", "2", "--hidden", "12", "--methods", "block-admm,sgd", "--out", out]
    rows = json.loads(command(*options, "--json").stdout)
    assert [row["method"] for row in rows] == ["block-admm", "sgd"]
    assert out.stat().st_size > 10_000
    shown = command(*options)
    assert "block-admm" in shown.output
    assert "picture in" in shown.output


@pytest.mark.parametrize(
    ("options", "sentence"),
    [(("--methods", "nosuch"), "not known; choose from block-admm"), (("--hidden", "0"), "--hidden wants")],
)
def test_command_answers_bad_input_in_one_line(options, sentence):
    result = command(*options)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_network_is_affine_layers_of_the_given_widths_with_weights_of_hes_size():
    blocks = stack([400, 300, 5], 0)
    assert [len(list(block.children())) for block in blocks] == [2, 0]
    lin = blocks[0][0]
    assert lin.weight.shape == (300, 400)
    assert float(lin.weight.std()) == pytest.approx((2 / 400) ** 0.5, rel=4 / (2 * lin.weight.numel()) ** 0.5)
    assert float(lin.bias.abs().max()) == 0
    assert torch.equal(lin.weight, stack([400, 300, 5], 0)[0][0].weight)
    assert not torch.equal(lin.weight, stack([400, 300, 5], 1)[0][0].weight)


def test_every_epoch_is_measured_and_announced(arrays):
    announced = []
    (curve,) = learning_curves(
        *arrays, methods=["adam"], hidden=(20,), epochs=3, progress=lambda *state: announced.append(state)
    )
    assert announced == [("training by adam", epoch, 3) for epoch in (1, 2, 3)]
    assert curve.to_json()["method"] == "adam"
    assert curve.seconds[0] > 0
    blocks = stack([64, 20, 10], 0)
    (x, y), (held, labels) = arrays
    run = cycles("adam", blocks, x.flatten(1), y, epochs=3, seed=0, loss="squared", batch=16)  # 400 // 50 is too few
    for accurate in curve.accuracy:
        next(run)
        assert accuracy(blocks, held.flatten(1), labels) == accurate
