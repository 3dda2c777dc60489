"""Which layers can be explained: read off the graph, and checked by replacing the layer's output."""

import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.errors import LayerError, ModelError
from auditor.subject.layer_discovery import probe


class Reused(nn.Module):
    """A ReLU called twice, a skip connection past a block, a branch that never runs, and a tuple output."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.act = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
        self.idle = nn.Conv2d(4, 4, 1)
        self.body = nn.Identity()
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        x = self.act(self.a(x))
        x = self.body(self.act(x + self.b(x)))
        return self.fc(x.mean((2, 3))), x


def test_layers_say_why_they_cannot_be_explained():
    subject = Subject(Reused(), input_shape=(1, 8, 8))
    reasons = {x.name: x.reason for x in subject.layers()}
    assert reasons["act"] == "it is called 2 times in one pass; each call is a layer, act#1 to act#2"
    assert "skip connection" in reasons["b"]
    assert reasons["body"] == ""
    assert subject.default_layer() == "act#2"  # which feeds the identity
    with pytest.raises(LayerError, match="called 2 times in one pass and must be called once"):
        subject.activations(torch.rand(1, 1, 8, 8), ["act"])
    with pytest.raises(LayerError, match="'idle' was called 0 times"):
        subject.activations(torch.rand(1, 1, 8, 8), ["idle"])
    with pytest.raises(LayerError, match="skip connection"):
        subject.layer("b")
    with pytest.raises(LayerError, match="no layer 'bodi'; near names are body"):
        subject.activations(torch.rand(1, 1, 8, 8), ["bodi"])


def test_inplace_relu_does_not_spoil_the_sign_of_its_input():
    subject = Subject(
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(3 * 36, 2)),
        input_shape=(1, 8, 8),
    )
    assert [x.nonnegative for x in subject.layers()][:2] == [False, True]


FAMILIES = {
    "resnet18": "layer4",
    "vgg11": "avgpool",
    "squeezenet1_1": "features",
    "mobilenet_v3_small": "features",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_torchvision_families(name):
    import torchvision

    net = getattr(torchvision.models, name)(weights=None, num_classes=7)
    subject = Subject(net, input_shape=(3, 64, 64))
    layer = subject.default_layer()
    assert layer == FAMILIES[name]
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        logits, outputs = subject.run(x, [layer])
        torch.testing.assert_close(subject.forward_from(layer, outputs[layer]), logits, rtol=1e-4, atol=1e-5)


def small_vit(image_size: int = 32):
    from torchvision.models import VisionTransformer

    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = VisionTransformer(image_size, 8, num_layers=3, num_heads=2, hidden_dim=24, mlp_dim=48, num_classes=5)
        nn.init.normal_(net.heads.head.weight, std=0.2)  # torchvision starts the head at zero: no reasons at all
    return net


def test_vision_transformer_has_patch_tokens_as_positions():
    subject = Subject(small_vit(), input_shape=(3, 32, 32))
    layer = subject.layer()
    assert layer.name == "encoder.layers.encoder_layer_1"  # after the last block only the class token counts
    assert layer.layout is not None
    assert (layer.layout.grid, layer.layout.prefix) == ((4, 4), 1)
    assert "only its class token" in next(
        x.reason for x in subject.layers() if x.name == "encoder.layers.encoder_layer_2"
    )


def test_an_untrained_transformer_with_a_zero_head_is_read_the_same_way():
    net = small_vit()
    nn.init.zeros_(net.heads.head.weight)
    assert Subject(net, input_shape=(3, 32, 32)).default_layer() == "encoder.layers.encoder_layer_1"


class Crossing(nn.Module):
    """Every path runs through ``stem`` and ``join``; ``left`` and ``right`` have one path each past them."""

    def __init__(self):
        super().__init__()
        self.stem, self.left, self.right = (nn.Conv2d(c, 4, 3, padding=1) for c in (2, 4, 4))
        self.join, self.constant, self.pair = nn.Identity(), nn.Linear(3, 4), nn.Flatten(0, 1)
        self.top = nn.Linear(4, 3)

    def forward(self, x):
        h = self.stem(x).relu()
        bias = self.constant(torch.ones(len(x), 3))
        self.pair(h)
        return self.top(self.join(self.left(h) + self.right(h).tanh()).mean((2, 3)) + bias)


def is_all_that_counts(subject, name):
    """Whether the logits of one image follow from this layer alone: put its output into the pass of another image."""
    x = torch.rand(2, *subject.input_shape, generator=torch.Generator().manual_seed(3))
    module, outputs = subject.module.get_submodule(name), []
    with torch.no_grad():
        with_hook = module.register_forward_hook(lambda _m, _a, out: outputs.append(out.clone()))
        expected = subject.forward(x)
        with_hook.remove()
        replaced = module.register_forward_hook(lambda _m, _a, out: outputs[0].flip(0))
        try:
            return torch.allclose(subject.forward(x), expected.flip(0), atol=1e-6)
        finally:
            replaced.remove()


def test_a_layer_can_be_explained_when_it_decides_the_logits():
    torch.manual_seed(0)
    subject = Subject(Crossing(), input_shape=(2, 5, 6))
    layers = {x.name: x for x in probe(subject)}
    answers = {name: is_all_that_counts(subject, name) for name in ("stem", "left", "right", "join", "top")}
    assert {name: layers[name].explainable for name in answers} == answers
    assert answers == {"stem": True, "left": False, "right": False, "join": True, "top": True}
    assert layers["constant"].reason == "it does not depend on the image"
    assert layers["pair"].reason == "its output (12, 5, 6) is not (batch, …) with one to three dimensions per image"
    assert layers["join"].type == "Identity"
    assert layers["stem"].shape == (4, 5, 6)
    assert list(layers) == ["stem", "constant", "pair", "left", "right", "join", "top"]  # as they finish


class Several(nn.Module):
    def forward(self, x):
        return x, x


class Unusual(nn.Module):
    """A module with two outputs, one with integers, one scalar and one with four dimensions per image."""

    def __init__(self):
        super().__init__()
        self.two, self.whole, self.scalar, self.deep = Several(), nn.Identity(), nn.Identity(), nn.Identity()
        self.top = nn.Linear(9, 2)

    def forward(self, x):
        x, _ = self.two(x)
        self.whole((x > 0).flatten(1).long())
        self.scalar(x.sum())
        self.deep(x[:, None])
        return self.top(x.flatten(1))


def test_outputs_that_are_no_activation_of_an_image():
    layers = {x.name: x for x in probe(Subject(Unusual(), input_shape=(1, 3, 3)))}
    assert layers["two"].reason == "its output is not one tensor"
    assert layers["two"].shape == ()
    for name in ("whole", "scalar", "deep"):
        assert "is not (batch, …)" in layers[name].reason
        assert not layers[name].explainable
    assert layers["top"].explainable


def test_names_of_one_output_point_to_the_outermost():
    net = nn.Sequential(nn.Sequential(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())), nn.Flatten(), nn.Linear(2, 2))
    layers = {x.name: x.same_as for x in probe(Subject(net, input_shape=(1, 3, 3)))}
    assert layers["0.0.0"] == ""  # before the ReLU: another output
    assert layers["0.0.1"] == ""  # the first to finish
    assert layers["0.0"] == ""  # further out than the one before
    assert layers["0"] == ""
    assert layers["1"] == ""  # the same numbers in another shape
    inner = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(nn.Identity()), nn.Flatten(), nn.Linear(2, 2))
    layers = {x.name: x.same_as for x in probe(Subject(inner, input_shape=(1, 3, 3)))}
    assert layers == {"0": "", "1.0": "0", "1": "0", "2": "", "3": ""}


class Moves(nn.Module):
    """Modules of our own that compute nothing, and some that look like it."""

    class Same(nn.Module):
        def forward(self, x):
            return x * 1

    class Frame(nn.Module):
        def forward(self, x):
            return nn.functional.pad(x, (1, 2, 0, 1))

    class Turned(nn.Module):
        def forward(self, x):
            return x.flip(3).transpose(2, 3)

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3)
        self.same, self.frame, self.turned, self.sums = self.Same(), self.Frame(), self.Turned(), self.Same()
        self.bent, self.fc = nn.ReLU(inplace=True), nn.Linear(4, 3)

    def forward(self, x):
        x = self.turned(self.frame(self.same(self.bent(self.a(x)))))
        x = self.sums(x[:, :, 1:-1, 1:-1] + self.b(x))
        return self.fc(x.mean((2, 3)))


def test_a_layer_that_only_moves_numbers_is_seen_by_its_numbers():
    layers = {x.name: x for x in probe(Subject(Moves(), input_shape=(1, 9, 7)))}
    assert [k for k, x in layers.items() if x.is_passive] == ["same", "frame", "turned"]
    assert not layers["bent"].is_passive  # in place: its input has become its output
    assert not layers["sums"].is_passive  # the only name that the sum has


def test_probing_leaves_no_hooks_and_works_with_gradients_off(tiny):
    with torch.no_grad():
        layers = probe(tiny)
    assert any(x.explainable for x in layers)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in tiny.module.modules())


def test_logits_without_a_gradient_are_refused():
    class Steps(nn.Module):
        def forward(self, x):
            return (x.flatten(1)[:, :3] > 0.5).float()

    subject = Subject(Steps(), input_shape=(1, 3, 3))
    with pytest.raises(ModelError, match="logits do not depend on the image in a differentiable way"):
        probe(subject)
