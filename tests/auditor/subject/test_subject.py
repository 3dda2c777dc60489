import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.errors import ModelError, OptionError, ShapeError


def test_digest_is_over_names_shapes_and_bytes(tiny):
    import hashlib

    h = hashlib.sha256()
    for key, value in sorted(tiny.module.state_dict().items()):
        h.update(f"{key}|{value.dtype}|{tuple(value.shape)}|".encode() + value.numpy().tobytes())
    assert tiny.identity.weights == h.hexdigest()
    other = Subject(tiny.module, input_shape=(1, 13, 17))
    with torch.no_grad():
        tiny.module.fc.bias[0] += 1e-7
    assert Subject(tiny.module, input_shape=(1, 13, 17)).digest != tiny.digest
    assert other.n_classes == 3


def test_activations_and_forward_from_compose(tiny):
    x = torch.rand(6, 1, 13, 17)
    logits, outputs = tiny.run(x, ["relu", "conv"])
    torch.testing.assert_close(tiny.forward_from("relu", outputs["relu"]), logits)
    torch.testing.assert_close(tiny.forward_from("conv", outputs["conv"]), logits)
    assert tiny.forward_from("relu", outputs["relu"][:1]).shape == (1, 3)


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


def test_one_logit_with_one_name_is_a_yes_or_no():
    subject = Subject(nn.Sequential(nn.Flatten(), nn.Linear(4, 1)), input_shape=(1, 2, 2), class_names=["yes"])
    assert subject.probabilities(torch.tensor([[0.0]])).tolist() == [[0.5]]


class Viewed(nn.Module):
    """Makes a vector of a map by ``view``, which maps with channels last cannot take."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(2, 3, 3, padding=1), nn.Linear(3 * 13 * 17, 4)

    def forward(self, x):
        y = self.conv(x)
        return self.fc(y.view(len(y), -1))


@pytest.mark.parametrize("can", [True, False])
def test_images_go_with_channels_last_where_the_module_takes_them(can):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 11 * 15, 4)) if can else Viewed()
    subject = Subject(net.eval(), input_shape=(2, 13, 17))
    x = torch.rand(3, 2, 13, 17)
    fast = subject.in_fast_layout(x)
    assert torch.equal(fast, x)
    assert fast.is_contiguous(memory_format=torch.channels_last) is can
    torch.testing.assert_close(subject.logits(fast), subject.logits(x))
