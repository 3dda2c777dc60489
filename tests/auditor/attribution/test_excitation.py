import io
import resource

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from auditor.network.aten_graph import AtenGraph
from auditor.errors import LayerError, NumericsError, OptionError, ShapeError
from auditor.attribution.excitation import ExcitationBackprop
from auditor.attribution.excitation_walk import Walk


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def hand_net():
    net = nn.Sequential(nn.Linear(4, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False))
    net[0].weight.data = torch.tensor([[1.0, -1, 2, 1], [2, 1, 1, -1]])
    net[2].weight.data = torch.tensor([[3.0, -1], [1, 2]])
    return net, torch.tensor([[1.0, 2, 0, 3]])


def dense_matrix(linear, shape):
    """Push every basis vector through a linear map without its bias: plainly right, hopelessly slow."""
    n = int(torch.tensor(shape).prod())
    at_zero = linear(torch.zeros(1, *shape, dtype=torch.float64))
    return torch.stack([(linear(e.view(1, *shape)) - at_zero).flatten() for e in torch.eye(n, dtype=torch.float64)], 1)


def reference_rule(W, a, p, sign=1):
    """p_in[j] = sum_i  w_ij^+ a_j / sum_k w_ik^+ a_k  p[i], one parent after the other."""
    W = (sign * W).clamp(min=0)
    p_in = torch.zeros_like(a)
    for i in range(len(W)):
        share = W[i] * a
        if share.sum() > 0:
            p_in += share / share.sum() * p[i]
    return p_in


def walk_of(net, x, floor=0.0):
    graph = AtenGraph.trace(net, x if len(x) > 1 else torch.cat([x, x]))
    return Walk(graph, graph.run(x), frozenset(), torch.tensor(floor, dtype=x.dtype), {})


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


@pytest.mark.parametrize("pool", [nn.MaxPool2d(3, stride=2, padding=1), nn.MaxPool2d(2), nn.AdaptiveMaxPool2d((2, 3))])
def test_max_pool_routes_to_the_winner_also_with_overlapping_windows(pool):
    x = torch.rand(2, 3, 7, 9, generator=seeded(), dtype=torch.float64)
    walk = walk_of(pool, x)
    p = torch.randn(2, *walk.values[walk.graph.output].shape, generator=seeded(1), dtype=torch.float64)
    got = walk.down(walk.graph.output, p, walk.graph.input)
    for k in range(2):
        y = x.clone().requires_grad_()
        (pool(y) * p[k]).sum().backward()
        torch.testing.assert_close(got[k], y.grad)


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


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x
        return self.relu(y)


def small_resnet():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(True), nn.MaxPool2d(2), Block(), Block(),
                        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))  # fmt: skip
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.normal_(m.weight)
            nn.init.normal_(m.bias)
            nn.init.normal_(m.running_mean, std=0.1)
            nn.init.uniform_(m.running_var, 0.5, 2)
    return net.eval()


def conserving_walk(net, x):
    """Walk from all logits to the pixels and check at every node: it hands down what parents with a child got."""
    walk = walk_of(net, x)
    seen = []

    def check(node, p, children):
        assert p.min() >= 0
        got, given = p.flatten(1).sum(1), sum(m.flatten(1).sum(1) for _, m in children)
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
        torch.testing.assert_close(given, got_by_parents.flatten(1).sum(1), rtol=0, atol=1e-9)
        assert bool((given <= got + 1e-9).all())
        seen.append(node)

    walk.on_step = check
    out = walk.values[walk.graph.output]
    p = torch.eye(out.shape[1], dtype=torch.float64)[:3, None].expand(-1, len(x), -1)
    total = walk.down(walk.graph.output, p, walk.graph.input)
    walk.on_step = None  # the fast walk, which multiplies late, gives the same
    torch.testing.assert_close(walk.down(walk.graph.output, p, walk.graph.input), total, rtol=0, atol=1e-9)
    return seen, total


@pytest.mark.parametrize("make", [Branches, small_resnet])
def test_mass_is_conserved_at_every_layer(make):
    torch.manual_seed(1)
    x = torch.rand(2, *((2, 5, 7) if make is Branches else (3, 13, 17)), generator=seeded(), dtype=torch.float64)
    seen, _ = conserving_walk(make().double(), x)
    assert len(seen) >= 8


class Depthwise(nn.Module):
    """The part of MobileNet v3 that loses mass: a depthwise convolution after hardswish."""

    def __init__(self):
        super().__init__()
        self.up, self.act = nn.Conv2d(3, 8, 1), nn.Hardswish()
        self.deep, self.fc = nn.Conv2d(8, 8, 3, groups=8), nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(F.relu(self.deep(self.act(self.up(x)))).mean((2, 3)))


def test_lost_mass_is_told_layer_by_layer_and_accounts_for_all_of_it():
    torch.manual_seed(3)
    net = Depthwise().double()
    with torch.no_grad():
        net.up.bias[:4] = -2.0  # these channels are small and negative after hardswish: clipped to 0
        net.deep.bias.fill_(1.0)  # and still every unit above them fires
    x = torch.rand(2, 3, 7, 9, generator=seeded(), dtype=torch.float64)
    engine = ExcitationBackprop(net, x)
    lost = engine.lost(x, [0, 1, 2, 3])
    kept = engine.masses(x, [0, 1, 2, 3], contrastive=False).flatten(2).sum(2).mean()
    assert set(lost) == {"deep"}
    assert 0.1 < lost["deep"] < 0.9
    torch.testing.assert_close(float(kept) + lost["deep"], 1.0, rtol=0, atol=1e-9)
    net, x = hand_net()
    assert ExcitationBackprop(net, torch.cat([x, x])).lost(x, [0, 1]) == {}


def test_known_answers_of_the_hand_computed_net():
    net, x = hand_net()
    engine = ExcitationBackprop(net, torch.cat([x, x]))
    mwp = engine.masses(x, [0, 1], contrastive=False)[0]
    assert mwp.tolist() == [[0.25, 0, 0, 0.75], [0.375, 0.25, 0, 0.375]]
    assert engine.masses(x, [0, 1])[0].tolist() == [[-0.25, -0.5, 0, 0.75], [0.375, 0.25, 0, 0.375]]
    assert engine.masses(x, [0, 1], stop="1", contrastive=False)[0].tolist() == [[1, 0], [0.5, 0.5]]
    maps = engine.maps(x, [0, 1])
    assert maps.maps[0, 0].flatten().tolist() == [0, 0, 0, 1]
    assert maps.mass[0].tolist() == [0.75, 1.0]


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


def never_fold(engine):
    """Batch norm as a layer of its own: mass passes through it."""
    engine.graph.folds = lambda node, pinned=frozenset(): False
    return engine


def test_batch_norm_folds_and_negative_scales_equal_flipped_filters():
    x = torch.rand(2, 3, 8, 9, dtype=torch.float64, generator=seeded())

    def net(gamma):
        torch.manual_seed(0)
        n = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(168, 3)).double()
        n[1].weight.data = gamma
        n[1].running_mean.normal_(generator=seeded(1), std=0.1)
        return n.eval()

    gamma = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    folded = ExcitationBackprop(net(gamma), x).masses(x, [0, 1])
    plain = never_fold(ExcitationBackprop(net(gamma), x)).masses(x, [0, 1])
    torch.testing.assert_close(plain, folded, rtol=0, atol=1e-12)
    sign = torch.tensor([1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
    negative, flipped = net(gamma * sign), net(gamma)
    with torch.no_grad():
        flipped[0].weight.mul_(sign.view(-1, 1, 1, 1))
        flipped[0].bias.mul_(sign)
        flipped[1].running_mean.mul_(sign)
    torch.testing.assert_close(negative(x), flipped(x))
    want = never_fold(ExcitationBackprop(flipped, x)).masses(x, [0, 1])
    torch.testing.assert_close(ExcitationBackprop(negative, x).masses(x, [0, 1]), want, rtol=0, atol=1e-12)


def test_contrastive_equals_the_difference_of_two_full_walks():
    net = small_resnet().double()
    x = torch.rand(2, 3, 13, 17, generator=seeded(), dtype=torch.float64)
    engine = ExcitationBackprop(net, x)
    dual = small_resnet().double()
    dual[-1].weight.data.neg_()
    three = [0, 2, 4]
    want = engine.masses(x, three, contrastive=False) - ExcitationBackprop(dual, x).masses(x, three, contrastive=False)
    got = engine.masses(x, three)
    assert got.abs().max() > 1e-4
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def test_a_batch_equals_its_images_one_by_one_and_neurons_may_differ_per_image():
    net = small_resnet()
    x = torch.rand(5, 3, 13, 17, generator=seeded())
    engine = ExcitationBackprop(net, x)
    whole = engine.maps(x, [0, 3, 1])
    assert whole.maps.std() > 0
    for i in range(5):
        alone = engine.maps(x[i : i + 1], [0, 3, 1])
        torch.testing.assert_close(alone.maps[0], whole.maps[i], rtol=1e-4, atol=1e-6)
    mixed = engine.maps(x, torch.tensor([[0, 3], [1, 0], [2, 2], [0, 1], [3, 0]]))
    torch.testing.assert_close(mixed.maps[0], whole.maps[0, :2], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(mixed.maps[1, 0], whole.maps[1, 2], rtol=1e-4, atol=1e-6)


def through_pt2(net, x):
    file = io.BytesIO()
    torch.export.save(torch.export.export(net, (x,), strict=False), file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_pt2_model_gives_the_same_maps_as_the_module_it_came_from(batch):
    net = small_resnet()
    x = torch.rand(3, 3, 13, 17, generator=seeded())
    want = ExcitationBackprop(net, x[:2]).maps(x, [0, 1], stop="4")
    program = through_pt2(net, x[:batch])  # a frozen batch: images go through in turns
    for model in (program, torch.export.unflatten(program)):
        got = ExcitationBackprop(model, x[:batch]).maps(x, [0, 1], stop="4")
        torch.testing.assert_close(got.maps, want.maps, rtol=1e-4, atol=1e-6)


def test_start_at_any_layer_and_stop_at_any_layer():
    net = small_resnet()
    x = torch.rand(2, 3, 13, 17, generator=seeded())
    engine = ExcitationBackprop(net, x)
    assert engine.masses(x, [0, 1], stop="4.relu", contrastive=False).shape == (2, 2, 6, 5, 7)
    channel = engine.maps(x, [2], start="2", contrastive=False)  # a whole channel
    unit = engine.maps(x, torch.tensor([[2, 1, 3]]), start="2", contrastive=False)  # one unit of it
    assert channel.maps.shape == unit.maps.shape == (2, 1, 13, 17)
    assert 0 < int((unit.maps[0, 0] > 0).sum()) <= 9 < int((channel.maps[0, 0] > 0).sum())  # its receptive field
    at_conv = engine.masses(x, [1], start="4.conv1", stop="2")  # a convolution that would be folded, pinned open
    assert at_conv.abs().sum() > 0


def test_head_attached_to_a_layer_equals_one_long_network():
    net = small_resnet()
    head = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3), nn.ReLU())
    x = torch.rand(2, 3, 13, 17, generator=seeded())
    got = ExcitationBackprop(net, x, head=head, layer="7").masses(x, [0, 1, 2])
    want = ExcitationBackprop(nn.Sequential(*net[:8], head), x).masses(x, [0, 1, 2])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


def test_silent_relu_neuron_is_flagged_and_negative_tanh_neuron_stands_for_its_dual():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
    net[0].weight.data = torch.tensor([[1.0, 1.0], [-2.0, 1.0]])
    x = torch.tensor([[1.0, 1.0]])
    maps = ExcitationBackprop(net, torch.cat([x, x])).maps(x, [0, 1])
    assert maps.inactive[0].tolist() == [False, True]
    engine = ExcitationBackprop(nn.Sequential(net[0], nn.Tanh()), torch.cat([x, x]))
    assert engine.masses(x, [1], contrastive=False)[0, 0].tolist() == [1, 0]  # the weight -2 made it negative
    assert engine.masses(x, [1])[0, 0].tolist() == [1, -1]


def test_an_empty_map_is_none_and_not_zeros():
    net = nn.Sequential(nn.Linear(2, 1, bias=False))
    net[0].weight.data = torch.tensor([[-1.0, -2.0]])
    x = torch.ones(1, 2)
    maps = ExcitationBackprop(net, torch.cat([x, x])).maps(x, [0])
    assert maps.empty[0, 0]
    assert maps.heatmap(0, 0) is None


MEAN, STD = torch.tensor([0.4, 0.5]).view(1, 2, 1, 1), torch.tensor([0.2, 0.3]).view(1, 2, 1, 1)


class Normalised(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
        self.register_buffer("mean", MEAN)
        self.register_buffer("std", STD)

    def forward(self, x):
        return self.net((x - self.mean) / self.std)


def test_zero_pixels_get_nothing_and_normalised_input_equals_folded_normalisation():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(140, 3))
    x = torch.rand(2, 2, 7, 9, generator=seeded())
    x[:, :, 2] = 0
    inside = ExcitationBackprop(Normalised(net), x).masses(x, [0, 1], contrastive=False)
    engine = ExcitationBackprop(net, x, floor=(-MEAN / STD).flatten().tolist())
    outside = engine.masses((x - MEAN) / STD, [0, 1], contrastive=False)
    torch.testing.assert_close(inside, outside, rtol=1e-4, atol=1e-6)
    assert outside[:, :, :, 2].abs().max() < 1e-6
    torch.testing.assert_close(inside.sum((2, 3, 4)), torch.ones(2, 2), rtol=0, atol=1e-5)


def test_the_users_model_is_left_as_it_was():
    net = small_resnet().train()
    net[0].weight.requires_grad_(False)
    net[4].eval()
    modes = [m.training for m in net.modules()]
    flags = [p.requires_grad for p in net.parameters()]
    state = {k: v.clone() for k, v in net.state_dict().items()}
    x = torch.rand(2, 3, 13, 17)
    ExcitationBackprop(net, x).maps(x, [0])
    assert modes == [m.training for m in net.modules()]
    assert flags == [p.requires_grad for p in net.parameters()]
    assert all(torch.equal(v, net.state_dict()[k]) for k, v in state.items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert all(p.grad is None for p in net.parameters())


def test_weights_trained_on_after_tracing_are_seen():
    net, x = hand_net()
    engine = ExcitationBackprop(net, torch.cat([x, x]))
    engine.maps(x, [0])
    with torch.no_grad():
        net[2].weight.copy_(torch.tensor([[1.0, 2], [3, -1]]))
    assert engine.masses(x, [1], contrastive=False)[0, 0].tolist() == [0.25, 0, 0, 0.75]


def test_memory_does_not_grow_over_a_thousand_calls():
    net, x = small_resnet(), torch.rand(1, 3, 13, 17)
    engine = ExcitationBackprop(net, torch.cat([x, x]))
    for _ in range(50):
        engine.maps(x, [0, 1])
    kept, before = len(engine.graph.clipped), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(950):
        engine.maps(x, [0, 1])
    assert len(engine.graph.clipped) == kept
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB; leaked walks would be 200 MB


class Odd(nn.Module):
    def forward(self, x):
        return x.cumsum(1)


def test_bad_input_is_one_clear_sentence():
    x = torch.rand(2, 6)
    with pytest.raises(LayerError, match=r"no rule for aten\.cumsum"):
        ExcitationBackprop(Odd(), x).maps(x, [0])
    net, x = hand_net()
    engine = ExcitationBackprop(net, torch.cat([x, x]))
    with pytest.raises(LayerError, match="no operation belongs to layer 'nope'"):
        engine.maps(x, [0], stop="nope")
    with pytest.raises(LayerError, match="Stop at a layer below"):
        engine.maps(x, [0], start="0", stop="1")
    with pytest.raises(OptionError, match="from 0 to 1"):
        engine.maps(x, [2])
    with pytest.raises(ShapeError, match=r"got \(1, 5\)"):
        engine.maps(torch.rand(1, 5), [0])
    with pytest.raises(NumericsError, match="below `floor`"):
        engine.maps(-x, [0])
    with pytest.raises(NumericsError, match="NaN"):
        engine.maps(x * torch.nan, [0])
    with pytest.raises(LayerError, match="never start above a softmax"):
        ExcitationBackprop(nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), torch.cat([x, x])).maps(x, [0])


FAMILIES = {"resnet18": 64, "vgg11": 64, "squeezenet1_1": 64, "mobilenet_v3_small": 64, "vit_b_16": 224}
CONSERVING = ["resnet18", "vgg11", "squeezenet1_1", "mobilenet_v3_small", "efficientnet_b0"]
LOSSY = {"mobilenet_v3_small", "efficientnet_b0"}  # depthwise convolutions after hardswish and SiLU


def family(name):
    from torchvision import models

    torch.manual_seed(0)
    net = getattr(models, name)(weights=None).eval()
    for m in net.modules():
        if isinstance(m, nn.Linear) and not m.weight.any():
            nn.init.normal_(m.weight)  # torchvision starts some heads at zero
    return net


@pytest.mark.slow
@pytest.mark.parametrize("name", CONSERVING)
def test_mass_is_conserved_at_every_layer_of_torchvision_families(name):
    x = torch.rand(2, 3, 64, 64, generator=seeded(), dtype=torch.float64)
    seen, total = conserving_walk(family(name).double(), x)
    assert len(seen) > 20
    if name not in LOSSY:
        torch.testing.assert_close(total.flatten(2).sum(2), torch.ones(total.shape[:2]).double(), rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_torchvision_families_in_memory_and_as_pt2(name):
    net = family(name)
    size = FAMILIES[name]
    x = torch.rand(2, 3, size, size, generator=seeded())
    want = ExcitationBackprop(net, x).maps(x, [0, 5])
    assert not want.empty.any()
    got = ExcitationBackprop(torch.export.unflatten(through_pt2(net, x)), x).maps(x, [0, 5])
    torch.testing.assert_close(got.maps, want.maps, rtol=1e-3, atol=1e-6)
