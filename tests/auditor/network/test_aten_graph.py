"""The traced graph computes what the module computes, knows its layers, and folds batch norm."""

import contextlib
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from auditor import Subject
from auditor.errors import LayerError, ModelError, ShapeError
from auditor.network.aten_graph import AtenGraph, as_evaluated, call, graph_of, is_getitem, is_signal, source


def small(bias=True, affine=True) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3, bias=bias), nn.BatchNorm2d(3, affine=affine), nn.ReLU(), nn.Dropout(),
                        nn.Flatten(), nn.Linear(36, 4, bias=bias), nn.BatchNorm1d(4))  # fmt: skip
    for m in net:
        if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.normal_(m.running_mean)
            nn.init.uniform_(m.running_var, 0.5, 2)
            if m.affine:
                nn.init.normal_(m.weight)
                nn.init.uniform_(m.bias, 0.5, 1)
    return net.double().eval()


def images(n=3):
    return torch.rand(n, 2, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_the_graph_computes_the_logits_with_batch_norm_folded_or_not(bias, affine):
    net, x = small(bias, affine), images()
    graph = AtenGraph.trace(net, x)
    assert graph.batch is None
    assert graph.shape == (2, 5, 6)
    with torch.no_grad():
        want = net(x)
    values = graph.run(x)
    torch.testing.assert_close(values[graph.output], want, rtol=1e-12, atol=1e-12)
    conv = next(n for n in graph.steps if "conv2d" in str(n.target))
    assert conv not in values  # it ran inside its batch norm
    pinned = frozenset({conv})
    unfolded = graph.run(x, pinned=pinned)
    with torch.no_grad():
        torch.testing.assert_close(unfolded[conv], net[0](x))
    torch.testing.assert_close(unfolded[graph.output], want, rtol=1e-12, atol=1e-12)
    (norm,) = conv.users
    assert graph.folds(norm)
    assert not graph.folds(norm, pinned)
    assert not graph.folds(conv)
    weight, offset = graph.weights(norm)
    slope = net[1].weight if affine else torch.ones(3)
    slope = slope / (net[1].running_var + net[1].eps).sqrt()
    torch.testing.assert_close(weight, net[0].weight * slope.view(3, 1, 1, 1))
    start = (net[0].bias if bias else 0) - net[1].running_mean
    torch.testing.assert_close(offset, start * slope + (net[1].bias if affine else 0))


def test_folded_weights_follow_training():
    net, x = small(), images()
    graph = AtenGraph.trace(net, x)
    before = graph.run(x)[graph.output]
    with torch.no_grad():
        net[0].weight.mul_(2)
        want = net(x)
    assert not torch.allclose(before, want)
    torch.testing.assert_close(graph.run(x)[graph.output], want)


def test_a_convolution_used_twice_is_not_folded():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)

        def forward(self, x):
            z = self.conv(x)
            return (self.norm(z) + z).flatten(1)

    net = Twice().double().eval()
    graph = AtenGraph.trace(net, images())
    assert not any(graph.folds(n) for n in graph.steps)
    with torch.no_grad():
        torch.testing.assert_close(graph.run(images())[graph.output], net(images()))


def test_layers_by_name():
    graph = AtenGraph.trace(nn.Sequential(small(), nn.Linear(4, 2).double()), images())
    assert graph.layers == ["0", "0.0", "0.1", "0.2", "0.4", "0.5", "0.6", "1"]
    assert graph.layer("input") is graph.input
    assert graph.layer("") is graph.output
    assert graph.layer("0.2").target is torch.ops.aten.relu.default
    assert graph.layer("0") is graph.layer("0.6")
    assert is_signal(graph.layer("0.1"))
    with pytest.raises(LayerError, match=r"no operation belongs to layer '0\.3'.*Take one of: 0, 0\.0"):
        graph.layer("0.3")


def test_what_a_node_is_computed_from():
    graph = AtenGraph.trace(small(), images())
    relu = graph.layer("2")
    before = graph.before(relu)
    assert {graph.input, relu} <= before
    assert graph.output not in before
    assert graph.layer("0") in before
    values = graph.run(images(), until=relu)
    assert graph.output not in values
    assert float(values[relu].min()) >= 0
    assert graph.input in graph.live
    assert not any(n in graph.live for n in graph.constants)


def test_inputs_of_another_shape_are_refused():
    graph = AtenGraph.trace(small(), images())
    with pytest.raises(ShapeError, match=r"traced for images of shape \(2, 5, 6\), got \(2, 5, 7\)"):
        graph.run(torch.rand(1, 2, 5, 7).double())


class Counting(nn.Module):
    """Reads len(x), which export takes for a constant."""

    def forward(self, x):
        return x.flatten(1).view(len(x), -1).expand(2, -1) * 1.0


def test_a_frozen_batch_is_known():
    graph = AtenGraph.trace(Counting(), images(2))
    assert graph.batch == 2
    with pytest.raises(ShapeError, match="accepts 2 images at a time only, got 3"):
        graph.run(images(3))


def test_the_same_graph_with_other_weights():
    graph, other = AtenGraph.trace(small(), images()), small()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(-1.5)
        want = other(images())
    graph.run(images())
    new = graph.reweighted(other)
    torch.testing.assert_close(new.run(images())[new.output], want)
    assert not torch.allclose(graph.run(images())[graph.output], want)


def test_modes_come_back():
    net = small().train()
    net[0].eval()
    modes = [m.training for m in net.modules()]
    with contextlib.suppress(KeyError), as_evaluated(net):
        assert not any(m.training for m in net.modules())
        raise KeyError
    assert [m.training for m in net.modules()] == modes
    AtenGraph.trace(net, images())
    assert [m.training for m in net.modules()] == modes


def test_what_cannot_be_traced_is_said():
    class Moody(nn.Module):
        def forward(self, x):
            return x if float(x.sum()) > 0 else -x

    with pytest.raises(ModelError, match=r"torch\.export could not follow Moody on an input of shape"):
        AtenGraph.trace(Moody(), images())


def test_the_graph_of_a_subject_is_traced_once_and_goes_with_it(tiny):
    graph = graph_of(tiny)
    assert graph_of(tiny) is graph
    other = Subject(tiny.module, input_shape=(1, 13, 17))
    assert graph_of(other) is not graph
    del other
    gc.collect()
    x = torch.rand(2, 1, 13, 17)
    torch.testing.assert_close(graph.run(tiny.normalise(x))[graph.output], tiny.logits(x))


def test_small_questions_about_nodes():
    class Parts(nn.Module):
        def forward(self, x):
            one, two = x.split(1, 1)
            return (one.reshape(len(x), -1) + two.flatten(1).argmax(1, keepdim=True)).sum(1, keepdim=True)

    graph = AtenGraph.trace(Parts(), images())
    items = [n for n in graph.steps if is_getitem(n)]
    assert len(items) == 2
    split = items[0].args[0]
    assert is_signal(split, or_several=True)
    assert not is_signal(split)
    (argmax,) = [n for n in graph.steps if "argmax" in str(n.target)]
    assert not is_signal(argmax)
    assert source(items[0], lambda n: n is not graph.input) is graph.input
    assert source(items[0], lambda n: False) is items[0]
    parts = call(split, lambda n: images())
    assert torch.equal(parts[1], images()[:, 1:])
    assert graph.any_strides


class Derived(nn.Module):
    """Weights made of parameters on the way: a kernel that is standardised, a bias put together of parts."""

    def __init__(self):
        super().__init__()
        self.kernel, self.part = nn.Parameter(torch.randn(4, 3, 3, 3)), nn.Parameter(torch.randn(2))
        self.register_buffer("zeros", torch.zeros(2))
        self.gamma = nn.Parameter(torch.tensor([1.0, -2.0, 3.0, 0.5]).view(4, 1, 1))

    def forward(self, x):
        bias = torch.cat([self.part, self.zeros])
        return F.conv2d(x, self.kernel - self.kernel.mean((1, 2, 3), keepdim=True), bias) * self.gamma


def test_constants_are_computed_and_signals_are_not():
    net = Derived()
    graph = AtenGraph.trace(net, torch.rand(2, 3, 5, 6))
    conv = next(n for n in graph.steps if "conv2d" in str(n.target))
    torch.testing.assert_close(graph.constant(conv.args[1]).mean((1, 2, 3)), torch.zeros(4))
    torch.testing.assert_close(graph.weights(conv)[1], torch.cat([net.part.detach(), torch.zeros(2)]))
    with torch.no_grad():
        net.part.add_(1.0)  # trained on
    torch.testing.assert_close(graph.weights(conv)[1][:2], net.part.detach())
    assert graph.constant(conv.args[0]) is None
    assert graph.constant(conv) is None
    assert graph.constant(3.5) == 3.5


def test_a_negative_layer_scale_turns_channels():
    net = Derived()
    graph = AtenGraph.trace(net, torch.rand(2, 3, 5, 6))
    conv = next(n for n in graph.steps if "conv2d" in str(n.target))
    assert graph.turned_channels(conv).tolist() == [1, -1, 1, 1]
    assert graph.turned_channels(conv, frozenset({conv})) is None  # somebody reads it unscaled
    assert graph.turned_channels(graph.output) is None  # not a linear map with weights
    with torch.no_grad():
        net.gamma.abs_()
    assert graph.turned_channels(conv) is None


def test_composite_operations_are_written_out():
    class Composite(nn.Module):
        def forward(self, x):
            attention = torch.einsum("bid,bjd->bij", x, x).softmax(-1)
            return torch.stack([attention @ x, x]).mean(0).addcmul(x, x)

    graph = AtenGraph.trace(Composite(), torch.rand(2, 3, 4))
    names = {str(n.target) for n in graph.steps}
    assert not names & {"aten.einsum.default", "aten.stack.default", "aten.addcmul.default"}
    x = torch.rand(3, 3, 4)
    torch.testing.assert_close(graph.run(x)[graph.output], Composite()(x))


def test_a_layer_without_operation_is_located_once():
    from auditor import Subject
    from auditor.network.aten_graph import graph_of

    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(2 * 5 * 3, 2)).eval()
    subject = Subject(net, input_shape=(1, 7, 5))
    graph, runs = graph_of(subject), []
    net.register_forward_pre_hook(lambda *_: runs.append(1))
    first = graph.layer("3")
    assert runs
    runs.clear()
    assert graph.layer("3") is first
    assert not runs
