"""Fitting heads: resume, dead x-features, divergence, classes that cannot be learned."""

import math

import pytest
import torch

from auditor import fit
from auditor.data.source import open_data
from auditor.errors import DataError, NumericsError, OptionError
from auditor.explainers.fitted_images import FittedImages
from auditor.explainers.xnn.examples import Examples
from auditor.explainers.xnn.head_objective import Problem, SraeConfig, objective, start_state, train, weights_of
from auditor.explainers.xnn.head_training import block_size, check_classes, fit_heads
from auditor.explainers.xnn.heads import XHeads


def examples_of(Z, y):
    n = len(Z)
    logits = torch.stack([y, torch.zeros(n)], 1)
    return Examples(Z, logits, (y < 0).long(), FittedImages.each(n, 5, choose=True))


def npz(tmp_path, subject, keep):
    import numpy as np
    from sklearn.datasets import load_digits

    d = load_digits()
    rows = np.flatnonzero(keep(d.target))
    file = tmp_path / "some.npz"
    np.savez(file, images=(d.images[rows] * 15.9).astype("uint8")[..., None], labels=d.target[rows])
    return open_data(str(file))


def test_training_resumes_exactly_where_it_was_interrupted(subject, digits, tmp_path, monkeypatch):
    monkeypatch.setattr("auditor.explainers.xnn.head_training.CHECKPOINT_EVERY_S", -1.0)
    whole = fit("xnn", subject, digits, target=3, max_epochs=6)
    file = tmp_path / "half.safetensors"

    def interrupt(stage, done, total):
        if stage == "training heads" and done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit("xnn", subject, digits, target=3, max_epochs=6, checkpoint=str(file), progress=interrupt)
    assert file.exists()
    with pytest.raises(OptionError, match="another model, data set or configuration"):
        fit("xnn", subject, digits, target=4, max_epochs=6, checkpoint=str(file))
    stages = []
    again = fit("xnn", subject, digits, target=3, max_epochs=6, checkpoint=str(file),
                progress=lambda s, d, t: stages.append((s, d)))  # fmt: skip
    assert min(d for s, d in stages if s == "training heads") == 4
    assert not file.exists()
    torch.testing.assert_close(again.heads_.v, whole.heads_.v, rtol=0, atol=0)
    assert "checkpoint" not in again.config.model_dump()


def test_dead_x_features_are_sown_again_and_reported():
    g = torch.Generator().manual_seed(0)
    Z = torch.rand(100, 4, generator=g)
    heads = XHeads(1, 4, (), 3, generator=g)
    with torch.no_grad():
        heads.encoder_w[0][0, 1], heads.encoder_b[0][0, 0, 1] = -1.0, -1.0
    problem = Problem.of(Z, Z.sum(1)[None], torch.ones(1, 100))
    state = start_state(heads, problem, SraeConfig())
    for _, _s in zip(range(4), train(state, SraeConfig()), strict=False):
        pass
    assert int(state.reseeded[0, 1]) >= 1
    assert bool((heads.encode(Z)[0, :, 1] > 0).any())


def test_nan_losses_stop_with_the_last_good_state_kept(monkeypatch):
    Z = torch.rand(100, 4)
    y = Z.sum(1) - 2
    heads = XHeads(1, 4, (), 2)
    real = torch.optim.Adam.step
    calls = {"n": 0}

    def poisoned(self, *args, **kwargs):
        calls["n"] += 1
        if calls["n"] == 4:
            with torch.no_grad():
                self.param_groups[-1]["params"][0].fill_(math.nan)
            return None
        return real(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", poisoned)
    trained = fit_heads(heads, examples_of(Z, y), [0], SraeConfig(), max_epochs=10, patience=9)
    assert "1 of 1 heads gave an infinite loss; the best state before that is kept" in trained.diverged
    assert torch.isfinite(heads.v).all()
    assert int(trained.epochs[0]) < 10
    with pytest.raises(NumericsError, match=r"no finite loss in epoch \d\. Lower lr .* nothing is kept"):
        fit_heads(XHeads(1, 4, (), 2), examples_of(Z * math.nan, y), [0], SraeConfig(), max_epochs=10, patience=5)


def test_classes_without_positives_or_negatives_and_tiny_sets_are_refused(tmp_path, subject):
    with pytest.raises(DataError, match="class '3' has no positive example"):
        fit("xnn", subject, npz(tmp_path, subject, lambda y: y != 3), target=3)
    with pytest.raises(DataError, match="class '3' has no negative example"):
        fit("xnn", subject, npz(tmp_path, subject, lambda y: y == 3), target=3)
    few = npz(tmp_path, subject, lambda y: y.cumsum() <= 6)  # labels 0 to 3
    with pytest.raises(DataError, match="fewer than 5 x-features"):
        fit("xnn", subject, few, target=3)


def random_examples(n=120, seed=0):
    g = torch.Generator().manual_seed(seed)
    Z = torch.rand(n, 4, generator=g)
    logits = Z @ torch.randn(4, 3, generator=g) + 0.3 * torch.randn(n, 3, generator=g)
    return Examples(Z, logits, logits.argmax(1), FittedImages.each(n, 5, choose=True))


def random_heads(n_classes, seed=0):
    return XHeads(n_classes, 4, (), 3, generator=torch.Generator().manual_seed(seed))


def trial_losses(heads, examples, classes, config):
    """The objective of each class on the trial images, its logit in units of its spread on the learned ones."""
    y, trial, learned = examples.logits[:, classes], examples.trial, examples.learned.logits[:, classes]
    standard = (y[examples.trial_rows] - learned.mean(0)) / learned.std(0)
    weights = weights_of(trial.positives(classes))
    return objective(heads, Problem.of(trial.Z, standard.T, weights), config)


def test_an_image_without_a_label_belongs_to_what_the_model_says():
    logits = torch.tensor([[2.0, 1, 0], [0, 3, 1], [0, 3, 1], [5, 0, 0]])
    examples = Examples(torch.rand(4, 2), logits, torch.tensor([1, -1, 2, -1]), FittedImages.each(4, 2))
    assert examples.positives([0, 1, 2]).int().tolist() == [[0, 0, 0, 1], [1, 1, 0, 0], [0, 0, 1, 0]]
    assert examples.positives([2, 0]).int().tolist() == [[0, 0, 1, 0], [0, 0, 0, 1]]


def test_each_image_learns_chooses_or_reports():
    examples = random_examples()
    parts = [examples.learned, examples.trial, examples.reported]
    rows = torch.cat([part.Z for part in parts])
    assert len(rows) == 120
    assert len(rows.unique(dim=0)) == 120
    for part in parts:
        assert 0 < len(part.Z) == len(part.logits) == len(part.labels)
        assert torch.equal(part.logits.argmax(1), part.labels)


def test_without_trial_or_report_images_others_stand_in():
    n = 6
    everything = FittedImages.of_rows(n, learn=torch.arange(n))
    examples = Examples(torch.rand(n, 2), torch.rand(n, 2), torch.zeros(n, dtype=torch.long), everything)
    assert torch.equal(examples.trial.Z, examples.Z)
    assert torch.equal(examples.reported.Z, examples.Z)


def test_a_class_needs_both_sides_and_the_set_as_many_images_as_features():
    examples = random_examples()
    check_classes(examples, [0, 1, 2], 72, "abc")
    with pytest.raises(DataError, match=r"\d+ training images are fewer than 121 x-features"):
        check_classes(examples, [0], 121, "abc")
    n_learn = len(examples.learned.Z)
    check_classes(examples, [0], n_learn, "abc")
    with pytest.raises(DataError, match=f"{n_learn} training images are fewer than {n_learn + 1}"):
        check_classes(examples, [0], n_learn + 1, "abc")


def test_each_class_keeps_its_best_epoch(monkeypatch):
    from auditor.explainers.xnn import head_training

    history = []

    def noted(heads, problem, config):
        history.append(objective(heads, problem, config))
        return history[-1]

    monkeypatch.setattr(head_training, "objective", noted)
    examples, classes, config = random_examples(), [0, 2], SraeConfig(lr=0.3, batch=16, variant="nn")
    heads = random_heads(2)
    trained = fit_heads(heads, examples, classes, config, max_epochs=25, patience=100)  # steps far too long
    assert trained.epochs.tolist() == [25, 25]
    assert len(history) == 26  # the start counts
    best = torch.stack(history).min(0).values
    learned = examples.learned.logits[:, classes]
    with torch.no_grad():  # heads speak of logits, the objective of standardised ones
        heads.c.sub_(learned.mean(0)).div_(learned.std(0))
        heads.v.div_(learned.std(0).view(2, 1, 1))
    torch.testing.assert_close(trial_losses(heads, examples, classes, config), best, rtol=1e-3, atol=1e-5)
    assert bool((history[-1] > 1.05 * best).any())


def test_blocks_of_classes_are_all_classes_together():
    examples, classes = random_examples(), [2, 0, 1]
    fits = []
    for block in (3, 2, 1):
        heads = random_heads(3)
        trained = fit_heads(heads, examples, classes, SraeConfig(batch=32), max_epochs=6, patience=3, block=block)
        fits.append((heads, trained))
    for heads, trained in fits[1:]:
        assert trained.epochs.tolist() == fits[0][1].epochs.tolist()
        for a, b in zip(heads.parameters(), fits[0][0].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)  # float32, sums in another order


def test_a_class_that_gains_no_more_leaves_and_the_others_go_on():
    examples = random_examples()
    logits = torch.cat([examples.logits, torch.zeros(120, 1)], 1)  # the last logit is constant: nothing to gain
    logits[:, 3] += 1e-3 * torch.randn(120, generator=torch.Generator().manual_seed(1))
    examples = Examples(examples.Z, logits, examples.labels, examples.parts)
    config = SraeConfig(variant="nn", batch=16)
    trained = fit_heads(random_heads(2), examples, [0, 3], config, max_epochs=40, patience=3)
    assert int(trained.epochs[1]) < int(trained.epochs[0])


def test_blocks_are_as_large_as_memory_allows(monkeypatch):
    heads = random_heads(2)
    per_class = sum(p[0].numel() for p in heads.parameters())
    for room, size in ((5 * per_class, 1), (10 * per_class, 2), (1, 1), (53 * per_class, 5)):
        monkeypatch.setattr("auditor.explainers.xnn.head_training.BLOCK_NUMBERS", room)
        assert block_size(heads) == size


def test_an_interrupted_training_goes_on_in_its_block(tmp_path):
    examples, classes, config = random_examples(), [0, 1, 2], SraeConfig(batch=16)
    options = {"max_epochs": 5, "patience": 9, "block": 2, "stamp": "s"}
    whole = random_heads(3)
    fit_heads(whole, examples, classes, config, **options)
    file, calls = tmp_path / "half.safetensors", []

    def interrupt(stage, done, total):
        calls.append((done, total))
        if done == 2 * 5 + 3 * 1:  # the first block is done, the second in its third epoch
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_heads(random_heads(3), examples, classes, config, checkpoint=file, progress=interrupt, **options)
    assert calls[-1] == (13, 15)
    again, calls = random_heads(3, seed=9), []  # nothing of the start is needed any more
    fit_heads(
        again, examples, classes, config, checkpoint=file, progress=lambda s, d, t: calls.append((d, t)), **options
    )
    assert calls == [(14, 15), (15, 15)]
    for a, b in zip(again.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("patience", [1, 4])
def test_training_ends_when_no_class_gains(patience):
    config = SraeConfig(lr=1e-9)  # nothing is ever gained
    trained = fit_heads(random_heads(1), random_examples(), [0], config, max_epochs=50, patience=patience)
    assert trained.epochs.tolist() == [patience]
    assert trained.diverged == ""


def test_dead_features_are_counted_on_the_images_to_report_on():
    heads = random_heads(1)
    with torch.no_grad():
        heads.encoder_w[0].abs_()
        heads.encoder_w[0][0, 1], heads.encoder_b[0][0, 0, 1] = -1.0, -1.0
    trained = fit_heads(heads, random_examples(), [0], SraeConfig(lr=1e-9), max_epochs=1, patience=9)
    assert trained.dead.tolist() == [[False, True, False]]


@pytest.mark.parametrize("content", [b"", b"not a checkpoint"])
def test_a_broken_checkpoint_is_one_sentence(content, tmp_path):
    file = tmp_path / "half.safetensors"
    file.write_bytes(content)
    with pytest.raises(OptionError, match=r"half\.safetensors is no checkpoint that can be read .*; remove it"):
        fit_heads(
            random_heads(1), random_examples(), [0], SraeConfig(), max_epochs=2, patience=1, checkpoint=file, stamp="a"
        )
    assert file.read_bytes() == content


def test_blocks_are_as_many_as_workers_could_share():
    sizes = {n: block_size(random_heads(n)) for n in (3, 10, 100, 1000)}
    assert sizes == {3: 5, 10: 5, 100: 13, 1000: 125}
