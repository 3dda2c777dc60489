import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.errors import LayerError, ModelError, OptionError, ShapeError
from auditor.subject.layers import layout_of


def test_digest_is_over_names_shapes_and_bytes(tiny):
    import hashlib

    h = hashlib.sha256()
    for key, value in sorted(tiny.module.state_dict().items()):
        h.update(f"{key}|{value.dtype}|{tuple(value.shape)}|".encode() + value.numpy().tobytes())
    assert tiny.digest == h.hexdigest()
    other = Subject(tiny.module, input_shape=(1, 13, 17))
    with torch.no_grad():
        tiny.module.fc.bias[0] += 1e-7
    assert Subject(tiny.module, input_shape=(1, 13, 17)).digest != tiny.digest
    assert other.n_classes == 3


def test_activations_and_forward_from_compose(tiny):
    x = torch.rand(6, 1, 13, 17)
    logits, found = tiny.run(x, ["relu", "conv"])
    torch.testing.assert_close(tiny.forward_from("relu", found["relu"]), logits)
    torch.testing.assert_close(tiny.forward_from("conv", found["conv"]), logits)
    assert tiny.forward_from("relu", found["relu"][:1]).shape == (1, 3)


def test_mean_and_std_are_applied_inside():
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    subject = Subject(net, input_shape=(3, 2, 2), mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 2.0))
    x = torch.rand(4, 3, 2, 2)
    expected = (x - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / torch.tensor([0.5, 0.25, 2.0])[:, None, None]
    torch.testing.assert_close(subject.logits(x), net(expected))


def test_nothing_of_the_users_model_is_left_changed(tiny):
    net = tiny.module.train()
    net.conv.weight.requires_grad_(False)
    before = [(m.training, len(m._forward_hooks)) for m in net.modules()]
    flags = [p.requires_grad for p in net.parameters()]
    x = torch.rand(2, 1, 13, 17)
    tiny.layers()
    tiny.forward_from("relu", tiny.activations(x, ["relu"])["relu"])
    with pytest.raises(ShapeError):
        tiny.logits(torch.rand(2, 1, 5, 5))
    assert [(m.training, len(m._forward_hooks)) for m in net.modules()] == before
    assert [p.requires_grad for p in net.parameters()] == flags
    assert all(p.grad is None for p in net.parameters())


def test_gradients_reach_the_pixels(tiny):
    x = torch.rand(2, 1, 13, 17, requires_grad=True)
    (g,) = torch.autograd.grad(tiny.logits(x).sum(), x)
    assert bool(g.any())


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
    assert reasons["act"] == "it is called 2 times in one pass"
    assert "skip connection" in reasons["b"]
    assert reasons["body"] == ""
    assert subject.default_layer() == "body"
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


@pytest.mark.parametrize(("target", "index"), [("b", 1), (2, 2), ("0", 0)])
def test_class_by_name_or_index(tiny, target, index):
    assert tiny.class_index(target) == index


@pytest.mark.parametrize("target", ["nosuch", 3, -1, "17"])
def test_class_that_is_not_there(tiny, target):
    with pytest.raises(OptionError, match="target: "):
        tiny.class_index(target)


def test_wrong_construction_is_said():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    with pytest.raises(ModelError, match=r"does not run on images of shape \(1, 9, 9\)"):
        Subject(net, input_shape=(1, 9, 9))
    with pytest.raises(OptionError, match="2 outputs, got 3 class names"):
        Subject(net, input_shape=(1, 8, 8), class_names=["a", "b", "c"])
    with pytest.raises(OptionError, match="std must be positive"):
        Subject(net, input_shape=(1, 8, 8), std=0.0)
    with pytest.raises(ModelError, match="only image classifiers"):
        Subject(nn.Conv2d(1, 2, 3), input_shape=(1, 8, 8))


@pytest.mark.parametrize(
    ("shape", "size", "name", "grid", "prefix"),
    [
        ((512, 7, 7), (224, 224), "map", (7, 7), 0),
        ((7, 7, 768), (224, 224), "map-last", (7, 7), 0),
        ((197, 768), (224, 224), "tokens", (14, 14), 1),
        ((196, 768), (224, 224), "tokens", (14, 14), 0),
        ((201, 768), (224, 224), "tokens", (14, 14), 5),
        ((33, 8), (32, 64), "tokens", (4, 8), 1),
        ((9,), (8, 8), "vector", (1, 1), 0),
    ],
)
def test_layouts(shape, size, name, grid, prefix):
    layout = layout_of(shape, size)
    assert (layout.name, layout.grid, layout.prefix) == (name, grid, prefix)
    z = torch.rand(3, *shape)
    p = layout.to_positions(z)
    assert p.shape == (3, layout.channels, layout.n_positions)
    torch.testing.assert_close(layout.from_positions(p, z), z)


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
        logits, found = subject.run(x, [layer])
        torch.testing.assert_close(subject.forward_from(layer, found[layer]), logits, rtol=1e-4, atol=1e-5)


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


def test_one_logit_is_a_yes_or_no():
    from auditor.explainers.explanation import class_scores

    (p,), _ = class_scores(torch.tensor([[0.0]]), ("yes",), [0])
    assert p.probability == 0.5
