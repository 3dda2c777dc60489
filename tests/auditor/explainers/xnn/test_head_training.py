"""Fitting heads: resume, dead x-features, divergence, classes that cannot be learned."""

import math

import pytest
import torch

from auditor import fit
from auditor.data.source import open_data
from auditor.errors import DataError, NumericsError, OptionError
from auditor.explainers.fitted_images import FittedImages
from auditor.explainers.xnn.head_objective import Problem, SraeConfig, start_state, train, weights_of
from auditor.explainers.xnn.head_training import Examples, check_classes, fit_heads
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
    problem = Problem(Z, Z.sum(1)[None], torch.ones(1, 100))
    state = start_state(heads, problem, SraeConfig())
    for _, _s in zip(range(4), train(problem, state, SraeConfig()), strict=False):
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
                heads.v.fill_(math.nan)
            return None
        return real(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", poisoned)
    trained = fit_heads(heads, examples_of(Z, y), [0], SraeConfig(), max_epochs=10, patience=5)
    assert "loss of nan" in trained.diverged
    assert torch.isfinite(heads.v).all()
    calls["n"] = 3
    assert "The best state before that is kept" in trained.diverged
    with pytest.raises(NumericsError, match=r"Lower lr .* nothing is kept"):
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


def trial_losses(heads, examples, classes):
    """Weighted squared error of each class on the trial images, in units of its logit's spread."""
    trial = examples.trial
    with torch.no_grad():
        predicted = heads.predict(heads.encode(trial.Z))
    losses = []
    for i, k in enumerate(classes):
        y = trial.logits[:, k]
        error = ((predicted[i] - y) / y.std()).square()
        losses.append(float((weights_of(trial.labels[None] == k)[0] * error).mean()))
    return losses


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


def test_each_class_keeps_its_best_epoch():
    examples, classes = random_examples(), [0, 2]
    heads, history = random_heads(2), []
    config = SraeConfig(lr=0.3, batch=16)  # steps so long that the last epoch is not the best
    trained = fit_heads(
        heads,
        examples,
        classes,
        config,
        max_epochs=25,
        patience=100,
        progress=lambda stage, done, total: history.append(trial_losses(heads, examples, classes)),
    )
    assert trained.epochs == len(history) == 25
    best = [min(losses) for losses in zip(*history, strict=True)]
    assert trial_losses(heads, examples, classes) == pytest.approx(best, rel=1e-3)  # float32, scaled once more
    assert any(last > 1.05 * least for last, least in zip(history[-1], best, strict=True))


@pytest.mark.parametrize("patience", [1, 4])
def test_training_ends_when_no_class_gains(patience):
    config = SraeConfig(lr=1e-9)  # nothing is ever gained after the first epoch
    trained = fit_heads(random_heads(1), random_examples(), [0], config, max_epochs=50, patience=patience)
    assert trained.epochs == 1 + patience
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
