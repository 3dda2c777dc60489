"""The demo's model: what it learns, and that the seed alone decides."""

import torch

from auditor.demo import digits as demo
from auditor.demo.digits import DigitsNet, train_digits


def test_it_reads_unseen_digits(trained):
    subject, accuracy = trained
    assert accuracy >= 0.97
    assert subject.input_shape == (1, 8, 8)
    assert subject.class_names == tuple("0123456789")


def test_a_batch_gives_the_logits_of_its_images():
    net, x = DigitsNet(), torch.rand(3, 1, 8, 8)
    with torch.no_grad():
        one_by_one = torch.cat([net(row[None]) for row in x])
        torch.testing.assert_close(net(x), one_by_one, rtol=1e-4, atol=1e-5)  # float32, sums in another order
    assert one_by_one.shape == (3, 10)


def test_the_seed_decides_and_nothing_else_random_is_touched(monkeypatch):
    monkeypatch.setattr(demo, "EPOCHS", 1)
    steps = []
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, _ = train_digits(3, lambda *step: steps.append(step))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert train_digits(3)[0].digest == first.digest
    assert train_digits(4)[0].digest != first.digest
    assert steps == [("training on the digits", 1, 1)]


def test_one_epoch_learns_less_than_all(monkeypatch, trained):
    monkeypatch.setattr(demo, "EPOCHS", 1)
    assert 0.2 < train_digits(0)[1] < trained[1]


def test_progress_counts_epochs(monkeypatch):
    monkeypatch.setattr(demo, "EPOCHS", 2)
    steps = []
    train_digits(0, lambda stage, done, total: steps.append((done, total)))
    assert steps == [(1, 2), (2, 2)]
