"""Stability of a model: closed forms of linear and quadratic networks, laws, and the budget of images."""

import math

import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.errors import ModelError
from auditor.network.aten_graph import graph_of
from auditor.network.weight_layers import weight_layers
from auditor.stability import model
from auditor.stability.model import (
    NAMES,
    input_node,
    input_of,
    last_hidden,
    measured,
    model_stability,
    multiplications,
)


def linear(std=1.0) -> Subject:
    """A hidden layer without activation: its Jacobian is the weight itself, divided by std."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.Linear(4, 2)).double()
    return Subject(net, input_shape=(1, 2, 3), std=std)


def test_diagonal_network_known_answer():
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 6, bias=False), nn.Linear(6, 2)).double()
    with torch.no_grad():
        net[1].weight.copy_(torch.diag(torch.tensor([3.0, 1, 1, 1, 1, 1])))
    subject = Subject(net, input_shape=(1, 2, 3))
    x = torch.rand(3, 1, 2, 3, generator=torch.Generator().manual_seed(0))
    constants = measured(subject, "2", x)
    assert float(constants.c1_sampled.max()) == pytest.approx(3, abs=1e-9)
    assert float(constants.c1_local.max()) == pytest.approx(3, abs=1e-9)


class Square(nn.Module):
    """a = x^2 component by component: J = diag(2 x), so that |J(x'') - J(x')| = 2 max |x'' - x'|."""

    def __init__(self):
        super().__init__()
        self.top = nn.Linear(6, 2)

    def forward(self, x):
        return self.top(x.flatten(1) * x.flatten(1))


def images(n=5, seed=0):
    return torch.rand(n, 1, 2, 3, generator=torch.Generator().manual_seed(seed))


def test_a_linear_layer_has_its_largest_singular_value():
    subject = linear(std=0.5)
    expected = 2 * float(torch.linalg.matrix_norm(subject.module[1].weight.detach(), 2))
    constants = measured(subject, "2", images())
    torch.testing.assert_close(constants.c1_local, torch.full((5,), expected).double())
    torch.testing.assert_close(constants.c1_sampled, torch.full((5,), expected).double())  # one step is the steepest
    assert float(constants.c2_local.abs().max()) < 1e-9
    assert float(constants.c2_sampled.abs().max()) < 1e-9


def test_a_quadratic_layer_has_the_curvature_of_the_square():
    subject = Subject(Square().double(), input_shape=(1, 2, 3))
    x = images()
    constants = measured(subject, "top", x)
    peak = 2 * x.flatten(1).amax(1).double()
    assert bool((constants.c1_local >= peak * (1 - 1e-6)).all())  # |diag(2 x)|; pairs of images may exceed it
    # |J(x + d) - J(x)| / |d| = 2 max|d| / |d| at every image, 2 for a step along one axis
    assert bool((constants.c2_local > 2 / math.sqrt(6)).all())
    assert bool((constants.c2_local <= 2 * (1 + 1e-6)).all())
    assert bool((constants.c2_sampled <= constants.c2_local).all())
    assert bool((constants.c2_sampled > 0).all())


def test_a_pair_of_images_counts_and_equal_images_do_not():
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0], [6.0, 8.0]])
    a = torch.tensor([[0.0], [10.0], [7.0], [0.0]]).double()
    # distances 5, 10 and 5; images 0 and 2 are equal, so that their 7 is no ratio
    expected = [10 / 5, 10 / 5, 7 / 10, 10 / 5]
    ratios, partners = model._between(x, a[None])
    assert ratios.tolist() == pytest.approx(expected)
    assert partners.tolist()[:2] == [1, 0]
    assert model._between(x[:1], a[None, :1])[0].tolist() == [0.0]
    # the largest over two directions
    both = torch.stack([a, 3 * a.flip(0)])
    slow = [
        max(
            float((v[i] - v[j]).norm() / (x[i] - x[j]).norm())
            for v in both
            for j in range(4)
            if float((x[i] - x[j]).norm()) > 0
        )
        for i in range(4)
    ]
    assert model._between(x, both)[0].tolist() == pytest.approx(slow)


def test_a_pair_of_images_counts_for_the_jacobian_too():
    subject = Subject(Square().double(), input_shape=(1, 2, 3))
    x = images(3)
    x[1] = x[0]
    x[1, 0, 0, 0] += 0.5  # J differs along one axis: |J(x'') - J(x')| / |x'' - x'| = 2, the most there is
    constants = measured(subject, "top", x, samples=1)
    assert float(constants.c2_local.max()) == pytest.approx(2)
    # what is sampled is 2 |u_0| for the best of the directions
    alone = measured(subject, "top", x[2:], samples=1)
    assert float(constants.c2_sampled[2]) >= float(alone.c2_sampled[0])


def test_sampled_never_exceeds_local_nor_local_the_certified_bound(tiny):
    x = torch.rand(4, 1, 13, 17, generator=torch.Generator().manual_seed(1))
    measures = model_stability(tiny, x)
    assert tuple(measures) == NAMES
    for c in ("c1", "c2"):
        sampled, local = measures[f"{c}_sampled"], measures[f"{c}_local"]
        assert 0 < sampled.value <= local.value
        assert all(s <= t for s, t in zip(sampled.per_image, local.per_image, strict=True))
        assert local.value == max(local.per_image)
        assert local.n == 4
        assert local.direction == "down"
        assert local.null > 0
    assert measures["c1_local"].value <= measures["c1_certified"].value
    assert measures["c1_certified"].null > 0
    assert measures["c2_certified"].status == "skipped"  # a ReLU jumps


def test_a_batch_equals_its_images_one_by_one(tiny):
    x = torch.rand(3, 1, 13, 17, generator=torch.Generator().manual_seed(1))
    top = last_hidden(tiny, weight_layers(graph_of(tiny)))
    f = input_of(tiny, top)
    with torch.no_grad():
        pairs, _ = model._between(x, f(x).flatten(1).double()[None])
    whole = measured(tiny, top, x)
    assert len(set(whole.c1_local.tolist())) == 3
    for i in range(3):
        one = measured(tiny, top, x[i : i + 1])
        assert float(whole.c1_sampled[i]) == pytest.approx(max(float(one.c1_sampled), float(pairs[i])), rel=1e-4)
        assert float(whole.c1_local[i]) == pytest.approx(max(float(one.c1_local), float(pairs[i])), rel=1e-4)
        # of images with each other there are pairs only in the batch; noise and directions are the same for all
        assert float(whole.c2_sampled[i]) >= float(one.c2_sampled) * (1 - 1e-4)


def test_the_budget_limits_the_images():
    subject = linear()
    assert model_stability(subject, images(70))["c1_local"].n == model.MOST_IMAGES == 64
    per_image = (6 * 4 + 4 * 2) * model.POWER_STEPS * 2 * 5 + 1
    assert model_stability(subject, images(9), budget=3 * per_image)["c1_local"].n == 3
    assert model_stability(subject, images(9), budget=0)["c1_local"].n == 2


def test_the_null_model_of_a_large_network_is_not_certified(monkeypatch):
    cost = 6 * 4 + 4 * 2
    monkeypatch.setattr(model, "NULL_CERTIFIED", cost)
    assert model_stability(linear(), images(2))["c1_certified"].null is not None
    monkeypatch.setattr(model, "NULL_CERTIFIED", cost - 1)
    measures = model_stability(linear(), images(2))
    assert measures["c1_certified"].null is None
    assert measures["c1_certified"].value == pytest.approx(measures["c1_local"].value, rel=1e-5)


def test_progress_is_reported_in_three_steps():
    steps = []
    model_stability(linear(), images(2), progress=lambda *step: steps.append(step))
    assert steps == [("stability", i, 3) for i in range(4)]


def test_no_images_and_no_weights():
    assert {m.reason for m in model_stability(linear(), images(0)).values()} == {"there are no images"}

    class Mean(nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, :2]

    measures = model_stability(Subject(Mean(), input_shape=(1, 2, 3)), images(2))
    assert {(m.status, m.direction) for m in measures.values()} == {("skipped", "down")}
    assert {m.reason for m in measures.values()} == {"the network has no layer with weights."}


def test_a_top_layer_that_is_used_twice_cannot_be_read():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.top = nn.Linear(6, 6)

        def forward(self, x):
            return self.top(self.top(x.flatten(1)).relu())

    subject = Subject(Twice(), input_shape=(1, 2, 3))
    with pytest.raises(ModelError, match=r"the input of the last layer with weights \(top\) cannot be read"):
        last_hidden(subject, weight_layers(graph_of(subject)))


def test_the_input_of_a_layer_and_its_node():
    subject = linear(std=0.5)
    x = images(3).double()
    with torch.no_grad():
        torch.testing.assert_close(input_of(subject, "2")(x), subject.module[1](x.flatten(1) / 0.5))
    assert not any(m._forward_pre_hooks for m in subject.module.modules())
    layers = weight_layers(graph_of(subject))
    assert input_node(layers[-1]) is layers[0].nodes[0]

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias, self.weight = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(6, 2))

        def forward(self, x):
            return torch.addmm(self.bias, x.flatten(1).tanh(), self.weight)

    (layer,) = weight_layers(graph_of(Subject(Product(), input_shape=(1, 2, 3))))
    assert "tanh" in str(input_node(layer).target)


def test_multiplications_of_a_forward_pass():
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, (2, 3)), nn.Flatten(), nn.Linear(12, 4))
    layers = weight_layers(graph_of(Subject(net, input_shape=(1, 6, 6))))
    assert multiplications(layers) == 3 * 16 * 9 + 12 * 18 + 4 * 12
    assert multiplications([]) == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_activations_that_are_not_finite_fail(value):
    measure = model._largest(torch.tensor([1.0, value]), 0.5)
    assert (measure.status, measure.n, measure.null, measure.direction) == ("failed", 2, 0.5, "down")
    assert math.isnan(measure.value)
    fine = model._largest(torch.tensor([1.0, 3.0, 2.0]), None)
    assert (fine.value, fine.n, fine.per_image, fine.status) == (3.0, 3, (1.0, 3.0, 2.0), "passed")
