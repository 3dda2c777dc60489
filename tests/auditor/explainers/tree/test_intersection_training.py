import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.explainers.tree.intersection_training import Recipe, TreeExamples, _sparsity, train
from auditor.explainers.tree.quantised_features import Backbone, Representation
from auditor.kernels.trees.tree import TreeLimits, fit_tree


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


def test_learns_with_every_variant():
    for variant in ("full", "tree", "l1", "l2", "quantised"):
        _, states, _ = weights(
            Recipe(variant=variant, epochs=12, min_epochs=12, batch=32, lr=1e-2, limits=TreeLimits(6, leaf_rows=2))
        )
        assert states[-1].accuracy > 0.9, variant
        assert (states[-1].soft_loss > 0) == (variant in ("full", "tree"))
        assert (states[-1].sparsity_loss > 0) == (variant in ("full", "l1", "l2"))
    net = fresh(soft_depth=3)
    states = list(
        train(
            net,
            plain_backbone(),
            blobs(160, 1),
            blobs(60, 2),
            Recipe(variant="soft_tree", epochs=12, batch=32, lr=2e-2),
        )
    )
    assert states[-1].accuracy > 0.6
    assert states[-1].loss < states[0].loss


def test_without_tree_and_sparsity_it_is_plain_quantised_training_bit_for_bit():
    plain, *_ = weights(Recipe(variant="quantised", epochs=3))
    none, *_ = weights(Recipe(variant="full", lambda_2=0.0, lambda_3=0.0, epochs=3))
    full, *_ = weights(Recipe(variant="full", epochs=3))
    assert torch.equal(plain, none)
    assert not torch.equal(plain, full)


def test_the_same_seed_gives_the_same_weights():
    a, *_ = weights(Recipe(epochs=2))
    b, *_ = weights(Recipe(epochs=2))
    c, *_ = weights(Recipe(epochs=2, seed=1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@pytest.mark.parametrize(("p", "share"), [(0.0, 0.0), (1.0, 1.0)])
def test_the_mask_at_its_ends(p, share):
    v = torch.randint(0, 16, (5, 7), generator=torch.Generator().manual_seed(0)).float()
    sparse = _sparsity(v, Recipe(variant="l1", p=p), torch.Generator().manual_seed(0), 500)
    assert float(sparse) == pytest.approx(share * float(v.sum(1).mean()))
    squared = _sparsity(v, Recipe(variant="l2", p=p), torch.Generator().manual_seed(0), 500)
    assert float(squared) == pytest.approx(share * float(v.square().sum(1).mean()))
    literal = _sparsity(v, Recipe(variant="l1", p=p, l1_norm="dataset"), torch.Generator().manual_seed(0), 500)
    assert float(literal) == pytest.approx(float(sparse) * 5 / 500)


def test_the_mask_is_bernoulli_p_and_fresh_each_time():
    v, g = torch.ones(1, 4000), torch.Generator().manual_seed(0)
    first, second = (float(_sparsity(v, Recipe(p=0.3), g, 1)) / 4000 for _ in range(2))
    assert first != second
    assert abs(first - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 4000)


def test_soft_cross_entropy_of_a_stump_is_ln_2():
    tree = fit_tree(np.array([[0], [1]], np.uint8), np.eye(2), TreeLimits(1))
    t = torch.from_numpy(tree.predict(np.array([[0], [1]], np.uint8)))
    log_g = torch.log_softmax(torch.zeros(2, 2, dtype=torch.float64), dim=1)
    assert float(-(t * log_g).sum(1).mean()) == pytest.approx(0.693147, abs=1e-6)


def test_early_stopping_keeps_the_last_epoch_before_the_second_drop(monkeypatch):
    import auditor.explainers.tree.intersection_training as module

    scores = iter([0.5, 0.6, 0.55, 0.7, 0.65, 0.9, 0.9])
    monkeypatch.setattr(module, "_score", lambda *_: (next(scores), 0.0, 0.0, 0.0))
    net = fresh()
    calls = []
    for state in train(net, plain_backbone(), blobs(80, 1), blobs(20, 2), Recipe(epochs=9, min_epochs=0)):
        calls.append((state.number, state.is_drop, copy.deepcopy(net.state_dict())))
    assert [s[0] for s in calls] == [1, 2, 3, 4, 5]
    assert [s[1] for s in calls] == [False, False, True, False, True]
    restored = net.state_dict()
    assert all(torch.equal(restored[name], calls[3][2][name]) for name in restored)
    assert not all(torch.equal(restored[name], calls[4][2][name]) for name in restored)


def test_sparsity_raises_the_share_of_zero_codes():
    _, plain, _ = weights(Recipe(variant="quantised", epochs=6, lr=1e-2))
    _, sparse, _ = weights(Recipe(variant="l1", lambda_3=0.05, epochs=6, lr=1e-2))
    assert sparse[-1].zero_share > plain[-1].zero_share + 0.05


def test_a_worse_tree_does_not_replace_a_better_one():
    from auditor.explainers.tree.intersection_training import _better

    g = torch.Generator().manual_seed(0)
    v = torch.randint(0, 4, (200, 5), generator=g).float()
    p = torch.nn.functional.one_hot((v[:, 0] > 1).long() + 2 * (v[:, 1] > 1).long(), 4).double() * 0.9 + 0.025
    codes = v.to(torch.uint8).numpy()
    good = fit_tree(codes, p.numpy(), TreeLimits(3, leaf_rows=1), bits=2)
    poor = fit_tree(codes, p.numpy(), TreeLimits(1, leaf_rows=1), bits=2)
    pairs = [(v[:120], p[:120]), (v[120:], p[120:])]
    assert _better(good, poor, pairs) is good
    assert _better(poor, good, pairs) is good
    assert _better(None, poor, pairs) is poor
    _, states, _ = weights(Recipe(epochs=4, batch=32, lr=1e-2, keep_better=True, limits=TreeLimits(6, leaf_rows=2)))
    assert states[-1].loss < states[0].loss
