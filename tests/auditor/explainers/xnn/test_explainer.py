import math

import pytest
import torch
from torch import nn

from auditor import Subject, fit
from auditor.data.source import open_data
from auditor.errors import DataError, LayerError, NumericsError, OptionError, TamperError
from auditor.explainers.base import Explainer
from auditor.explainers.xnn.head_training import Examples, fit_heads
from auditor.explainers.xnn.head_objective import Problem, SraeConfig, fit_predictor, start_state, train, weights_of
from auditor.explainers.xnn.heads import XHeads
from auditor.explainers.xnn.explainer import XnnConfig, head_layer
from auditor.explainers.xnn.paper_sheet import xnn_sheet
from auditor.explainers.xnn.paper_table import xnn_table


@pytest.fixture(scope="module")
def digits():
    return open_data("sklearn:digits")


@pytest.fixture(scope="module")
def subject(digits):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 24), nn.ReLU(), nn.Linear(24, 10),
    )  # fmt: skip
    it = Subject(net, input_shape=(1, 8, 8))
    batches = list(digits.batches(it, 128))
    adam = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(8):
        for b in batches:
            adam.zero_grad()
            nn.functional.cross_entropy(net(b.images), b.labels).backward()
            adam.step()
    return Subject(net, input_shape=(1, 8, 8))


@pytest.fixture(scope="module")
def images(subject, digits):
    return next(iter(digits.batches(subject, 12))).images


@pytest.fixture(scope="module")
def fitted(subject, digits):
    return fit("xnn", subject, digits, target=3, max_epochs=40)


def test_one_class_is_faithful_and_additive(fitted, subject, images):
    assert fitted.layer_ == head_layer(subject) == "7"
    assert fitted.metrics["f_cls"] >= 0.99
    assert fitted.metrics["alive"] + fitted.metrics["dead"] == 5
    with torch.no_grad():
        logits = subject.logits(images)[:, 3]
    for e, y in zip(fitted.explain(subject, images), logits, strict=True):
        assert abs(e.target_value - float(y)) < 1e-5
        assert e.gap() < 1e-5
        ybar = e.bias + sum(c.contribution for c in e.concepts)
        assert abs(ybar - e.extra["ybar"]) < 1e-5
        assert any(c.heatmap is not None for c in e.concepts)
        for c in e.concepts:
            if c.heatmap is not None:
                assert c.heatmap.shape == (8, 8)
                assert abs(float(c.heatmap.sum()) - 1) < 1e-4
        dark = images[0, 0] == 0
        assert dark.any()


def test_zero_pixels_get_no_heat_because_the_walk_reaches_them(fitted, subject, images):
    maps = fitted.heatmaps(subject, images, 3)
    for i in range(len(images)):
        assert float(maps.maps[i][:, images[i, 0] == 0].sum()) < 1e-6


def test_a_dropout_before_the_logits_is_passed_over():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Dropout(), nn.Linear(12, 10))
    assert head_layer(Subject(net, input_shape=(1, 8, 8))) == "2"


def test_batched_predictor_is_the_sum_of_contributions_on_random_inputs():
    heads = XHeads(3, 6, (8,), 4, generator=torch.Generator().manual_seed(0))
    Z = torch.rand(100, 6)
    E = heads.encode(Z)
    gap = heads.predict(E) - heads.c[:, None] - (heads.v[..., 0][:, None] * E[..., 0]).sum(-1)
    assert float(gap.detach().abs().max()) < 1e-5
    for k in range(3):  # the plain layers that heatmaps walk through are the same encoder
        torch.testing.assert_close(heads.encoder_of(k)(Z), E[k, ..., 0])


def test_all_classes_in_one_pass_equal_a_class_alone(subject, digits):
    heads_of = {}
    for targets in ([2], [2, 7]):
        e = fit("xnn", subject, digits, targets=targets, max_epochs=3)
        heads_of[len(targets)] = e
    assert heads_of[2].classes_ == [2, 7]
    assert heads_of[2].heads_.v.shape == (2, 5, 1)


def test_convolutional_layer(subject, digits, images):
    e = fit("xnn", subject, digits, target=1, layer="4", max_epochs=30)
    assert e.layout_ == "map"
    assert e.metrics["f_cls"] > 0.95
    for x in e.explain(subject, images):
        assert x.gap() < 1e-5
        assert all(c.heatmap is None or c.heatmap.shape == (8, 8) for c in x.concepts)
        assert any(c.heatmap is not None for c in x.concepts)


def test_save_and_load_is_identity(fitted, subject, images, tmp_path):
    fitted.save(tmp_path / "a")
    again = Explainer.load(tmp_path / "a", subject)
    for a, b in zip(fitted.explain(subject, images), again.explain(subject, images), strict=True):
        assert [c.contribution for c in a.concepts] == [c.contribution for c in b.concepts]
        assert a.bias == b.bias


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


def examples_of(Z, y):
    n = len(Z)
    logits = torch.stack([y, torch.zeros(n)], 1)
    return Examples(Z, logits, (y < 0).long(), torch.arange(n) % 5 == 4)


def test_linear_autoencoder_reaches_the_error_of_pca():
    g = torch.Generator().manual_seed(0)
    Z = torch.rand(200, 3, generator=g) @ torch.eye(3).repeat(1, 2) + 0.1 * torch.rand(200, 6, generator=g)
    heads = XHeads(1, 6, (), 3, activation="identity", signed_output=True, generator=g)
    problem = Problem(Z, Z.sum(1)[None], torch.ones(1, 200))
    config = SraeConfig(variant="cae", lr=1e-2, weight_decay=0, batch=200)
    state = start_state(heads, problem, config)
    for epoch, _s in zip(range(1200), train(problem, state, config), strict=False):
        state.adam.param_groups[0]["lr"] = 3e-2 if epoch < 800 else 3e-3
    scaled = Z / heads.scale
    with torch.no_grad():
        got = float((heads.decode(heads.embed(heads.rows(Z)))[0] - scaled).square().mean())
    centred = scaled - scaled.mean(0)  # the decoder has a bias, so PCA may centre too
    s = torch.linalg.svdvals(centred)
    assert abs(got - float(s[3:].square().sum()) / scaled.numel()) < 1e-3


def test_nn_with_identity_finds_a_linear_logit_and_least_squares_agrees():
    g = torch.Generator().manual_seed(0)
    Z = torch.rand(300, 5, generator=g)
    y = Z @ torch.tensor([1.0, -2, 3, 0, 0.5]) - 1
    heads = XHeads(1, 5, (), 4, activation="identity", generator=g)
    problem = Problem(Z, y[None], torch.ones(1, 300))
    config = SraeConfig(variant="nn", lr=1e-2, weight_decay=0)
    state = start_state(heads, problem, config)
    for _, _s in zip(range(300), train(problem, state, config), strict=False):
        pass
    with torch.no_grad():
        assert float((heads.predict(heads.encode(Z))[0] - y).abs().mean()) < 1e-2
        before = float((heads.predict(heads.encode(Z))[0] - y).square().mean())
        fit_predictor(heads, problem)
        assert float((heads.predict(heads.encode(Z))[0] - y).square().mean()) <= before * 1.001 + 1e-9


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


def test_weights_give_positives_and_negatives_the_same_total():
    positive = torch.rand(3, 50, generator=torch.Generator().manual_seed(0)) < 0.2
    w = weights_of(positive)
    torch.testing.assert_close(w.mean(1), torch.ones(3))
    torch.testing.assert_close((w * positive).sum(1), (w * ~positive).sum(1))


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


def test_bad_input_is_one_clear_sentence(subject, digits, fitted, images):
    with pytest.raises(LayerError, match="at or after the logits"):
        fit("xnn", subject, digits, target=3, layer="8")
    with pytest.raises(OptionError, match="has heads for 3, and class '5' was asked for"):
        fitted.explain(subject, images, target=5)
    other = Subject(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), input_shape=(1, 8, 8))
    with pytest.raises(TamperError, match="fit it to this model"):
        fitted.explain(other, images)
    with pytest.raises(OptionError, match="square number"):
        fit("xnn", subject, digits, target=3, cells=3)


def npz(tmp_path, subject, keep):
    import numpy as np
    from sklearn.datasets import load_digits

    d = load_digits()
    rows = np.flatnonzero(keep(d.target))
    file = tmp_path / "some.npz"
    np.savez(file, images=(d.images[rows] * 15.9).astype("uint8")[..., None], labels=d.target[rows])
    return open_data(str(file))


def test_classes_without_positives_or_negatives_and_tiny_sets_are_refused(tmp_path, subject):
    with pytest.raises(DataError, match="class '3' has no positive example"):
        fit("xnn", subject, npz(tmp_path, subject, lambda y: y != 3), target=3)
    with pytest.raises(DataError, match="class '3' has no negative example"):
        fit("xnn", subject, npz(tmp_path, subject, lambda y: y == 3), target=3)
    few = open_data("sklearn:digits", limit=4)
    with pytest.raises(DataError, match="fewer than 5 x-features"):
        fit("xnn", subject, few, target=3)


def test_table_of_the_paper_compares_all_methods_on_one_harvest(subject, digits):
    rows = xnn_table(subject, digits, XnnConfig(targets=[1, 3], max_epochs=15), images_per_class=3)
    by = {r.method: r for r in rows}
    assert list(by) == ["srae", "nn", "sae", "cae", "lasso", "1-heatmap"]
    assert by["srae"].f_cls > 0.97
    assert by["srae"].f_reg < by["lasso"].f_reg
    assert by["srae"].f_reg < by["cae"].f_reg
    assert math.isnan(by["1-heatmap"].f_reg)
    assert all(0 <= r.locality <= math.log(16) + 1e-6 for r in rows)
    with pytest.raises(OptionError, match="unknown method 'shap'"):
        xnn_table(subject, digits, XnnConfig(), methods=["shap"])


def test_table_judged_on_the_held_out_images_as_a_set_of_their_own_is_the_same_table(subject, digits, tmp_path):
    import numpy as np

    from auditor.explainers.xnn.explainer import head_layer, read_examples

    cfg = XnnConfig(targets=[3], max_epochs=3)
    layer = head_layer(subject)
    held = read_examples(subject, digits, layer, subject.layout(layer), cfg).held
    pairs = [(b.images, b.labels) for b in digits.batches(subject)]
    images, labels = torch.cat([x for x, _ in pairs])[held], torch.cat([y for _, y in pairs])[held]
    np.savez(tmp_path / "held.npz", images=images.permute(0, 2, 3, 1).numpy(), labels=labels.numpy())
    unseen = open_data(str(tmp_path / "held.npz"))
    (want,) = xnn_table(subject, digits, cfg, methods=["nn"], images_per_class=2)
    (got,) = xnn_table(subject, digits, cfg, methods=["nn"], images_per_class=2, judged_on=unseen)
    assert want.f_reg > 0
    for name in ("f_reg", "f_cls", "o1", "o2", "locality"):
        assert getattr(got, name) == pytest.approx(getattr(want, name), rel=1e-4, abs=1e-6)
    (other,) = xnn_table(subject, digits, cfg, methods=["nn"], images_per_class=2, judged_on=digits)
    assert other.f_reg != pytest.approx(want.f_reg, rel=1e-3)
    with pytest.raises(DataError, match="none of the asked classes"):
        xnn_table(subject, digits, cfg, methods=["nn"], judged_on=npz(tmp_path, subject, lambda y: y != 3))


def test_contact_sheet_sorts_by_contribution_and_colours_by_sign(fitted, subject, images, tmp_path):
    from PIL import Image

    path = xnn_sheet(subject, fitted, images[:3], tmp_path / "sheet.png", side=64)
    with Image.open(path) as sheet:
        assert sheet.size == (12 + 76 * 7, (64 + 26 + 12) * 3 + 12)
        colours = sheet.convert("RGB").getcolors(1 << 24)
    assert (255, 255, 255) in {c for _, c in colours}
    contributions = [c.contribution for e in fitted.explain(subject, images[:3]) for c in e.concepts]
    assert any(r > 150 and b < 90 and g < 90 for _, (r, g, b) in colours) == any(c > 0 for c in contributions)
    if any(c < -0.01 for c in contributions):
        assert any(b > 150 and r < 90 for _, (r, g, b) in colours)
