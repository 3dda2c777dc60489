"""Kind deepfacto: the updates against closed forms and scipy, the fit on digits, the identity, the artifact."""

import numpy as np
import pytest
import torch
from scipy.optimize import nnls

from auditor import fit, open_data
from auditor.metrics.attribute_probe import (
    labels_as_attributes,
    pooled_features,
    principal_scores,
    probe_accuracy,
    read_attributes,
)
from auditor.network.below_layer import Cut
from auditor.explainers.deepfacto.explainer import chosen_side
from auditor.explainers.deepfacto.factor_admm import FactorAdmm, Settings, Task, activations_of, per_image, reseeded, train
from auditor.errors import DataError, LayerError, OptionError
from auditor.explainers.base import Explainer
from auditor.kernels.factorization.deepfacto import LinearHead, basis_step, decoupled, projected, score_step
from auditor.kernels.factorization.nmf import factorize
from auditor.subject.layers import layout_of


@pytest.fixture(scope="session")
def factors(trained, digits_data):
    """A small deepfacto explainer fitted to the digits subject."""
    return fit("deepfacto", trained[0], digits_data, rank=8, epochs=4, refits=0, seed=0)


def test_z_lies_between_its_terms():
    """Known answer: beta = 1, gamma = 3, f - U = 2, M S - V = 6."""
    assert float(decoupled((1.0, torch.tensor(2.0)), (3.0, torch.tensor(6.0)))) == 5.0


def test_separable_nmf_is_exact_and_test_time_scores_find_it_again():
    """Z = M0 S0 with an identity inside M0: the factorization is unique up to order and scale."""
    g = torch.Generator().manual_seed(0)
    M0 = torch.cat([torch.eye(4), torch.rand(9, 4, generator=g)]).double()
    S0 = torch.rand(4, 300, generator=g, dtype=torch.float64) * (torch.rand(4, 300, generator=g) < 0.4)
    S0[:, :4] = torch.eye(4, dtype=torch.float64)  # every factor is seen alone once
    found = factorize(M0 @ S0, 4, max_iter=4000, tol=1e-13)
    assert found.relative_error < 1e-6
    M = found.W
    S = projected((M0 @ S0)[None], M)[0]
    match = (M.T @ (M0 / M0.norm(dim=0))).argmax(0)
    assert sorted(match.tolist()) == [0, 1, 2, 3]
    torch.testing.assert_close(S[match], S0 * M0.norm(dim=0)[:, None], rtol=0, atol=1e-3)


def test_scores_of_an_image_are_nnls_column_by_column(factors, digits, images):
    cut = Cut(digits, factors.layer_, factors.weights_)
    with torch.no_grad():
        f = cut(images[:2])
    S = factors.scores(f)
    M = factors.M_.double().numpy()
    for i in range(2):
        for p in range(f.shape[2]):
            want = nnls(M, f[i, :, p].double().numpy() / factors.scale_)[0]
            np.testing.assert_allclose(S[i, :, p], want, atol=1e-5 * max(1.0, want.max()))
    # the explanation's heatmaps are these scores
    maps = torch.stack([c.heatmap for c in factors.explain(digits, images[:1])[0].concepts]).flatten(1)
    torch.testing.assert_close(maps, S[0])


def test_a_score_step_reaches_the_minimiser_with_its_linear_term():
    g = torch.Generator().manual_seed(1)
    M, X = torch.rand(13, 3, generator=g), torch.rand(2, 13, 5, generator=g)
    asked = 0.3 * torch.randn(2, 3, 5, generator=g)
    S = score_step(projected(X, M), X, M, asked, n_sweeps=400)
    slope = M.T @ (M @ S - X) - asked
    assert float(S.min()) >= 0
    assert float(torch.minimum(S, slope).abs().max()) < 1e-4  # the optimality of a non-negative least squares
    near = score_step(projected(X, M), X, M, 1e-6 * asked, n_sweeps=400)
    torch.testing.assert_close(near, projected(X, M), rtol=0, atol=1e-4)


def test_a_small_request_is_the_derivative_through_the_projection():
    """Known answer by differences: J at the head on argmin_{S >= 0} |f - M S|, in some direction of f."""
    g = torch.Generator().manual_seed(7)
    M, f = torch.rand(13, 3, generator=g).double(), torch.rand(4, 13, 6, generator=g).double()
    pool = torch.rand(6, 2, generator=g).double()
    head = LinearHead(torch.randn(5, 3, 2, generator=g).double(), torch.zeros(5).double(), pool)
    y, d = torch.tensor([0, 3, 1, 4]), torch.randn(4, 13, 6, generator=g).double()

    def J(f):
        return float(torch.nn.functional.cross_entropy(head.logits(projected(f, M)), y, reduction="sum"))

    S = projected(f, M)
    assert 0.1 < float((S == 0).double().mean()) < 0.9  # some scores are at their bound, where the slope is none
    e = torch.nn.functional.one_hot(y, 5) - head.logits(S).softmax(1)
    asked = 1e-5 * head.pulled_back(e)
    moved = M @ (score_step(S, f, M, asked, n_sweeps=2000) - S) / 1e-5
    slope = (J(f + 1e-5 * d) - J(f - 1e-5 * d)) / 2e-5
    assert float((moved * d).sum()) == pytest.approx(-slope, rel=1e-2)


def test_a_basis_step_lowers_the_error_and_keeps_columns_short():
    g = torch.Generator().manual_seed(2)
    X, S = torch.rand(13, 40, generator=g), torch.rand(3, 40, generator=g)
    M = torch.rand(13, 3, generator=g) / 13
    new = basis_step(M, X @ S.T, S @ S.T, 3)
    assert float((X - new @ S).norm()) < float((X - M @ S).norm())
    assert float(new.norm(dim=0).max()) <= 1 + 1e-6
    assert float(new.min()) >= 0


def test_the_head_is_linear_and_its_parts_are_exact():
    g = torch.Generator().manual_seed(3)
    pool = torch.rand(6, 2, generator=g).double()
    head = LinearHead(torch.randn(4, 3, 2, generator=g).double(), torch.randn(4, generator=g).double(), pool)
    S = torch.rand(5, 3, 6, generator=g).double()
    targets = torch.tensor([0, 1, 2, 3, 0])
    whole = head.bias[targets] + head.parts(S, targets).sum(1)
    torch.testing.assert_close(whole, head.logits(S).gather(1, targets[:, None])[:, 0])
    without = S.clone()
    without[:, 1] = 0  # taking a factor away takes its part away, nothing else
    torch.testing.assert_close((head.logits(S) - head.logits(without))[range(5), targets], head.parts(S, targets)[:, 1])
    e = torch.randn(5, 4, generator=g).double()
    torch.testing.assert_close((head.pulled_back(e) * S).sum(), (e * (head.logits(S) - head.bias)).sum())


def test_fine_tuning_keeps_the_accuracy_and_lowers_the_error(factors):
    m = factors.metrics
    assert m["accuracy"] > 0.93  # rank 8 and four passes only
    assert m["accuracy"] > m["accuracy_warm"] - 0.015  # the pass was chosen on other images than these 359
    assert m["accuracy"] > m["accuracy_before"] - 0.03
    assert m["relative_error"] < m["relative_error_warm"] < 0.5
    assert m["probe_deepfacto"] > m["probe_majority"] + 0.5
    assert m["export_error"] < 1e-3
    assert set(m) >= {"accuracy_before", "f_cls", "f_reg", "sparsity", "probe_nmf", "probe_pca", "reseeded"}


@pytest.mark.parametrize("target", [None, "7"])
def test_contributions_add_up_to_the_models_own_logit(factors, digits, images, target):
    with torch.no_grad():
        logits, own = digits.logits(images), factors.logits(digits, images)
    for i, e in enumerate(factors.explain(digits, images, target)):
        assert e.gap() < 1e-9
        assert e.target_value == pytest.approx(float(logits[i, e.target.index]), rel=1e-5)
        # the residual is the difference between the two networks, measured on its own
        assert e.residual == pytest.approx(float(logits[i, e.target.index] - own[i, e.target.index]), abs=1e-3)


def test_the_model_is_as_it_was(factors, digits, images):
    before = digits.logits(images)
    factors.explain(digits, images)
    with factors.network(digits) as other:
        assert not torch.equal(other.logits(images), before)
    torch.testing.assert_close(digits.logits(images), before, rtol=0, atol=0)
    assert not any(m._forward_hooks for m in digits.module.modules())


def test_save_and_load_is_identity(factors, digits, images, tmp_path):
    digest = factors.save(tmp_path / "a")
    loaded = Explainer.load(tmp_path / "a", digits)
    assert loaded.save(tmp_path / "b") == digest
    a, b = factors.explain(digits, images)[0], loaded.explain(digits, images)[0]
    assert {**a.to_json(), "name": ""} == {**b.to_json(), "name": ""}


def test_bad_input_is_one_sentence(digits, digits_data, tiny, tiny_npz, tmp_path):
    with pytest.raises(LayerError, match=r"layer 'conv' gives negative values.*such as 'relu'"):
        fit("deepfacto", tiny, open_data(tiny_npz), layer="conv")
    with pytest.raises(OptionError, match="at most the 5 channels of layer 'relu', got 6"):
        fit("deepfacto", tiny, open_data(tiny_npz), layer="relu", rank=6)
    with pytest.raises(OptionError, match=r"need \d+\.\d MiB and 1\.0 MiB are free"):
        fit("deepfacto", digits, digits_data, memory_limit=1e-3)
    np.savez(tmp_path / "one.npz", images=np.zeros((12, 13, 17), np.uint8), labels=np.ones(12, int))
    with pytest.raises(DataError, match="every image is labelled 'b'"):
        fit("deepfacto", tiny, open_data(tmp_path / "one.npz"), layer="relu")


def test_an_exported_model_is_factorized_and_its_network_registered(cli, trained, images):
    """From pt2 only the graph is known; the new version answers as the explainer does and names its source."""
    import json

    from auditor.plugins import load, load_subject, log_subject
    from auditor.plugins.registry.location import resolve

    uri = log_subject(trained[0], "to_factorize", experiment="tests")
    options = [f"--set={text}" for text in ("rank=3", "epochs=1", "refits=0")]
    line = cli.fails("fit", "nmf", uri, "--data", "sklearn:digits", "--register")
    assert "kind nmf makes no network of its own" in line
    answer = cli.json(
        "fit", "deepfacto", uri, "--data", "sklearn:digits", "--limit", "200", "--register", "--name", "f", *options
    )
    assert answer["registered"] == "models:/to_factorize/2"
    source = load_subject(uri)
    explainer = load(uri, "f", subject=source)
    made = load_subject(answer["registered"])
    with torch.no_grad():
        exact, unrolled = explainer.logits(source, images), made.logits(images)
    torch.testing.assert_close(unrolled, exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))
    assert made.class_names == source.class_names
    lineage = json.loads(resolve(answer["registered"]).tags["auditor.lineage"])
    assert lineage["source"] == uri
    assert lineage["source_digest"] == source.digest
    assert lineage["explainer_digest"] == answer["digest"]
    assert source.digest != made.digest


def test_layers_are_found_with_gradients_off(trained):
    from auditor import Subject

    with torch.no_grad():
        fresh = Subject(trained[0].module, input_shape=(1, 8, 8))
        assert fresh.layout("features").channels == 64


@pytest.fixture
def small_run(tiny, tiny_npz):
    """A cut of the tiny network at its ReLU with a start for the training: (cut, M, head, task)."""
    batch = next(open_data(tiny_npz).batches(tiny, 40))
    cut = Cut(tiny, "relu")
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
    own = tiny.module.conv.weight.clone()
    done = train(cut, M, head, task, Settings(epochs=2, batch=16, dual_step=0.1), 1.0, lambda _: None)
    assert done.status == "finished"
    assert set(before) == {"conv.weight", "conv.bias"}  # what the layer depends on, not the classifier above it
    assert not torch.equal(cut.weights["conv.weight"], before["conv.weight"])
    assert torch.equal(tiny.module.conv.weight, own)
    assert len(done.history) == 2
    assert float(done.state.M.min()) >= 0


def test_a_training_that_only_harms_ends_with_the_start(small_run):
    cut, M, head, task = small_run
    before = {k: w.clone() for k, w in cut.weights.items()}
    done = train(cut, M, head, task, Settings(epochs=3, batch=16, lr=30.0), 1.0, lambda _: None)
    kept = done.valid[done.state.epoch]
    start = done.valid[0][0]
    enough = start - (start * (1 - start) / 5) ** 0.5  # five of the forty images validate
    assert kept[0] >= enough
    assert kept[1] == min(v for right, v in done.valid if right >= enough)
    if done.state.epoch == 0:
        assert all(torch.equal(w, before[k]) for k, w in cut.weights.items())


def test_an_image_told_wrong_asks_for_more_than_one_told_right(small_run):
    cut, M, head, task = small_run
    run = FactorAdmm(cut, M, head, task, Settings(trust=0.2), 1.0)
    rows = torch.arange(len(task.images))
    S = projected(run.Z0, M)
    h = torch.zeros(len(rows), 3)
    h[0, task.labels[0]] = 20.0  # sure and right; all others know nothing
    asked = run._asked(S, h, rows)
    assert per_image(asked) == pytest.approx(0.2 * per_image(M.T @ run.Z0), rel=1e-5)
    sizes = asked.flatten(1).norm(dim=1)
    assert float(sizes[0]) < 1e-3 * float(sizes[1:].min())


def test_the_head_reads_places_only_where_places_tell():
    g = torch.Generator().manual_seed(6)
    layout, n = layout_of((2, 4, 4), (8, 8)), 200
    y = torch.arange(n) % 2
    noise = 0.1 * torch.rand(n, 2, 16, generator=g)
    task = Task(torch.zeros(n, 1), y, torch.zeros(n, 2))
    amount, place = noise.clone(), noise.clone()
    amount[y == 1, 0] += 1
    place[y == 0, 0, :8] += 1
    place[y == 1, 0, 8:] += 1
    assert chosen_side(amount, task, layout) == 1
    assert chosen_side(place, task, layout) == 2


def test_numbers_that_break_end_the_training_with_the_last_good_state(small_run, monkeypatch):
    cut, M, head, task = small_run
    whole, calls = FactorAdmm._visit, []

    def breaks(self, rows, adam):
        calls.append(1)
        sums = whole(self, rows, adam)
        return sums * float("nan") if len(calls) > 3 else sums  # three batches are one pass

    monkeypatch.setattr(FactorAdmm, "_visit", breaks)
    states = []
    done = train(cut, M, head, task, Settings(epochs=5, batch=16), 1.0, states.append)
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


def test_attributes_per_class_and_per_image(tmp_path):
    ids, labels = ["a/1.png", "b/2.png", "a/3.png"], torch.tensor([0, 1, 0])
    (tmp_path / "c.csv").write_text("class,wing,beak\nred,80,10\nblue,20,60\n")
    found = read_attributes(tmp_path / "c.csv", ids, labels, ["red", "blue"], 50.0)
    assert found.names == ("wing", "beak")
    assert found.values.tolist() == [[1, 0], [0, 1], [1, 0]]
    (tmp_path / "i.csv").write_text("image,loop\n1.png,1\n2.png,0\n3.png,0\n")
    assert read_attributes(tmp_path / "i.csv", ids, labels, ["red", "blue"], 0.5).values.tolist() == [[1], [0], [0]]
    (tmp_path / "x.csv").write_text("image,loop\nelse.png,1\n")
    with pytest.raises(DataError, match="names neither the images"):
        read_attributes(tmp_path / "x.csv", ids, labels, ["red", "blue"], 0.5)
    with pytest.raises(DataError, match="want a CSV file"):
        read_attributes(tmp_path / "none.csv", ids, labels, ["red", "blue"], 0.5)


def test_the_probe_reads_what_is_linear_and_nothing_else():
    g = torch.Generator().manual_seed(5)
    y = torch.arange(60) % 3
    scores = torch.nn.functional.one_hot(y, 3).float()[:, :, None].repeat(1, 1, 4)
    held = torch.arange(60) % 5 == 4
    labels = labels_as_attributes(y)
    assert probe_accuracy(pooled_features(scores), held, labels) == 1.0
    noise = torch.rand(60, 3, 4, generator=g)
    assert probe_accuracy(pooled_features(noise), held, labels) < 0.8
    turned = principal_scores(scores, held, 2)
    assert probe_accuracy(pooled_features(turned), held, labels) == 1.0
