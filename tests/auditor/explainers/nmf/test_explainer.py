import numpy as np
import pytest
import torch
from torch import nn

from auditor import Subject, fit, open_data
from auditor.errors import LayerError, OptionError, TamperError
from auditor.explainers.base import Explainer
from auditor.explainers.layer_activations import as_columns
from auditor.explainers.nmf.basis_choice import relative_error
from auditor.explainers.nmf.explainer import NmfExplainer
from auditor.kernels.factorization.projection import project
from auditor.progress import silent


def test_metrics_are_measured_on_held_out_images(concepts):
    m = concepts.metrics
    assert set(m) >= {"relative_error", "f_cls", "f_reg", "sparsity", "basis_stability", "rank", "n_held_out"}
    assert 0 < m["relative_error"] < 0.6
    assert m["f_cls"] > 0.8
    assert 0.3 < m["basis_stability"] < 1  # a different start gives another basis, not the same one again
    assert 0 <= m["sparsity"] < 1
    assert m["n_held_out"] == 60


def test_metrics_equal_a_plain_computation(concepts, digits, digits_data):
    """Everything at once, image by image, without the streaming."""
    x = torch.cat([b.images for b in digits_data.batches(digits)])
    held = x[digits_data.draw(60, 0, torch.arange(len(x)) % 5 == 4)]
    with torch.no_grad():
        logits, outputs = digits.run(held, [concepts.layer_])
        z = outputs[concepts.layer_]
        hat = torch.stack([(concepts.W_ @ project(zi.flatten(1), concepts.W_)).reshape(zi.shape) for zi in z])
        logits_hat = digits.forward_from(concepts.layer_, hat)
    assert concepts.metrics["f_cls"] == pytest.approx(float((logits_hat.argmax(1) == logits.argmax(1)).float().mean()))
    assert concepts.metrics["f_reg"] == pytest.approx(float((logits_hat - logits).abs().mean()), rel=1e-4)
    assert concepts.metrics["relative_error"] == pytest.approx(float((z - hat).norm() / z.norm()), rel=1e-5)


@pytest.mark.parametrize("target", [None, 3, "7"])
def test_contributions_add_up_to_the_models_logit(concepts, digits, images, target):
    with torch.no_grad():
        logits = digits.logits(images)
    for i, e in enumerate(concepts.explain(digits, images, target)):
        assert e.gap() < 1e-6
        assert e.target_value == pytest.approx(float(logits[i, e.target.index]), rel=1e-5)
        assert e.target.index == (int(logits[i].argmax()) if target is None else int(target))
        assert e.extra["integration_error"] <= 0.05 * max(1, abs(e.target_value))
        # the residual is what the basis misses, measured on its own, not what makes the sum right
        z = digits.activations(images[i : i + 1], [concepts.layer_])[concepts.layer_]
        hat = torch.einsum("ck,khw->chw", concepts.W_, torch.stack([c.heatmap for c in e.concepts]))[None]
        with torch.no_grad():
            missed = digits.forward_from(concepts.layer_, z) - digits.forward_from(concepts.layer_, hat)
        assert e.residual == pytest.approx(float(missed[0, e.target.index]), abs=2e-3)


def test_linear_head_is_exact_in_closed_form(tiny, tiny_npz):
    """Pooling and a linear head: the contribution of concept k is mean_p S_kp <w, W_k>, without any integration."""
    data = open_data(tiny_npz)
    e = fit("nmf", tiny, data, layer="relu", rank=3, refits=1)
    x = next(data.batches(tiny, 9)).images
    weight = tiny.module.fc.weight.detach().double()
    for item in e.explain(tiny, x):
        S = torch.stack([c.heatmap for c in item.concepts]).double()
        expected = S.mean((1, 2)) * (weight[item.target.index] @ e.W_.double())
        got = torch.tensor([c.contribution for c in item.concepts], dtype=torch.float64)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
        assert item.bias == pytest.approx(tiny.module.fc.bias[item.target.index].item(), abs=1e-6)
        assert item.extra["integration_error"] < 1e-5


def test_a_batch_equals_its_images_one_by_one(concepts, digits, images):
    whole = concepts.explain(digits, images)
    values = [[c.contribution for c in e.concepts] for e in whole]
    assert values[0] != values[1]
    for i in range(len(images)):
        (one,) = concepts.explain(digits, images[i : i + 1])
        np.testing.assert_allclose([c.contribution for c in one.concepts], values[i], rtol=1e-3, atol=1e-3)


def test_save_and_load_is_identity_and_bytes_repeat(concepts, digits, digits_data, images, tmp_path):
    digest = concepts.save(tmp_path / "a")
    loaded = Explainer.load(tmp_path / "a", digits)
    assert loaded.save(tmp_path / "b") == digest
    again = fit("nmf", digits, digits_data, rank=6, seed=0, refits=1, max_eval=60)
    assert again.save(tmp_path / "c") == digest
    for name in ("manifest.json", "tensors.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()
    a, b = concepts.explain(digits, images)[0], loaded.explain(digits, images)[0]
    assert {**a.to_json(), "name": ""} == {**b.to_json(), "name": ""}
    assert fit("nmf", digits, digits_data, rank=6, seed=1, init="random", refits=1).save(tmp_path / "d") != digest


def test_signed_layer_is_factorized_by_semi_nmf_not_clipped(tiny, tiny_npz):
    data = open_data(tiny_npz)
    e = fit("nmf", tiny, data, layer="conv", rank=4, refits=1)
    assert e.signed_
    assert float(e.W_.min()) < 0
    assert e.metrics["relative_error"] < 0.5
    x = next(data.batches(tiny, 5)).images
    assert all(item.gap() < 1e-6 for item in e.explain(tiny, x))
    assert all(float(c.heatmap.min()) >= 0 for item in e.explain(tiny, x) for c in item.concepts)


def test_rank_is_chosen_by_held_out_error(tmp_path):
    """Activations that are exactly a mix of 3 patterns need 3 concepts."""

    class Mix(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.mix = nn.Conv2d(3, 12, 1, bias=False)
            nn.init.uniform_(self.mix.weight)
            self.fc = nn.Linear(12, 2)

        def forward(self, x):
            return self.fc(self.mix(x).mean((2, 3)))

    subject = Subject(Mix(), input_shape=(3, 5, 5))
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "x.npz", images=(rng.random((60, 5, 5, 3)) * (rng.random((60, 5, 5, 3)) > 0.5)).astype("float32")
    )
    e = fit("nmf", subject, open_data(tmp_path / "x.npz"), layer="mix", rank="auto", refits=1)
    assert e.metrics["rank"] == 3
    assert e.metrics["relative_error"] < 0.05


def test_one_thing_that_needs_many_directions_is_not_split_into_as_many():
    """A plate lights up eight channels in ever another mix; two other things one channel each."""
    rng = torch.Generator().manual_seed(0)
    X = torch.zeros(10, 900)
    fires = torch.rand(3, 900, generator=rng) < 0.2
    X[:8] = fires[0] * (0.3 + torch.rand(8, 900, generator=rng))
    X[8:] = fires[1:] * torch.rand(2, 900, generator=rng)
    e = NmfExplainer(rank="auto", seed=0)
    e.signed_, e.layer_ = False, "plate"
    rank = e._choose_rank(X[:, :600], X[:, 600:], silent)
    assert 2 <= rank <= 4
    errors = [relative_error(X[:, 600:], e._factorize(X[:, :600], r, 0, "nndsvda", silent).W) for r in (4, 6)]
    assert errors[0] - errors[1] > 0.03  # by the error alone it would go on


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"rank": 999}, OptionError, "rank must be at most 5"),
        ({"rank": 0}, OptionError, "rank must be at least 1"),
        ({"rank": "many"}, OptionError, "option 'rank"),
        (
            {"nosuch": 1},
            OptionError,
            "unknown option 'nosuch'; the options are bases, batch_size, borrow, class_images",
        ),
        ({"layer": "nosuch"}, LayerError, "no layer 'nosuch'"),
        ({"target": 9}, OptionError, "class index must be 0 to 2, got 9"),
        ({"seed": -1}, OptionError, "option 'seed'"),
    ],
)
def test_bad_options_are_said(tiny, tiny_npz, options, error, sentence):
    with pytest.raises(error, match=sentence):
        fit("nmf", tiny, open_data(tiny_npz), **options)


def test_an_explainer_does_not_explain_another_model(concepts, tiny, digits):
    with pytest.raises(TamperError, match="was made for a model with other weights"):
        concepts.explain(tiny, torch.rand(1, 1, 13, 17))


def test_one_image_is_enough_and_a_constant_model_explains_nothing(tiny, tiny_npz):
    e = fit("nmf", tiny, open_data(tiny_npz, limit=1), rank=2, refits=1)
    assert e.metrics["n_held_out"] == 1
    with torch.no_grad():
        tiny.module.fc.weight.zero_()
    constant = Subject(tiny.module, input_shape=(1, 13, 17))
    data = open_data(tiny_npz)
    (item,) = fit("nmf", constant, data, layer="relu", rank=2, refits=1).explain(
        constant, next(data.batches(constant, 1)).images
    )
    assert all(abs(c.contribution) < 1e-6 for c in item.concepts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions(tiny, tiny_npz, dtype):
    subject = Subject(tiny.module.to(dtype), input_shape=(1, 13, 17))
    data = open_data(tiny_npz)
    e = fit("nmf", subject, data, rank=3, refits=1)
    x = next(data.batches(subject, 3)).images
    assert all(item.gap() < 1e-6 for item in e.explain(subject, x))
    assert e.metrics["f_reg"] < 0.1


def test_an_inplace_relu_after_the_layer_clips_nothing(tmp_path):
    """The layer's own signed output is explained, and neither it nor the caller's tensor is overwritten."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(1, 5, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3)
        )
    subject = Subject(net, input_shape=(1, 13, 17))
    x = torch.rand(6, 1, 13, 17)
    with torch.no_grad():
        logits, outputs = subject.run(x, ["0"])
        torch.testing.assert_close(outputs["0"], net[0](x))
        before = outputs["0"].clone()
        torch.testing.assert_close(subject.forward_from("0", outputs["0"]), logits)
    assert float(before.min()) < 0
    assert torch.equal(outputs["0"], before)
    np.savez(tmp_path / "x.npz", images=np.random.default_rng(0).random((30, 13, 17), dtype=np.float32))
    e = fit("nmf", subject, open_data(tmp_path / "x.npz"), layer="0", rank=3, refits=1)
    assert e.signed_
    assert all(item.gap() < 1e-6 for item in e.explain(subject, x))


@pytest.mark.parametrize("layer", ["relu", "conv"])
def test_epochs_see_positions_that_memory_did_not_hold(tiny, tiny_npz, layer):
    """A basis from few positions, refined by passes over all of them, fits all of them better."""
    data = open_data(tiny_npz)
    few, refined = (
        fit("nmf", tiny, data, layer=layer, rank=3, refits=1, max_positions=16, epochs=epochs) for epochs in (0, 4)
    )
    layout = few.reading(tiny)
    x = torch.cat([b.images for b in data.batches(tiny)])
    fitted = torch.arange(len(x)) % 5 != 4
    z = tiny.activations(x[fitted], [layer])[layer]
    X = as_columns(layout, z)
    errors = [float((X - e.W_ @ project(X, e.W_)).norm() / X.norm()) for e in (few, refined)]
    assert refined.metrics["fit_positions"] == X.shape[1] > 16
    assert 1 <= refined.metrics["fit_epochs"] <= 4
    assert errors[1] < errors[0]
    assert refined.metrics["fit_relative_error"] == pytest.approx(errors[1], rel=1e-3)
    assert refined.signed_ == (layer == "conv")
    assert "fit_epochs" not in few.metrics
