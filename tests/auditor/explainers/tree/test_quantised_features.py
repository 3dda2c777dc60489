"""The quantised representation, its backbone and the soft tree."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.errors import LayerError
from auditor.explainers.tree import quantised_features
from auditor.explainers.tree.intersection_training import Recipe, TreeExamples, codes_of, train
from auditor.explainers.tree.quantised_features import Backbone, Representation, SoftTree


def blobs(n, seed, k=4, size=12):
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(k, size, generator=torch.Generator().manual_seed(9)) * 1.5
    y = torch.randint(0, k, (n,), generator=g)
    return TreeExamples(centres[y] + torch.randn(n, size, generator=g) * 0.5, y)


def plain_backbone(size=12, k=4):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Flatten(), nn.Linear(size, k))
    return Backbone(Subject(module, input_shape=(1, 3, 4), mean=0.0, std=1.0), "0")


def fresh(seed=0, k=4, size=12, **options):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Representation(size, 16, k, hidden=16, **options)


def weights(recipe, n=160):
    net = fresh()
    states = list(train(net, plain_backbone(), blobs(n, 1), blobs(60, 2), recipe))
    return torch.cat([p.detach().flatten() for p in net.parameters()]), states, net


def test_codes_are_those_of_the_frozen_range_whatever_the_batch():
    _, _, net = weights(Recipe(epochs=2))
    x = blobs(50, 3).x
    together, _ = codes_of(net, plain_backbone(), x)
    alone = np.concatenate([codes_of(net, plain_backbone(), row[None])[0] for row in x])
    np.testing.assert_array_equal(together, alone)
    assert together.max() <= 15
    assert len(np.unique(together)) > 3


def test_a_fine_tuned_backbone_moves_a_copy_and_never_the_model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))
    subject = Subject(module, input_shape=(1, 3, 4), mean=0.0, std=1.0)
    before, digest = copy.deepcopy(module.state_dict()), subject.digest
    backbone = Backbone(subject, "1", trainable=True)
    g = torch.Generator().manual_seed(0)
    x, y = torch.rand(60, 1, 3, 4, generator=g), torch.randint(0, 2, (60,), generator=g)
    net = fresh(k=2, size=backbone.n_inputs)
    list(train(net, backbone, TreeExamples(x[:40], y[:40]), TreeExamples(x[40:], y[40:]), Recipe(epochs=2)))
    assert all(torch.equal(module.state_dict()[k], before[k]) for k in before)
    assert subject.digest == digest
    assert not torch.equal(backbone.state()["0.weight"], before["0.weight"])
    assert torch.equal(backbone.state()["3.weight"], before["3.weight"])  # behind the layer: no gradient


def test_soft_tree_is_a_mixture():
    tree = SoftTree(5, 3, depth=3)
    p = tree(torch.randn(11, 5)).exp()
    torch.testing.assert_close(p.sum(1), torch.ones(11))


def test_maps_add_up_to_the_feature():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 35, 2))
    subject = Subject(module, input_shape=(1, 5, 7), mean=0.0, std=1.0)
    z = subject.activations(torch.rand(3, 1, 5, 7), ["1"])["1"].detach()
    for pooling in ("flatten", "mean"):
        backbone = Backbone(subject, "1", pooling=pooling)
        w = torch.randn(6, backbone.n_inputs)
        torch.testing.assert_close(backbone.maps(z, w).sum(-1), backbone.pool(z) @ w.T, rtol=1e-4, atol=1e-4)


def small_subject():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 35, 2))
    return Subject(module, input_shape=(1, 5, 7))


def representation(**options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Representation(6, 5, 3, **options)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_soft_tree_weighs_every_leaf_by_its_path(depth):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tree = SoftTree(5, 3, depth)
        x = torch.randn(7, 5)
    with torch.no_grad():
        stay = torch.sigmoid(tree.decide(x))
        total = torch.zeros(7, 3)
        for leaf, turns in enumerate(itertools.product((0, 1), repeat=depth)):
            reach, index, first = torch.ones(7), 0, 0
            for level, turn in enumerate(turns):
                p = stay[:, first + index]
                reach = reach * (1 - p if turn else p)
                first, index = first + 2**level, 2 * index + turn
            total += reach[:, None] * torch.softmax(tree.leaves[leaf], 0)
        torch.testing.assert_close(tree(x).exp(), total)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_round_the_features_in_steps_of_the_frozen_range(bits):
    net = representation(bits=bits)
    z = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        net.train()
        net.codes(z)
        net.eval()
        f, top = net.features(z), 2**bits - 1
        codes = net.codes(z)
        assert float(f.min()) == 0
        assert (float(net.lo), float(net.hi)) == pytest.approx((0, float(f.max())))  # zero is in the range
        assert set(codes.unique().tolist()) <= set(range(top + 1))
        assert (codes - f / net.hi * top).abs().max() <= 0.5 + 1e-4  # rounded to the nearest
        assert torch.equal(codes == 0, f / net.hi * top <= 0.5)
        beyond = net.codes(z * 100)
        assert float(beyond.max()) == top


@pytest.mark.parametrize("per_feature", [False, True])
def test_the_range_follows_batches_slowly_and_stands_still_in_evaluation(per_feature):
    net = representation(per_feature=per_feature)
    g = torch.Generator().manual_seed(1)
    first, second = torch.randn(30, 6, generator=g), 3 * torch.randn(30, 6, generator=g)
    with torch.no_grad():
        tops = [net.features(z).amax(0) if per_feature else net.features(z).max() for z in (first, second)]
        net.train()
        net.codes(first)
        torch.testing.assert_close(net.hi, tops[0])
        codes = net.codes(second)
        torch.testing.assert_close(net.hi, 0.9 * tops[0] + 0.1 * tops[1])
        assert float(codes.max()) == 15  # a training batch is rounded by its own range
        before = net.hi.clone()
        net.eval()
        together = net.codes(second)
        alone = torch.cat([net.codes(row[None]) for row in second])
    assert torch.equal(net.hi, before)
    assert torch.equal(together, alone)
    assert not torch.equal(together, codes)


def test_gradients_pass_through_the_rounding():
    net = representation().train()
    net.codes(torch.randn(9, 6, generator=torch.Generator().manual_seed(1))).sum().backward()
    assert float(net.encode[0].weight.grad.abs().max()) > 0


def test_inputs_are_centred_and_share_one_spread():
    net = representation()
    z = torch.rand(50, 6, generator=torch.Generator().manual_seed(0)) * torch.arange(1.0, 7) + 5
    net.standardise(z)
    scaled = (z - net.shift) * net.scale
    torch.testing.assert_close(scaled.mean(0), torch.zeros(6), rtol=0, atol=1e-5)
    assert float(scaled.square().mean()) == pytest.approx(1, rel=1e-5)
    torch.testing.assert_close(scaled.std(0) / scaled.std(0)[0], z.std(0) / z.std(0)[0])  # proportions stay
    net.standardise(torch.full((50, 6), 3.0))
    assert net.scale.tolist() == [1.0] * 6  # constant inputs are not blown up


def test_logits_read_codes_as_shares_of_the_top_code():
    net = representation(bits=2)
    codes = torch.tensor([[0.0, 1, 2, 3, 3]])
    with torch.no_grad():
        torch.testing.assert_close(net.logits(codes), net.classify(codes / 3))


@pytest.mark.parametrize(("most", "is_flat"), [(140, True), (139, False)])
def test_positions_are_kept_apart_where_that_is_small(most, is_flat, monkeypatch):
    monkeypatch.setattr(quantised_features, "MOST_FLAT", most)
    subject = small_subject()
    backbone = Backbone(subject, "1")
    images = torch.rand(3, 1, 5, 7, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        z = subject.module[:2](subject.normalise(images))
        torch.testing.assert_close(backbone.inputs(images), z.flatten(1) if is_flat else z.mean((2, 3)))
    assert backbone.n_inputs == (140 if is_flat else 4)


def test_a_copy_that_learns_starts_as_the_model_and_takes_weights_back():
    subject = small_subject()
    images = torch.rand(3, 1, 5, 7, generator=torch.Generator().manual_seed(0))
    frozen, copied = Backbone(subject, "1"), Backbone(subject, "1", trainable=True)
    assert (frozen.parameters(), frozen.state()) == ([], {})
    torch.testing.assert_close(copied.inputs(images), frozen.inputs(images))
    first = copied.state()
    with torch.no_grad():
        copied.module[0].weight.mul_(2)
    moved = copied.inputs(images)
    assert not torch.allclose(moved, frozen.inputs(images))
    state = copy.deepcopy(copied.state())
    copied.load(first)
    torch.testing.assert_close(copied.inputs(images), frozen.inputs(images))
    copied.load(state)
    torch.testing.assert_close(copied.inputs(images), moved)
    assert not any(m._forward_hooks for m in copied.module.modules())


def test_a_layer_that_runs_twice_cannot_be_fine_tuned():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu, self.fc = nn.ReLU(), nn.Linear(35, 2)

        def forward(self, x):
            return self.fc(self.relu(self.relu(x) - 0.5).flatten(1))

    backbone = Backbone(small_subject(), "1", trainable=True)
    backbone.module, backbone.layer = Twice(), "relu"
    with pytest.raises(LayerError, match="layer 'relu' cannot be fine-tuned"):
        backbone.inputs(torch.rand(2, 1, 5, 7))
    assert not backbone.module.relu._forward_hooks
