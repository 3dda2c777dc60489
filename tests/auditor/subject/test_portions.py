"""Portions: what goes through at once when memory runs out, in a real pass."""

import gc
import logging
import weakref

import pytest
import torch
from torch import nn

from auditor import Subject, fit, open_data
from auditor.errors import ModelError
from auditor.subject.portions import Portions, joined


class Small(nn.Module):
    """A network on a GPU that holds ``room`` images: more of them raise what CUDA raises."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.conv, self.relu, self.fc = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Linear(4 * 6 * 6, 3)
        self.room, self.sizes = room, []

    def forward(self, x):
        self.sizes.append(len(x))
        z = self.relu(self.conv(x))
        if len(x) > self.room:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.fc(z.flatten(1))


def subject(room):
    torch.manual_seed(0)
    net = Small(1000)
    made = Subject(net, input_shape=(1, 8, 8))
    made.layers()
    net.room = room
    net.sizes.clear()
    return made


def images(n, seed=0):
    return torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def test_the_batch_gets_smaller_by_itself_and_this_is_said_once(caplog):
    plenty, little, x = subject(1000), subject(3), images(11)
    with caplog.at_level(logging.WARNING, logger="auditor"):
        logits, taken = little.run(x, ["relu"])
        again = little.logits(x)
    assert [r.message for r in caplog.records] == [
        "the GPU ran out of memory with 11 images at once; fewer go at once from here on"
    ]
    assert little.module.sizes[:2] == [11, 5]  # tried whole, then half
    assert max(little.module.sizes[3:]) <= 2  # never more again
    want, layers = plenty.run(x, ["relu"])
    torch.testing.assert_close(logits, want)
    torch.testing.assert_close(again, want)
    torch.testing.assert_close(taken["relu"], layers["relu"])
    torch.testing.assert_close(little.forward_from("relu", taken["relu"]), want)
    assert not little.module.relu._forward_hooks


def test_what_ran_out_is_let_go_before_the_next_try():
    held = []

    def run(part):
        tensor = part.clone()
        alive = [ref() is not None for ref in held]
        assert not any(alive)
        held.append(weakref.ref(tensor))
        if len(part) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        del tensor
        return part.sum()

    gc.disable()  # by reference counts alone: a cycle would hold the memory of a GPU
    try:
        assert float(sum(Portions().map(run, torch.ones(8)))) == 8
    finally:
        gc.enable()


def test_one_image_that_does_not_fit_is_one_sentence():
    with pytest.raises(ModelError, match=r"not enough free memory for a single image; .* --device cpu"):
        subject(0).logits(images(4))


def test_other_errors_are_not_hidden():
    def run(part):
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        Portions().map(run, torch.ones(4))


def test_gradients_come_through_portions():
    x = images(5).requires_grad_()
    little = subject(2)
    (g,) = torch.autograd.grad(little.logits(x).sum(), x)
    y = images(5).requires_grad_()
    (want,) = torch.autograd.grad(subject(1000).logits(y).sum(), y)
    torch.testing.assert_close(g, want)


def test_no_rows_and_the_bound_of_a_call():
    assert [len(p) for p in Portions().map(lambda p: p, torch.empty(0, 2))] == [0]
    assert [len(p) for p in Portions().map(lambda p: p, torch.ones(5), most=2)] == [2, 2, 1]
    assert [len(p) for p in Portions(3).map(lambda p: p, torch.ones(5), most=4)] == [3, 2]
    one = torch.ones(2)
    assert joined([one]) is one
    assert joined([one, one]).shape == (4,)


def test_an_explainer_is_fitted_and_explains_with_little_memory(tmp_path):
    import numpy as np

    rng = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", images=rng.integers(0, 256, (40, 8, 8), dtype=np.uint8), labels=rng.integers(0, 3, 40))
    little, plenty = subject(4), subject(1000)
    data = open_data(str(tmp_path / "d.npz"))
    one, two = (fit("nmf", s, data, layer="relu", rank=3) for s in (little, plenty))
    torch.testing.assert_close(one.W_, two.W_, rtol=1e-3, atol=1e-4)
    a, b = (e.explain(s, images(6)) for e, s in ((one, little), (two, plenty)))
    for p, q in zip(a, b, strict=True):
        assert p.target_value == pytest.approx(q.target_value, abs=1e-4)
