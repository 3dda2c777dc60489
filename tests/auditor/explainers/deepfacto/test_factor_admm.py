"""Training around a factorization: one visit by its formulas, the head as a minimum, what breaks and what is kept."""

import math

import pytest
import torch
from torch.nn import functional as nf

from auditor import open_data
from auditor.errors import OptionError
from auditor.explainers.deepfacto.factor_admm import (
    FactorAdmm,
    FactorSettings,
    Task,
    activations_of,
    check_memory,
    fit_head,
    objective,
    per_image,
    pooled_scores,
    reseeded,
    train,
    validation,
)
from auditor.kernels.factorization.deepfacto import LinearHead, projected
from auditor.network.below_layer import BelowLayer


@pytest.fixture
def small_run(tiny, tiny_npz):
    """A cut of the tiny network at its ReLU with a start for the training: (cut, M, head, task)."""
    batch = next(open_data(tiny_npz).batches(tiny, 40))
    cut = BelowLayer(tiny, "relu")
    Z = activations_of(cut, batch.images)
    pool = torch.full((Z.shape[2], 1), 1 / Z.shape[2])
    g = torch.Generator().manual_seed(0)
    M = torch.rand(5, 2, generator=g)
    head = LinearHead(torch.randn(3, 2, 1, generator=g), torch.zeros(3), pool)
    with torch.no_grad():
        logits = tiny.logits(batch.images)
    return cut, M / M.norm(dim=0), head, Task(batch.images, batch.labels, logits)


def test_training_moves_the_weights_and_not_the_model(small_run, tiny):
    cut, M, head, task = small_run
    before = {k: w.clone() for k, w in cut.weights.items()}
    original = tiny.module.conv.weight.clone()
    done = train(cut, M, head, task, FactorSettings(epochs=2, batch=16, dual_step=0.1), 1.0, lambda _: None)
    assert done.status == "finished"
    assert set(before) == {"conv.weight", "conv.bias"}  # what the layer depends on, not the classifier above it
    assert not torch.equal(cut.weights["conv.weight"], before["conv.weight"])
    assert torch.equal(tiny.module.conv.weight, original)
    assert len(done.history) == 2
    assert float(done.state.M.min()) >= 0


def test_a_training_that_only_harms_ends_with_the_start(small_run):
    cut, M, head, task = small_run
    before = {k: w.clone() for k, w in cut.weights.items()}
    done = train(cut, M, head, task, FactorSettings(epochs=3, batch=16, lr=30.0), 1.0, lambda _: None)
    validation = done.valid[done.state.epoch]
    start = done.valid[0][0]
    enough = start - (start * (1 - start) / 5) ** 0.5  # five of the forty images validate
    assert validation[0] >= enough
    assert validation[1] == min(v for right, v in done.valid if right >= enough)
    if done.state.epoch == 0:
        assert all(torch.equal(w, before[k]) for k, w in cut.weights.items())


def test_training_ends_when_nothing_gets_better(small_run):
    cut, M, head, task = small_run
    done = train(cut, M, head, task, FactorSettings(epochs=9, batch=16, lr=30.0, patience=2), 1.0, lambda _: None)
    assert done.status == "finished"
    assert len(done.history) == done.state.epoch + 2


def test_a_misclassified_image_asks_for_more_than_a_correct_one(small_run):
    cut, M, head, task = small_run
    run = FactorAdmm(cut, M, head, task, FactorSettings(trust=0.2), 1.0)
    rows = torch.arange(len(task.images))
    S = projected(run.Z0, M)
    h = torch.zeros(len(rows), 3)
    h[0, task.labels[0]] = 20.0  # sure and right; all others know nothing
    pull = run._pull(S, h, rows)
    assert per_image(pull) == pytest.approx(0.2 * per_image(M.T @ run.Z0), rel=1e-5)
    sizes = pull.flatten(1).norm(dim=1)
    assert float(sizes[0]) < 1e-3 * float(sizes[1:].min())


def test_numbers_that_break_end_the_training_with_the_last_good_state(small_run, monkeypatch):
    cut, M, head, task = small_run
    whole, calls = FactorAdmm._visit, []

    def breaks(self, rows, adam):
        calls.append(1)
        sums = whole(self, rows, adam)
        return sums * float("nan") if len(calls) > 3 else sums  # three batches are one pass

    monkeypatch.setattr(FactorAdmm, "_visit", breaks)
    states = []
    done = train(cut, M, head, task, FactorSettings(epochs=5, batch=16), 1.0, states.append)
    assert done.status.startswith("stopped after epoch 1")
    assert len(states) == 1
    assert done.state.epoch <= 1
    for k, w in cut.weights.items():
        assert torch.equal(w, done.state.weights[k])  # of the start or of the one whole pass, whichever was better
        assert bool(torch.isfinite(w).all())


def test_a_dead_factor_takes_what_the_others_miss():
    g = torch.Generator().manual_seed(4)
    f = torch.rand(3, 7, 4, generator=g)
    M = torch.rand(7, 3, generator=g)
    M[:, 1] = 0
    S = torch.rand(3, 3, 4, generator=g) * 0.1
    new, dead = reseeded(M, torch.tensor([False, False, False]), f, S)
    assert dead.tolist() == [1]
    missed = (f - M @ S).clamp_min(0).permute(1, 0, 2).flatten(1)
    worst = missed[:, missed.norm(dim=0).argmax()]
    torch.testing.assert_close(new[:, 1], worst / worst.norm())
    assert torch.equal(new[:, [0, 2]], M[:, [0, 2]])
    assert reseeded(new, torch.tensor([True, False, False]), f, S)[1].tolist() == [0]  # silent counts as dead
    assert reseeded(new, torch.zeros(3, dtype=torch.bool), f, S)[0] is new


def rms(x):
    return float(x.square().mean().sqrt())


def test_without_supervision_the_layer_is_drawn_into_what_the_factors_show(small_run):
    """One visit of all images: f is Z0, the scores stay, and Z lies between f and a little less of what M S misses."""
    cut, M, head, task = small_run
    settings = FactorSettings(
        epochs=1, batch=40, supervision=0.0, beta=2.0, gamma=3.0, reconstruction=0.5, anchor=0.4, trust=0.3, lr=1e-12
    )
    f = activations_of(cut, task.images) / 1.7
    S = projected(f, M)
    missed = f - M @ S
    loss_head = FactorAdmm(cut, M, head, task, settings, 1.7).head
    (state,) = list(FactorAdmm(cut, M, head, task, settings, 1.7))
    moved = -3.0 * 0.3 * 0.5 * missed / (2.0 + 3.0 + 0.3 * 0.4)
    assert state.epoch == 1
    assert state.residuals[0] == pytest.approx(rms(moved), rel=1e-3)
    assert state.residuals[1] == pytest.approx(rms(f + moved - state.M @ S), rel=0.02)
    expected = float(nf.cross_entropy(loss_head.logits(S), task.labels))
    assert state.loss == pytest.approx(expected, rel=1e-4)


def test_the_layer_follows_its_request_at_a_rate_that_falls_to_zero(small_run):
    cut, M, head, task = small_run
    before = {k: w.clone() for k, w in cut.weights.items()}
    moves = []
    for state in FactorAdmm(cut, M, head, task, FactorSettings(epochs=6, batch=40, lr=1e-3), 1.0):
        moves.append(max(float((w - before[k]).abs().max()) for k, w in state.weights.items()))
        before = state.weights
    # Adam's first step is lr itself; one step per pass, and the cosine is at its last sixth at the end
    assert moves[0] == pytest.approx(1e-3, rel=1e-2)
    assert moves[-1] < 0.3 * moves[0]


def test_scores_that_are_asked_for_lower_the_loss(small_run):
    cut, M, head, task = small_run
    losses = [s.loss for s in FactorAdmm(cut, M, head, task, FactorSettings(epochs=15, batch=20, lr=5e-3), 1.0)]
    assert losses[-1] < losses[0]


def test_the_second_head_is_on_means_and_only_where_there_are_cells(small_run):
    cut, M, head, task = small_run
    assert FactorAdmm(cut, M, head, task, FactorSettings(), 1.0).pooled_head is None  # one cell: the same head twice
    positions = head.pool.shape[0]
    pool = torch.zeros(positions, 2)
    pool[: positions // 2, 0] = pool[positions // 2 :, 1] = 2 / positions
    halves = LinearHead(torch.zeros(3, 2, 2), torch.zeros(3), pool)
    second = FactorAdmm(cut, M, halves, task, FactorSettings(), 1.0).pooled_head
    torch.testing.assert_close(second.pool, torch.full((positions, 1), 1 / positions))
    assert FactorAdmm(cut, M, halves, task, FactorSettings(pooled=0.0), 1.0).pooled_head is None


def test_duals_exist_only_where_they_step(small_run):
    cut, M, head, task = small_run
    assert FactorAdmm(cut, M, head, task, FactorSettings(dual_step=0.0), 1.0).U is None
    run = FactorAdmm(
        cut, M, head, task, FactorSettings(dual_step=0.3, epochs=1, batch=40, lr=1e-12, supervision=0.0), 1.0
    )
    assert float(run.U.abs().max()) == 0
    S = projected(run.Z0, M)
    s = run.settings
    missed = run.Z0 - M @ S
    moved = -s.gamma * s.trust * s.reconstruction * missed / (s.beta + s.gamma + s.trust * s.anchor)
    next(iter(run))
    torch.testing.assert_close(run.U, 0.3 * moved, rtol=1e-2, atol=1e-6)
    expected = -s.trust * s.reconstruction * missed
    torch.testing.assert_close(run.V, 0.3 * (moved - expected), rtol=1e-2, atol=1e-6)


def test_the_objective_mixes_labels_and_the_models_logits():
    g = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(5, 3, generator=g), torch.randn(5, 3, generator=g)
    labels = torch.tensor([0, 2, -1, 1, 2])
    plain = [0.0 if y < 0 else float(row.logsumexp(0) - row[y]) for row, y in zip(logits, labels.tolist(), strict=True)]
    assert objective(logits, labels, teacher, 0.0).tolist() == pytest.approx(plain, rel=1e-5)
    spread = float(teacher.std())
    for i, value in enumerate(objective(logits, labels, teacher, 0.3).tolist()):
        far = sum((float(logits[i, c] - teacher[i, c]) / spread) ** 2 for c in range(3))
        assert value == pytest.approx(0.7 * plain[i] + 0.3 * 0.5 * far, rel=1e-5)


@pytest.mark.parametrize("fidelity", [0.0, 0.4])
def test_the_head_is_a_minimum_with_a_ridge_on_scores_of_unit_variance(fidelity):
    g = torch.Generator().manual_seed(1)
    pooled = torch.rand(60, 3, 2, generator=g) * torch.tensor([1.0, 100.0, 0.01])[None, :, None]
    y = torch.randint(0, 4, (60,), generator=g)
    task = Task(torch.zeros(60, 1), y, torch.randn(60, 4, generator=g), fidelity)
    start = LinearHead(torch.zeros(4, 3, 2), torch.zeros(4), torch.ones(1, 2))
    head = fit_head(pooled, task, start, 400, fidelity)
    spread = pooled.flatten(1).double().std(0)
    w = (head.weight.flatten(1).double() * spread).requires_grad_()
    b = head.bias.double().requires_grad_()
    out = pooled.flatten(1).double() / spread @ w.T + b
    value = objective(out, y, task.teacher.double(), fidelity).mean() + 1e-4 * 2 * w.square().sum()
    for gradient in torch.autograd.grad(value, (w, b)):
        assert float(gradient.abs().max()) < 1e-4  # L-BFGS stops at 1e-10 of change, weights are stored in float32
    other = fit_head(pooled, task, LinearHead(torch.ones(4, 3, 2), torch.ones(4), start.pool), 400, fidelity)
    # convex: one minimum, up to a shift of all logits of an image
    torch.testing.assert_close(other.of_pooled(pooled).softmax(1), head.of_pooled(pooled).softmax(1), rtol=0, atol=0.02)


def test_a_dead_score_weighs_nothing():
    g = torch.Generator().manual_seed(2)
    pooled = torch.rand(40, 2, 1, generator=g)
    pooled[:, 1] = 0.7
    y = (pooled[:, 0, 0] > 0.5).long()
    head = fit_head(
        pooled,
        Task(torch.zeros(40, 1), y, torch.zeros(40, 2)),
        LinearHead(torch.ones(2, 2, 1), torch.zeros(2), torch.ones(1, 1)),
        200,
        0.0,
    )
    assert head.weight[:, 1].tolist() == [[0.0], [0.0]]
    assert float((head.of_pooled(pooled).argmax(1) == y).float().mean()) > 0.95


def test_validation_is_accuracy_and_cross_entropy_of_known_labels(small_run):
    cut, M, head, task = small_run
    state = FactorAdmm(cut, M, head, task, FactorSettings(), 1.0).state()
    some = Task(task.images, torch.where(torch.arange(40) % 4 == 0, -1, task.labels), task.teacher)
    labelled = some.labels >= 0
    logits = state.head.logits(projected(activations_of(cut, task.images), M))[labelled]
    right, value = validation(cut, state, some, 1.0, 1.0)
    assert right == float((logits.argmax(1) == some.labels[labelled]).double().mean())
    assert value == pytest.approx(float(nf.cross_entropy(logits, some.labels[labelled])), rel=1e-5)
    nothing = validation(cut, state, Task(task.images, torch.full((40,), -1), task.teacher), 1.0, 1.0)
    assert nothing[0] == 0
    assert math.isnan(nothing[1])


def test_pooled_scores_are_those_of_each_image(small_run):
    cut, M, head, task = small_run
    cells, means = pooled_scores(cut, task.images, M, 2.0, head)
    S = projected(activations_of(cut, task.images) / 2.0, M)
    torch.testing.assert_close(cells, S @ head.pool)
    torch.testing.assert_close(means, S.mean(2, keepdim=True))


def test_sizes_are_root_mean_squares_of_norms():
    x = torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]], [[0.0, 1.0]]])
    assert per_image(x) == pytest.approx(((25 + 0 + 1) / 3) ** 0.5)


def test_memory_is_counted_and_refused(small_run):
    cut, *_ = small_run
    entries = 5 * 13 * 17  # channels and positions of the layer
    plain = check_memory(100, cut, 2, False, 1.0)
    assert plain == 4 * 100 * (13 * 17 + 3 * entries + 3 * 2 * 13 * 17)
    assert check_memory(100, cut, 2, True, 1.0) == plain + 4 * 100 * 2 * entries
    limit = plain / 2**30
    assert check_memory(100, cut, 2, False, limit) == plain
    with pytest.raises(
        OptionError, match=r"100 images at layer 'relu' \(5 x 221 numbers each\) need .* lower max_images"
    ):
        check_memory(101 - 1, cut, 2, False, (plain - 8) / 2**30)
