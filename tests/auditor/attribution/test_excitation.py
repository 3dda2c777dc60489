import io
import resource

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from auditor.attribution.excitation import ExcitationBackprop
from auditor.errors import LayerError, NumericsError, OptionError, ShapeError
from tests.auditor.attribution.slow_walk import family, seeded, small_resnet


def hand_net():
    net = nn.Sequential(nn.Linear(4, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False))
    net[0].weight.data = torch.tensor([[1.0, -1, 2, 1], [2, 1, 1, -1]])
    net[2].weight.data = torch.tensor([[3.0, -1], [1, 2]])
    return net, torch.tensor([[1.0, 2, 0, 3]])


class Depthwise(nn.Module):
    """The part of MobileNet v3 that loses mass: a depthwise convolution after hardswish."""

    def __init__(self):
        super().__init__()
        self.up, self.act = nn.Conv2d(3, 8, 1), nn.Hardswish()
        self.deep, self.fc = nn.Conv2d(8, 8, 3, groups=8), nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(F.relu(self.deep(self.act(self.up(x)))).mean((2, 3)))


class WithClassToken(nn.Module):
    """The sum of two patches and of a token that is the same for every image."""

    def __init__(self, token):
        super().__init__()
        self.token = nn.Parameter(torch.tensor([[[token]]]))

    def forward(self, x):
        tokens = torch.cat([self.token.expand(len(x), -1, -1), x[..., None]], 1)
        return tokens.mean(1)


def test_mass_that_ends_in_the_start_of_a_class_token_is_lost_and_said():
    x = torch.tensor([[1.0, 2.0]])
    engine = ExcitationBackprop(WithClassToken(5.0), torch.rand(2, 2))
    torch.testing.assert_close(engine.masses(x, [0], contrastive=False), torch.tensor([[[1 / 8, 2 / 8]]]))
    assert list(engine.lost(x, [0]).values()) == [pytest.approx(5 / 8)]
    assert any("class token" in note for note in engine.maps(x, [0]).notes)
    assert not any(
        "class token" in note for note in ExcitationBackprop(nn.Linear(2, 1), x.repeat(2, 1)).maps(x, [0]).notes
    )


def test_lost_mass_is_reported_layer_by_layer_and_accounts_for_all_of_it():
    torch.manual_seed(3)
    net = Depthwise().double()
    with torch.no_grad():
        net.up.bias[:4] = -2.0  # these channels are small and negative after hardswish: clipped to 0
        net.deep.bias.fill_(1.0)  # and still every unit above them fires
        net.deep.weight[:4].abs_()  # though no child excites it: no negative weight meets a negative activation
    x = torch.rand(2, 3, 7, 9, generator=seeded(), dtype=torch.float64)
    engine = ExcitationBackprop(net, x)
    lost = engine.lost(x, [0, 1, 2, 3])
    arrived = engine.masses(x, [0, 1, 2, 3], contrastive=False).flatten(2).sum(2).mean()
    assert max(lost, key=lost.get) == "deep"
    assert 0.1 < lost["deep"] < 0.9
    total = float(arrived) + sum(lost.values())
    torch.testing.assert_close(total, 1.0, rtol=0, atol=1e-4)  # a share below 1e-5 is left out
    with torch.no_grad():
        net.deep.weight[:4].neg_()  # now each of them does
    assert "deep" not in engine.lost(x, [0, 1, 2, 3])
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
    n_clipped, before = len(engine.graph.clipped), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(950):
        engine.maps(x, [0, 1])
    assert len(engine.graph.clipped) == n_clipped
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


@pytest.mark.filterwarnings("ignore")  # zennit registers hooks in torch's old way
def test_zennit_gives_the_same_shares():
    """Excitation backprop by others' code: the winning probability of every pixel, without biases as in the paper."""
    attributors = pytest.importorskip("zennit.attribution")
    composites = pytest.importorskip("zennit.composites")
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 5, 3), nn.ReLU(), nn.AvgPool2d((1, 2)),
        nn.Flatten(), nn.Linear(5, 4),
    ).double().eval()  # fmt: skip
    x = torch.rand(3, 2, 9, 13, dtype=torch.float64, generator=seeded())
    ours = ExcitationBackprop(net, x).masses(x, [0, 1, 2, 3], contrastive=False)
    composite = composites.ExcitationBackprop(stabilizer=1e-12, zero_params=["bias"])
    with attributors.Gradient(model=net, composite=composite) as attributor:
        for k in range(4):
            _, theirs = attributor(x.clone().requires_grad_(), torch.eye(4, dtype=torch.float64)[[k] * 3])
            assert float(theirs.abs().max()) > 0.01
            torch.testing.assert_close(ours[:, k], theirs, rtol=0, atol=1e-9)  # their divisions are stabilised
