"""Calls of a layer: each call of a shared module can be read, replaced and found in the graph, in memory and pt2."""

import pytest
import torch
from torch import Tensor, nn

from auditor import Subject
from auditor.errors import LayerError
from auditor.network.above_layer import prepare_above_layer
from auditor.network.aten_graph import graph_of
from auditor.subject.layer_calls import locate, named_call, on_call, split_call

SHAPE = (2, 9, 7)


class Shared(nn.Module):
    """One ReLU for both convolutions, as many published networks have it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.one, self.two = nn.Conv2d(2, 5, 3), nn.Conv2d(5, 6, 3)
        self.act, self.pool, self.drop, self.head = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Dropout(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.two(self.act(self.one(x))))
        return self.head(self.drop(self.pool(x).flatten(1)))


def images(n: int = 4) -> Tensor:
    return torch.rand(n, *SHAPE, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["in memory", "pt2"])
def subject(request) -> Subject:
    net = Shared().eval()
    if request.param == "pt2":
        example = (images(2),)
        program = torch.export.export(net, example, dynamic_shapes=({0: torch.export.Dim.AUTO},))
        net = torch.export.unflatten(program)
    return Subject(net, input_shape=SHAPE)


def by_hand(x: Tensor) -> tuple[Tensor, Tensor]:
    net = Shared()
    first = net.one(x).relu()
    return first.detach(), net.two(first).relu().detach()


def test_both_calls_are_read_and_replaced(subject):
    x = images()
    first, second = by_hand(x)
    activations = subject.activations(x, ["act#1", "act#2"])
    torch.testing.assert_close(activations["act#1"], first)
    torch.testing.assert_close(activations["act#2"], second)
    for layer in activations:
        torch.testing.assert_close(subject.forward_from(layer, activations[layer]), subject.logits(x))
        half = subject.forward_from(layer, activations[layer] / 2)
        assert float((half - subject.logits(x)).abs().max()) > 1e-3
    assert subject.layer("act#2").shape == (6, 5, 3)
    assert subject.layer("act@1").shape == (6, 5, 3)  # as a pt2 file spells it


def test_the_graph_knows_the_calls(subject):
    x = images(2)
    graph = graph_of(subject)
    values = graph.run(subject.normalise(x))
    for layer, expected in zip(("act#1", "act#2"), by_hand(x), strict=True):
        torch.testing.assert_close(values[graph.layer(layer)], expected)


def test_the_last_call_is_suggested_and_its_head_is_closed_form(subject):
    assert subject.default_layer() == "act#2"
    above = prepare_above_layer(subject, "act#2")
    assert above is not None
    assert above.is_affine


def test_a_dropout_is_what_feeds_it_in_the_graph(subject):
    x = images(2)
    graph = graph_of(subject)
    value = graph.run(subject.normalise(x))[graph.layer("drop")]
    torch.testing.assert_close(value, subject.activations(x, ["drop"])["drop"])
    with pytest.raises(LayerError, match="no operation belongs to layer 'nosuch'"):
        graph.layer("nosuch")


def test_the_module_alone_is_not_a_layer():
    subject = Subject(Shared(), input_shape=SHAPE)
    with pytest.raises(LayerError, match="called 2 times in one pass; each call is a layer, act#1 to act#2"):
        subject.layer("act")
    with pytest.raises(LayerError, match="was called 2 times"):
        subject.activations(images(), ["act"])
    with pytest.raises(LayerError, match="was called 0 times"):
        subject.activations(images(), ["act#3"])


def test_names():
    net = Shared()
    assert locate(net, "act#2") == (net.act, 2)
    assert locate(net, "two") == (net.two, None)
    with pytest.raises(AttributeError):
        locate(net, "act#x")
    assert split_call("a.b@2.c@1") == ("a.b.c", 4)
    assert named_call("act", 3) == "act#3"
    copies = nn.ModuleDict({"act": nn.ReLU(), "act@1": nn.Tanh()})
    assert locate(copies, "act#2") == (copies["act@1"], None)
    assert locate(copies, "act#1") == (copies["act"], None)
    with pytest.raises(AttributeError):
        locate(copies, "act#3")


def test_an_action_may_replace_the_output():
    net = Shared()
    handle = on_call(net, "act#2", torch.zeros_like)
    out = net.eval()(images())
    handle.remove()
    torch.testing.assert_close(out, net.head.bias.expand(4, 3))
