"""Maps side by side: known methods and explainers under one noise, and what cannot be drawn says why."""

import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.auditing.map_comparison import compare_maps
from auditor.errors import DataError, OptionError

METHODS = ("Grad-CAM", "LRP-alpha-beta", "deep Taylor", "occlusion", "random")


@pytest.fixture(scope="module")
def compared(trained, digits_data, concepts):
    subject = trained[0]
    image = next(digits_data.batches(subject, 8)).images[3]
    return subject, image, compare_maps(subject, image, {"concepts": concepts}, methods=METHODS)


def test_every_map_is_timed_and_judged_beside_random_ones(compared):
    subject, image, result = compared
    assert [m.name for m in result.maps] == [*METHODS, "concepts"]
    assert [m.kind for m in result.maps] == [""] * 5 + ["nmf"]
    for m in result.maps:
        assert not m.problem
        assert m.heat.shape == image.shape[1:]
        assert m.seconds > 0
        assert m.flip_gain == pytest.approx(result.random_area - m.flip_area)
    with torch.no_grad():
        assert result.target == result.prediction == int(subject.logits(image[None]).argmax())
    occlusion = next(m for m in result.maps if m.name == "occlusion")
    assert occlusion.flip_gain > 0
    again = compare_maps(subject, image, methods=("occlusion",))
    assert again.maps[0].flip_area == occlusion.flip_area  # the noise is the seed's alone


def test_a_method_that_does_not_fit_the_model_says_so_and_the_others_are_drawn():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.SiLU(), nn.Flatten(), nn.Linear(45, 2))
    subject = Subject(net, input_shape=(2, 5, 7))
    maps = compare_maps(subject, torch.rand(2, 5, 7), methods=("deep Taylor", "guided backprop", "gradient")).maps
    assert ["networks of ReLU" in maps[0].problem, "no ReLU" in maps[1].problem, maps[2].problem] == [True, True, ""]
    assert maps[0].to_json() == {
        "name": "deep Taylor", "kind": "", "seconds": None, "flip_area": None, "flip_gain": None,
        "problem": maps[0].problem,
    }  # fmt: skip


def test_a_constant_model_has_empty_maps():
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    nn.init.zeros_(net[1].weight)
    subject = Subject(net, input_shape=(1, 3, 4))
    (m,) = compare_maps(subject, torch.rand(1, 3, 4), methods=("gradient",)).maps
    assert (m.heat, m.problem) == (None, "it gives an empty map for this image and class.")


def test_wrong_names_and_classes(compared, heads):
    subject, image, _ = compared
    with pytest.raises(OptionError, match="no method is called 'Grad-CAN'; did you mean Grad-CAM"):
        compare_maps(subject, image, methods=("Grad-CAN",))
    with pytest.raises(Exception, match="class"):
        compare_maps(subject, image, methods=("gradient",), target="no such class")
    with pytest.raises(DataError, match="not finite"):
        compare_maps(subject, torch.full_like(image, torch.nan), methods=("gradient",))
