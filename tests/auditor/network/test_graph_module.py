"""Part of a graph as a module: the values of plain forward passes, with the model's weights and with others."""

import hashlib

import pytest
import torch
from torch import nn

from auditor.network.aten_graph import AtenGraph, graph_of
from auditor.network.below_layer import BelowLayer
from auditor.network.graph_module import GraphModule, LayerModule, weights_digest


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(24, 3)
    ).eval()


def images(n=3):
    return torch.rand(n, 2, 6, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def graph():
    return AtenGraph.trace(network(), images())


def test_values_of_nodes_are_those_of_the_layers(graph):
    net, x = network(), images(5)
    part = GraphModule(graph, [graph.layer("3"), graph.layer("0"), graph.output])
    with torch.no_grad():
        pooled, convolved, logits = part(x)
        torch.testing.assert_close(convolved, net[0](x))
        torch.testing.assert_close(pooled, net[:4](x))
        torch.testing.assert_close(logits, net(x))


def test_nothing_above_the_outputs_runs_or_is_held(graph):
    below, whole = GraphModule(graph, [graph.layer("2")]), GraphModule(graph, [graph.output])
    assert len(below.steps) < len(whole.steps)
    shapes = {tuple(b.shape) for b in below.buffers()}
    assert (4, 2, 3, 3) in shapes
    assert (3, 24) not in shapes
    assert (3, 24) in {tuple(b.shape) for b in whole.buffers()}
    assert set(below.steps) <= graph.before(graph.layer("2"))
    assert not list(below.parameters())  # buffers: nothing of it is trained


def test_other_weights_replace_those_of_the_same_name(graph):
    x, other = images(), network(7)
    weights = {k: v for k, v in other.state_dict().items() if k.startswith("0.")}
    mixed = network()
    mixed.load_state_dict(weights, strict=False)
    with torch.no_grad():
        z = LayerModule(graph, "2", weights)(x)
        torch.testing.assert_close(z, mixed[:3](x))
        assert not torch.allclose(z, network()[:3](x))
        torch.testing.assert_close(LayerModule(graph, "2", {})(x), network()[:3](x))  # the graph's are as they were
        torch.testing.assert_close(LayerModule(graph, "2", {"nosuch": x})(x), network()[:3](x))


def test_weights_take_the_type_of_the_models_and_lose_their_gradient(graph):
    weight = network(7)[0].weight.double().requires_grad_(True)
    part = LayerModule(graph, "0", {"0.weight": weight})
    assert {b.dtype for b in part.buffers()} == {torch.float32}
    assert not any(b.requires_grad for b in part.buffers())
    with torch.no_grad():
        expected = nn.functional.conv2d(images(), weight.float(), network()[0].bias)
        torch.testing.assert_close(part(images()), expected)


def test_it_can_be_exported(graph):
    x = images()
    part = LayerModule(graph, "3", {})
    exported = torch.export.export(part, (x,)).module()
    torch.testing.assert_close(exported(x), part(x))


def test_a_digest_of_layer_names_shapes_and_bytes():
    weights = {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor([1.5])}
    by_hand = hashlib.sha256(
        b"layer|a|(1,)|" + weights["a"].numpy().tobytes() + b"|b|(2, 3)|" + weights["b"].numpy().tobytes()
    ).hexdigest()
    assert weights_digest("layer", weights) == by_hand
    assert weights_digest("layer", dict(reversed(weights.items()))) == by_hand
    transposed = {**weights, "b": torch.arange(6.0).view(3, 2).T.contiguous().T}
    others = [
        weights_digest("other", weights),
        weights_digest("layer", {**weights, "b": weights["b"].view(3, 2)}),
        weights_digest("layer", {**weights, "a": torch.tensor([1.5000001])}),
        weights_digest("layer", {"b": weights["b"], "c": weights["a"]}),
        weights_digest("layer", {"b": weights["b"]}),
    ]
    assert len({by_hand, *others}) == 6
    assert weights_digest("layer", transposed) == others[1]  # how it lies in memory does not count
    assert weights_digest("layer", {**weights, "a": nn.Parameter(weights["a"].double())}) == by_hand


@pytest.fixture
def x():
    return torch.rand(4, 1, 13, 17, generator=torch.Generator().manual_seed(0))


def test_the_values_are_the_models_own_in_the_order_asked_for(tiny, x):
    graph = graph_of(tiny)
    module = GraphModule(graph, [graph.output, graph.layer("relu"), graph.layer("conv")])
    with torch.no_grad():
        logits, relu, conv = module(tiny.normalise(x))
        expected = tiny.run(x, ["relu", "conv"])
    torch.testing.assert_close(logits, expected[0])
    torch.testing.assert_close(relu, expected[1]["relu"])
    torch.testing.assert_close(conv, expected[1]["conv"])
    assert float(conv.min()) < 0 <= float(relu.min())


def test_only_what_is_needed_runs(tiny):
    graph = graph_of(tiny)
    below, whole = GraphModule(graph, [graph.layer("relu")]), GraphModule(graph, [graph.output])
    assert len(below.steps) == 2 < len(whole.steps)
    assert len(list(below.buffers())) == 2 < len(list(whole.buffers()))


def test_weights_of_ones_own_replace_the_models(tiny, x):
    weights = {"conv.weight": tiny.module.conv.weight.detach() * 0.5, "conv.bias": torch.arange(5.0)}
    module = LayerModule(graph_of(tiny), "relu", weights)
    below = BelowLayer(tiny, "relu", weights)
    with torch.no_grad():
        z = module(tiny.normalise(x))
        torch.testing.assert_close(z.flatten(2), below(x))
        assert not torch.allclose(z, tiny.activations(x, ["relu"])["relu"])
        # the model itself is as it was
        torch.testing.assert_close(
            LayerModule(graph_of(tiny), "relu", {})(tiny.normalise(x)), tiny.activations(x, ["relu"])["relu"]
        )


def test_a_digest_changes_with_layer_name_shape_and_every_weight():
    w = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(1)}
    first = weights_digest("layer", w)
    assert first == weights_digest("layer", dict(reversed(w.items())))
    others = [
        weights_digest("other", w),
        weights_digest("layer", {"a": w["a"], "c": w["b"]}),
        weights_digest("layer", {"a": w["a"].reshape(3, 2), "b": w["b"]}),
        weights_digest("layer", {"a": w["a"] + torch.tensor([0, 0, 1e-6]), "b": w["b"]}),
    ]
    assert len({first, *others}) == 5
