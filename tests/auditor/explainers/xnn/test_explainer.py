import numpy as np
import pytest
import torch
from torch import nn

from auditor import Subject, fit
from auditor.errors import LayerError, NumericsError, OptionError, TamperError
from auditor.explainers.base import Explainer
from auditor.explainers.xnn.explainer import head_layer


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


class Spectrum(nn.Module):
    def forward(self, z):
        return torch.fft.fft2(z).real.relu()


class Constant(nn.Module):
    def forward(self, z):
        return z * 0 + 1


def behind(middle):
    """Return a subject whose network has ``middle`` between its convolution and its head."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), middle, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
    return Subject(net.eval(), input_shape=(1, 8, 8), class_names=["cat", "owl", "yak"])


def photos(classes, n=30):
    x = np.random.default_rng(0).integers(0, 255, (n, 8, 8), dtype=np.uint8)
    return x, np.arange(n) % classes


def test_a_layer_of_constant_activations_is_refused():
    with pytest.raises(NumericsError, match="layer '2': its activations are constant"):
        fit("xnn", behind(Constant()), photos(3), layer="2", max_epochs=2)


def test_classes_without_images_are_named_and_an_operation_without_a_rule_is_too(caplog):
    heads = fit("xnn", behind(Spectrum()), photos(2), max_epochs=2)
    assert "no head for yak: no image of the data is of this class" in caplog.text
    (remark,) = [text for text in heads.remarks() if "heatmap" in text]
    assert "no rule for aten.fft_fft2.default (in layer '2')" in remark
    assert "nmf" in remark


def test_photos_of_which_the_model_is_unsure_are_said():
    net = behind(nn.Identity()).module
    with torch.no_grad():
        net[5].weight.mul_(1e-3)
        net[5].bias.zero_()
    unsure = Subject(net, input_shape=(1, 8, 8))
    heads = fit("xnn", unsure, photos(3), max_epochs=2)
    assert any("the model is unsure of 100% of these images" in remark for remark in heads.remarks())
