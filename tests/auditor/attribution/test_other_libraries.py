"""Maps by LIME, SHAP, Captum and zennit: their own word where they are installed, one sentence where they are not."""

import sys

import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.attribution.baselines import attribution
from auditor.attribution.other_libraries import Logits, lime, shap_partition
from auditor.errors import DataError, OptionError


class Corner(nn.Module):
    """The logit of class 1 is the power of the upper left quarter."""

    def forward(self, x):
        bright = x[:, :, :6, :7].square().mean((1, 2, 3))
        return torch.stack([torch.zeros_like(bright), 9 * bright], 1)


@pytest.fixture
def corner():
    x = torch.rand(1, 3, 13, 17, generator=torch.Generator().manual_seed(0)) * 0.4
    x[:, :, :6, :7] *= 2.5
    return Subject(Corner(), input_shape=(3, 13, 17)), x


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [("LIME", "lime.lime_image", "lime"), ("SHAP", "shap", "shap"), ("captum:DeepLift", "captum.attr", "captum"),
     ("zennit:EpsilonPlus", "zennit.composites", "zennit")],
)  # fmt: skip
def test_what_is_not_installed_is_named_with_the_extra(monkeypatch, corner, name, module, package):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not there
    with pytest.raises(OptionError, match=rf"maps: {name} needs the package {package}; pip install .mlflow-auditor"):
        attribution(name)(*corner, torch.tensor([1]))


@pytest.mark.parametrize(
    ("name", "library"), [("captum:Nonsense", "Captum has no method"), ("zennit:Nonsense", "zennit has no composite")]
)
def test_a_name_that_the_library_does_not_have(name, library):
    pytest.importorskip(name.partition(":")[0])
    with pytest.raises(OptionError, match=library):
        attribution(name)


def test_lime_finds_the_only_place_that_counts(corner):
    pytest.importorskip("lime")
    heat = lime(*corner, torch.tensor([1]), n_samples=300)[0, 0]
    assert heat[:6, :7].mean() > 3 * heat[6:].abs().mean()
    assert torch.equal(lime(*corner, torch.tensor([1]), n_samples=50), lime(*corner, torch.tensor([1]), n_samples=50))
    with pytest.raises(DataError, match="images of 1 or 3 channels, got 2"):
        lime(corner[0], torch.rand(1, 2, 13, 17), torch.tensor([1]))


@pytest.mark.slow  # shap compiles for seconds when it is imported
def test_shap_adds_up_to_the_difference_from_grey(corner):
    pytest.importorskip("shap")
    subject, x = corner
    values = shap_partition(subject, x, torch.tensor([1]), n_evaluations=100)
    grey = x.mean((2, 3), keepdim=True).expand_as(x)
    difference = (subject.logits(x) - subject.logits(grey))[0, 1]
    assert float(values.sum()) == pytest.approx(float(difference), rel=1e-4)
    inside = float(values[0, :, :6, :7].abs().mean())
    assert inside > 4 * float(values[0, :, 6:].abs().mean())


def test_zennit_adds_up_on_a_network_without_biases():
    pytest.importorskip("zennit")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(60, 2, bias=False))
    subject = Subject(net, input_shape=(2, 5, 7))
    x = torch.rand(2, 2, 5, 7)
    total = attribution("zennit:EpsilonPlus")(subject, x, torch.tensor([0, 1])).flatten(1).sum(1)
    torch.testing.assert_close(total, subject.logits(x).detach()[[0, 1], [0, 1]], rtol=1e-3, atol=1e-4)


def test_logits_as_a_module(corner):
    torch.testing.assert_close(Logits(corner[0])(corner[1]), corner[0].logits(corner[1]))
