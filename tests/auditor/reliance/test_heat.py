"""Heat: gradients of the margin against a closed form, the block of a linear model, an explainer's weighted maps."""

import torch
from torch import nn

from auditor import Subject
from auditor.explainers.explanation import ClassScore, Concept, Explanation
from auditor.reliance.fills import blurred
from auditor.reliance.heat import (
    Heat,
    explainer_heat,
    explanation_heat,
    margin_gradients,
    margins,
    overlap_of_sources,
    plain_heat,
    pooled,
)
from tests.auditor.reliance.planted import BLOCK, SIZE, ReadsBlock, images, subject


def explanation(concepts, extra=None):
    score = ClassScore(0, "a", 1.0, 1.0)
    return Explanation("any", score, score, 1.0, tuple(concepts), extra=extra or {})


def test_margins_are_the_target_less_the_best_other_and_the_logit_where_it_is_alone():
    logits = torch.tensor([[1.0, 4.0, 2.5], [0.5, -1.0, -2.0]])
    assert margins(logits, torch.tensor([1, 1])).tolist() == [1.5, -1.5]
    assert margins(torch.tensor([[2.0], [-3.0]]), torch.tensor([0, 0])).tolist() == [2.0, -3.0]


def test_gradients_of_a_linear_model_are_weight_times_difference_from_the_blurred_image():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 24 * 32, 2, bias=False))
    linear = Subject(net, input_shape=(3, *SIZE))
    x = torch.rand(2, 3, *SIZE)
    weight = (net[1].weight[1] - net[1].weight[0]).detach().view(3, *SIZE)
    added = ((x - blurred(x)) * weight).sum(1).clamp_min(0)
    want = torch.nn.functional.avg_pool2d(added[:, None], 3, stride=1, padding=1)[:, 0]
    assert torch.allclose(margin_gradients(linear, x, torch.tensor([1, 1])), want, atol=1e-6)


def test_the_plain_heat_lies_on_the_block_that_is_read():
    x, y = images(8)
    heat = plain_heat(subject(ReadsBlock()), x[y == 1], y[y == 1], batch_size=3)
    inside = heat.maps[:, BLOCK[0], BLOCK[1]].sum((1, 2)) / heat.maps.sum((1, 2))
    assert float(inside.min()) > 0.6
    assert heat.maps.shape == (4, *SIZE)
    assert heat.source == "Grad-CAM and gradients"
    assert heat.passes == 12


def test_without_a_layer_that_has_positions_the_gradients_stand_alone():
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 24 * 32, 2))
    heat = plain_heat(Subject(net, input_shape=(3, *SIZE)), torch.rand(2, 3, *SIZE), torch.tensor([0, 1]))
    assert heat.source == "gradients"
    assert heat.passes == 9


def test_concept_maps_count_by_their_positive_contribution_and_not_by_their_own_scale():
    left, right = torch.zeros(4, 6), torch.zeros(4, 6)
    left[:, :3], right[:, 3:] = 100.0, 0.01
    heat = explanation_heat(explanation([Concept(0, "l", 5, 1.0, left), Concept(1, "r", 5, 3.0, right)]), (8, 12))
    assert abs(float(heat.sum()) - 4.0) < 0.1
    assert abs(float(heat[:, 8:].sum() / heat[:, :4].sum()) - 3.0) < 0.05
    against = [Concept(0, "l", 5, -1.0, left), Concept(1, "none", 5, 2.0, None), Concept(2, "cold", 5, 2.0, 0 * left)]
    assert float(explanation_heat(explanation(against), (8, 12)).abs().sum()) == 0


def test_a_kind_without_contributions_is_weighed_by_activation_or_by_its_relevance():
    left = torch.zeros(4, 6)
    left[:, :3] = 1
    heat = explanation_heat(explanation([Concept(0, "l", 2.0, None, left)]), (4, 6))
    assert abs(float(heat.sum()) - 2.0) < 1e-5
    relevance = explanation([], {"relevance": [[1.0, -5.0], [0.0, 2.0]]})
    assert explanation_heat(relevance, (2, 2)).tolist() == [[1.0, 0.0], [0.0, 2.0]]


def test_an_attached_explainer_gives_heat_of_the_images_size(concepts, digits, images):
    x = digits.pixels(images)[:5]
    heat = explainer_heat(concepts, digits, x, torch.tensor([3, 3, 1, 0, 7]), batch_size=2)
    assert heat.maps.shape == (5, *x.shape[2:])
    assert bool((heat.maps >= 0).all())
    assert float(heat.maps.sum()) > 0
    again = explainer_heat(concepts, digits, x[2:3], torch.tensor([1]))
    assert torch.allclose(again.maps[0], heat.maps[2], atol=1e-4)


def test_overlap_is_one_for_the_same_map_and_zero_for_the_opposite():
    maps = torch.arange(200.0).view(1, 10, 20)
    assert float(overlap_of_sources(maps, maps * 3 + 1)) == 1
    assert float(overlap_of_sources(maps, -maps)) == 0


def test_pooled_heat_gives_every_source_the_same_mass():
    a, b = torch.zeros(1, 2, 2), torch.zeros(1, 2, 2)
    a[0, 0, 0], b[0, 1, 1] = 50.0, 0.1
    heat = pooled([Heat(a, "x", 2.0), Heat(b, "y", 3.0)])
    assert heat.maps[0].tolist() == [[0.5, 0.0], [0.0, 0.5]]
    assert (heat.source, heat.passes) == ("x and y", 5.0)
