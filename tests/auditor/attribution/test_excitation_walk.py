"""A walk against explicit matrices: linear layers, what activations lend, conservation of mass at every operation."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from auditor.attribution.excitation import ExcitationBackprop
from tests.auditor.attribution.slow_walk import dense_matrix, family, reference_rule, seeded, small_resnet, walk_of


class Mean(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))


LINEAR = {
    "linear": (nn.Linear(12, 7), (12,)),
    "conv": (nn.Conv2d(3, 4, 3, padding=1), (3, 5, 7)),
    "strided uneven conv": (nn.Conv2d(2, 3, (3, 2), stride=(2, 3), padding=(1, 0)), (2, 6, 8)),
    "dilated conv": (nn.Conv2d(2, 3, 3, dilation=2, padding=2), (2, 6, 7)),
    "grouped conv": (nn.Conv2d(4, 6, 3, groups=2, stride=2), (4, 7, 6)),
    "depthwise conv": (nn.Conv2d(4, 4, 3, groups=4, padding=1), (4, 5, 6)),
    "conv padded same with an even kernel": (nn.Conv2d(2, 2, 4, padding="same"), (2, 6, 5)),
    "conv1d": (nn.Conv1d(3, 2, 3, stride=2), (3, 9)),
    "conv3d": (nn.Conv3d(1, 2, 2), (1, 3, 4, 3)),
    "transposed conv": (nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1), (2, 4, 3)),
    "average pool": (nn.AvgPool2d(2), (2, 5, 6)),
    "padded average pool": (nn.AvgPool2d(3, stride=2, padding=1, ceil_mode=True), (2, 6, 7)),
    "adaptive average pool": (nn.AdaptiveAvgPool2d((2, 3)), (2, 5, 7)),
    "global mean": (Mean(), (3, 4, 5)),
}


@pytest.mark.parametrize("contrastive", [False, True])
@pytest.mark.parametrize("name", LINEAR)
def test_every_linear_layer_follows_its_explicit_matrix(name, contrastive):
    layer, shape = LINEAR[name]
    layer = layer.double()
    x = torch.rand(2, *shape, generator=seeded(), dtype=torch.float64)
    x[x < 0.3] = 0
    walk = walk_of(layer, x)
    p = torch.randn(3, *walk.values[walk.graph.output].shape, generator=seeded(1), dtype=torch.float64)
    got = walk.down(walk.graph.output, p, walk.graph.input, p if contrastive else None)
    with torch.no_grad():
        W = dense_matrix(layer, shape)
    for k in range(3):
        for i in range(2):
            want = reference_rule(W, x[i].flatten(), p[k, i].flatten())
            if contrastive:
                want = want - reference_rule(W, x[i].flatten(), p[k, i].flatten(), sign=-1)
            torch.testing.assert_close(got[k, i].flatten(), want, rtol=0, atol=1e-12)  # sums of < 100 float64 terms


SHIFTED = {"Tanh": 1.0, "ELU": 0.5, "SELU": 1.0507009873554805 * 1.6732632423543772, "Hardtanh": 1.0}
CLIPPED = {"SiLU", "Hardswish", "GELU", "LeakyReLU", "Dropout"}
ACTS = [nn.ReLU(), nn.ReLU6(), nn.Sigmoid(), nn.Tanh(), nn.ELU(0.5), nn.SELU(), nn.SiLU(), nn.Hardswish(), nn.GELU(),
        nn.LeakyReLU(0.1), nn.Softplus(), nn.Hardtanh(), nn.Dropout(0.5)]  # fmt: skip


@pytest.mark.parametrize("act", ACTS, ids=lambda a: type(a).__name__)
def test_activations_pass_mass_and_lend_their_excitation(act):
    """Bounded activations are shifted by their bound, the others clipped at 0; then the next layer splits by them."""
    torch.manual_seed(0)
    name = type(act).__name__
    net = nn.Sequential(nn.Linear(6, 9), act, nn.Linear(9, 4)).double().eval()
    x = torch.rand(1, 6, generator=seeded(3), dtype=torch.float64) * 4
    engine = ExcitationBackprop(net, torch.cat([x, x]))
    with torch.no_grad():
        h = act(net[0](x))[0]
    a = h + SHIFTED[name] if name in SHIFTED else h.clamp(min=0)
    p_h = reference_rule(net[2].weight.detach()[2:3], a, torch.ones(1, dtype=torch.float64))
    want = reference_rule(net[0].weight.detach(), x[0], p_h)
    torch.testing.assert_close(engine.masses(x, [2], contrastive=False)[0, 0], want, rtol=0, atol=1e-12)
    assert any("clipped" in n for n in engine.maps(x, [2]).notes) == (name in CLIPPED)


class Branches(nn.Module):
    """Concatenation, residual sum of a signed and a non-negative branch, a gate, a channel shuffle and a split."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(2, 4, 1), nn.Conv2d(8, 8, 1)
        self.gate, self.fc = nn.Conv2d(8, 8, 1), nn.Linear(8, 3)

    def forward(self, x):
        y = torch.cat([F.relu(self.a(x)), torch.tanh(self.b(x))], 1)
        y = F.relu(y + self.c(y))
        y = y * torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True)))
        y = y.view(len(y), 2, 4, *y.shape[2:]).transpose(1, 2).flatten(1, 2)
        one, two = y.chunk(2, 1)
        return self.fc(torch.cat([two, one], 1).mean((2, 3)))


def conserving_walk(net, x):
    """Walk from all logits to the pixels and check at every node: it hands down what parents with a child got."""
    walk = walk_of(net, x)
    calls = []

    def check(node, p, children):
        assert p.min() >= 0
        got, passed = p.flatten(1).sum(1), sum(m.flatten(1).sum(1) for _, m in children)
        linear = walk.linear(node)
        live = [n for n in node.all_input_nodes if n in walk.graph.live]
        if linear is not None:
            got_by_parents = p * (linear.spread(walk.excitation(linear.child)) > 1e-30)
        elif "add" in str(node.target) and len(live) == 2:
            got_by_parents = p * (sum(walk.excitation(n) for n in live) > 1e-30)
        elif "layer_norm" in str(node.target):
            got_by_parents = p * (walk.values[node.args[2]] > 0)
        else:
            got_by_parents = p
        torch.testing.assert_close(passed, got_by_parents.flatten(1).sum(1), rtol=0, atol=1e-9)
        assert bool((passed <= got + 1e-9).all())
        calls.append(node)

    walk.on_step = check
    out = walk.values[walk.graph.output]
    p = torch.eye(out.shape[1], dtype=torch.float64)[:3, None].expand(-1, len(x), -1)
    total = walk.down(walk.graph.output, p, walk.graph.input)
    walk.on_step = None  # the fast walk, which multiplies late, gives the same
    torch.testing.assert_close(walk.down(walk.graph.output, p, walk.graph.input), total, rtol=0, atol=1e-9)
    return calls, total


@pytest.mark.parametrize("make", [Branches, small_resnet])
def test_mass_is_conserved_at_every_layer(make):
    torch.manual_seed(1)
    x = torch.rand(2, *((2, 5, 7) if make is Branches else (3, 13, 17)), generator=seeded(), dtype=torch.float64)
    visited, _ = conserving_walk(make().double(), x)
    assert len(visited) >= 8


class Sum(nn.Module):
    def forward(self, x):
        return x[:, :1] + x[:, 1:]


def test_average_pool_residual_and_tanh_known_answers():
    walk = walk_of(nn.AvgPool2d((1, 2)), torch.tensor([[[[1.0, 3.0, 0.0, 0.0]]]]))
    split = walk.down(walk.graph.output, torch.ones(1, 1, 1, 1, 2), walk.graph.input)
    assert split.flatten().tolist() == [0.25, 0.75, 0, 0]
    walk = walk_of(Sum(), torch.tensor([[1.0, 3.0]]))
    assert walk.down(walk.graph.output, torch.ones(1, 1, 1), walk.graph.input).flatten().tolist() == [0.25, 0.75]
    net = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Tanh(), nn.Linear(2, 1, bias=False)).double()
    net[0].weight.data = torch.tensor([[-40.0], [0.0]], dtype=torch.float64)
    net[2].weight.data = torch.ones(1, 2, dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    engine = ExcitationBackprop(net, torch.cat([one, one]))
    assert engine.masses(one, [0], stop="1", contrastive=False)[0, 0].tolist() == [0, 1]


CONSERVING = ["resnet18", "vgg11", "squeezenet1_1", "mobilenet_v3_small", "efficientnet_b0"]
LOSSY = {"mobilenet_v3_small", "efficientnet_b0"}  # depthwise convolutions after hardswish and SiLU


@pytest.mark.slow
@pytest.mark.parametrize("name", CONSERVING)
def test_mass_is_conserved_at_every_layer_of_torchvision_families(name):
    x = torch.rand(2, 3, 64, 64, generator=seeded(), dtype=torch.float64)
    visited, total = conserving_walk(family(name).double(), x)
    assert len(visited) > 20
    if name not in LOSSY:
        torch.testing.assert_close(total.flatten(2).sum(2), torch.ones(total.shape[:2]).double(), rtol=0, atol=1e-6)
