"""Ablation against the plain loop over neurons, and faithfulness against numpy."""

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from auditor import Subject
from auditor.errors import DataError
from auditor.metrics import ablation
from auditor.metrics.ablation import Ablation, ablate, multiplications_above, perceptron_above
from auditor.network.aten_graph import graph_of
from auditor.network.weight_layers import weight_layers
from tests.auditor.metrics.small_networks import NETWORKS, examples, subject_of


def plain_loop(subject: Subject, weight, x, y):
    """Zero one row at a time and run the whole network: plainly right, hopelessly slow."""
    with torch.no_grad():
        base, increases = F.cross_entropy(subject.logits(x).double(), y), []
        for i in range(len(weight)):
            before = weight[i].clone()
            weight[i] = 0
            increases.append(F.cross_entropy(subject.logits(x).double(), y) - base)
            weight[i] = before
    return torch.stack(increases)


@pytest.mark.parametrize("name", NETWORKS)
def test_ablation_equals_the_plain_loop(name):
    subject = subject_of(name)
    x, y = examples(subject)
    graph = graph_of(subject)
    state = dict(subject.module.named_parameters())
    fast = 0
    for layer in weight_layers(graph):
        (weight,) = [p for p in state.values() if p.data_ptr() == layer.rows.data_ptr()]
        with subject.at_rest():
            truth = plain_loop(subject, weight, x, y)
            ablation = ablate(graph, layer, subject.normalise(x), y)
        assert float(truth.abs().max()) > 1e-4
        torch.testing.assert_close(ablation.increase, truth, rtol=0, atol=1e-6)  # the promise; float32 gives 1e-8
        fast += perceptron_above(graph, layer) is not None
    assert fast == {"two hidden layers": 2, "three hidden layers": 2}.get(name, 0)


def test_ablation_of_some_neurons_equals_theirs_among_all():
    subject = subject_of("three hidden layers")
    x, y = examples(subject)
    graph = graph_of(subject)
    some = torch.tensor([1, 4, 7])
    for layer in weight_layers(graph)[:3]:
        few, all_of_them = ablate(graph, layer, x, y, some), ablate(graph, layer, x, y)
        torch.testing.assert_close(few.increase, all_of_them.increase[some], rtol=0, atol=1e-12)
        torch.testing.assert_close(few.norms, all_of_them.norms[some])


@pytest.mark.parametrize("name", NETWORKS)
def test_without_an_image_there_is_nothing_to_ablate(name):
    subject = subject_of(name)
    x, y = examples(subject)
    graph = graph_of(subject)
    layer = weight_layers(graph)[0]
    with pytest.raises(
        DataError, match=f"ablation of {re.escape(layer.name)}: the network takes 1 or more images, got 0"
    ):
        ablate(graph, layer, x[:0], y[:0])
    assert ablate(graph, layer, x[:1], y[:1]).n_images == 1


def test_ablation_in_chunks_is_the_same(monkeypatch):
    subject = subject_of("residual")
    x, y = examples(subject)
    layer = weight_layers(graph_of(subject))[0]
    whole = ablate(graph_of(subject), layer, x, y)
    monkeypatch.setattr("auditor.metrics.ablation.MOST_NUMBERS", 3000)
    torch.testing.assert_close(ablate(graph_of(subject), layer, x, y).increase, whole.increase, rtol=0, atol=1e-8)


def test_faithfulness_known_answer():
    two_and_one = Ablation(torch.arange(3), torch.tensor([0.1, 0.2, 0.3]).double(), torch.tensor([1.0, 2.0, 3.0]), 5)
    assert two_and_one.faithfulness().value == pytest.approx(1, abs=1e-7)  # float32 norms
    assert two_and_one.faithfulness().null == pytest.approx(1.96 / math.sqrt(3))


@pytest.mark.parametrize(
    ("increase", "norms", "why"),
    [
        ([0.1, 0.2, 0.3], [2.0, 2.0, 2.0], "same norm"),
        ([0.0, 0.0, 0.0], [1.0, 2.0, 3.0], "alike"),
        ([0.1, 0.2], [1.0, 2.0], "at least 3 neurons"),
        ([0.1, math.nan, 0.2], [1.0, 2.0, 3.0], "not finite"),
    ],
)
def test_undefined_faithfulness_fails_with_a_reason(increase, norms, why):
    measure = Ablation(
        torch.arange(len(norms)), torch.tensor(increase, dtype=torch.float64), torch.tensor(norms), 5
    ).faithfulness()
    assert math.isnan(measure.value)
    assert measure.status == "failed"
    assert why in measure.reason


def test_multiplications_are_counted_above_the_layer_only():
    perceptron = subject_of("three hidden layers")  # 30, 12, 25, 17, 6
    graph = graph_of(perceptron)
    layers = weight_layers(graph)
    expected = [25 * 12 + 17 * 25 + 6 * 17, 17 * 25 + 6 * 17, 6 * 17, 0]
    assert [multiplications_above(graph, layers, layer) for layer in layers] == expected
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, (2, 3)), nn.Flatten(), nn.Linear(2 * 3 * 2, 4))
    graph = graph_of(Subject(net, input_shape=(1, 6, 6)))
    layers = weight_layers(graph)
    above = [2 * 3 * 2 * (3 * 2 * 3) + 4 * 12, 4 * 12, 0]  # every output of a convolution takes a kernel of its inputs
    assert [multiplications_above(graph, layers, layer) for layer in layers] == above


def test_images_that_an_ablation_leaves_alone_are_not_run_again(monkeypatch):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Tanh(), nn.Linear(2 * 4 * 4, 3))
    with torch.no_grad():
        net[0].weight[0] = -1.0  # dark images only
        net[0].bias[:] = 0
    subject = Subject(net, input_shape=(1, 6, 6))
    x = torch.rand(6, 1, 6, 6)
    x[2:] *= -1  # four images switch the first channel on
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    graph = graph_of(subject)
    (layer, _) = weight_layers(graph)
    batches, compute = [], type(graph).compute

    def counted(self, node, *rest):
        value = compute(self, node, *rest)
        if isinstance(value, torch.Tensor):
            batches.append(len(value))
        return value

    monkeypatch.setattr(type(graph), "compute", counted)
    with subject.at_rest():
        increase = ablate(graph, layer, x, y, torch.tensor([0])).increase
        above = batches[-3:]
        truth = plain_loop(subject, net[0].weight, x, y)
    assert set(above) == {4}
    torch.testing.assert_close(increase, truth[:1], rtol=0, atol=1e-6)


def test_faithfulness_and_its_interval_are_those_of_numpy():
    rng = np.random.default_rng(5)
    u, w = rng.normal(size=12), rng.random(12) + 1
    w[0] = u[0] = 3.0
    measure = Ablation(torch.arange(12), torch.from_numpy(u), torch.from_numpy(w), 7).faithfulness(seed=3, note="some")
    assert measure.value == pytest.approx(np.corrcoef(u, w)[0, 1], rel=1e-9)
    rows = np.random.default_rng(3).integers(0, 12, (ablation.N_BOOTSTRAP, 12))
    drawn = [np.corrcoef(u[r], w[r])[0, 1] for r in rows]
    assert (measure.low, measure.high) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), rel=1e-9)
    assert (measure.n, measure.direction, measure.reason, measure.status) == (12, "up", "some", "passed")
    assert measure.null == pytest.approx(1.96 / math.sqrt(12))


def test_nothing_is_undefined_just_above_the_limits():
    norms = np.array([1.0, 1.0, 1.0 + 2e-6])
    increase = np.array([0.0, 0.0, 2e-12])
    assert ablation._undefined(increase, norms) == ""
    assert "same norm" in ablation._undefined(increase, np.array([1.0, 1.0, 1.0 + 5e-7]))
    assert "same norm" in ablation._undefined(increase, np.array([100.0, 100.0, 100.0 + 5e-5]))  # of the largest norm
    assert "alike" in ablation._undefined(np.array([0.0, 0.0, 5e-13]), norms)
    assert "alike" in ablation._undefined(np.array([100.0, 100.0, 100.0 + 5e-11]), norms)
    assert "not finite" in ablation._undefined(increase, np.array([1.0, 2.0, math.inf]))
    assert "got 0" in ablation._undefined(np.zeros(0), np.zeros(0))
    none = Ablation(torch.arange(0), torch.zeros(0).double(), torch.zeros(0), 0).faithfulness()
    assert none.null is None


def test_two_ablated_neurons_by_hand():
    """One image, logits = relu(W x + b): without neuron 0 the logits are (relu(b_0), 6)."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2, bias=False)).double()
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor([[3.0, 4.0], [0.0, 5.0]]))
        net[1].bias.copy_(torch.tensor([0.5, 1.0]))
        net[3].weight.copy_(torch.eye(2))
    subject = Subject(net, input_shape=(1, 1, 2))
    graph = graph_of(subject)
    layer = weight_layers(graph)[0]
    x, y = torch.tensor([[[[1.0, 1.0]]]]).double(), torch.tensor([0])

    def loss(a, b):
        return math.log(math.exp(a) + math.exp(b)) - a

    result = ablate(graph, layer, x, y)
    assert result.increase.tolist() == pytest.approx([loss(0.5, 6) - loss(7.5, 6), loss(7.5, 1) - loss(7.5, 6)])
    assert result.norms.tolist() == pytest.approx([5.0, 5.0])
    assert result.n_images == 1
    top = ablate(graph, weight_layers(graph)[1], x, y)
    assert top.increase.tolist() == pytest.approx([loss(0, 6) - loss(7.5, 6), loss(7.5, 0) - loss(7.5, 6)])


def test_chunks_are_as_large_as_the_numbers_allow(monkeypatch):
    subject = subject_of("two hidden layers")  # 30, 40, 25, 6
    graph = graph_of(subject)
    per_image = ablation._numbers_per_image(graph)
    # input and flattened input, both hidden layers before and after the ReLU, logits, and one to begin with
    assert per_image == 1 + 30 + 30 + 2 * 40 + 2 * 25 + 6
    sizes, run = [], type(graph).run

    def counted(self, x, **options):
        sizes.append(len(x))
        return run(self, x, **options)

    monkeypatch.setattr(type(graph), "run", counted)
    x, y = examples(subject)
    for most, expected in ((8 * per_image, [8, 8, 7]), (8 * per_image - 1, [7, 7, 7, 2]), (1, [1] * 23)):
        sizes.clear()
        monkeypatch.setattr(ablation, "MOST_NUMBERS", most)
        assert ablate(graph, weight_layers(graph)[0], x, y).n_images == 23
        assert sizes == expected


def above(*modules):
    net = nn.Sequential(nn.Flatten(), nn.Linear(30, 7), *modules)
    graph = graph_of(Subject(net, input_shape=(1, 5, 6)))
    return perceptron_above(graph, weight_layers(graph)[0])


@pytest.mark.parametrize(
    ("modules", "n_maps"),
    [
        ((nn.ReLU(), nn.Linear(7, 3)), 1),
        ((nn.Dropout(), nn.ReLU(), nn.Dropout(), nn.Linear(7, 3)), 1),
        ((nn.ReLU(), nn.Linear(7, 5), nn.Dropout(), nn.ReLU(), nn.Linear(5, 3)), 2),
        ((nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), None),
        ((), None),
        ((nn.ReLU(),), None),
        ((nn.Tanh(), nn.Linear(7, 3)), None),
        ((nn.ReLU(), nn.Linear(7, 3), nn.ReLU()), None),
        ((nn.ReLU(), nn.Linear(7, 5), nn.Linear(5, 3)), None),
        ((nn.ReLU(), nn.LayerNorm(7), nn.Linear(7, 3)), None),
    ],
)
def test_a_perceptron_above_is_one_or_two_linear_layers(modules, n_maps):
    perceptron = above(*modules)
    assert (perceptron and len(perceptron.maps)) == n_maps


def test_a_skip_past_the_activation_is_no_perceptron():
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.top = nn.Linear(30, 7), nn.Linear(7, 3)

        def forward(self, x):
            h = self.a(x.flatten(1))
            return self.top(h.relu()) + h[:, :3]

    subject = Subject(Skip(), input_shape=(1, 5, 6))
    graph = graph_of(subject)
    assert perceptron_above(graph, weight_layers(graph)[0]) is None
    x, y = torch.rand(9, 1, 5, 6, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 3
    with subject.at_rest():
        increase = ablate(graph, weight_layers(graph)[0], x, y).increase
        torch.testing.assert_close(increase, plain_loop(subject, subject.module.a.weight, x, y), rtol=0, atol=1e-6)


def test_tensors_of_a_value():
    full, empty = torch.ones(2), torch.zeros(0)
    assert ablation._tensors(full)[0] is full
    assert [len(t) for t in ablation._tensors((full, empty, None))] == [2]
    assert ablation._tensors(3) == []
