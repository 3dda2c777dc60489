"""Losses by plain loops, their proxes by what makes a point the minimum."""

import itertools

import pytest
import torch
from torch.nn import functional as nf

from auditor.errors import DataError, OptionError
from auditor.training.losses import CrossEntropy, Distillation, LabelsAndLogits, Squared, Triplet, loss_of

Y = torch.tensor([0, 2, 1, 2, 0])


def outputs(seed=0, n=5, width=3):
    return torch.randn(n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def slow_squared(z, y):
    return sum(0.5 * (float(z[i, k]) - (k == int(y[i]))) ** 2 for i in range(len(z)) for k in range(z.shape[1]))


def slow_cross_entropy(z, y):
    return sum(float(z[i].exp().sum().log() - z[i, int(y[i])]) for i in range(len(z)))


def slow_triplet(z, y, margin):
    total = 0.0
    for i in range(len(z)):
        distance = [float((z[i] - z[j]).norm()) for j in range(len(z))]
        same = [d for j, d in enumerate(distance) if y[j] == y[i] and j != i]
        other = [d for j, d in enumerate(distance) if y[j] != y[i]]
        if same and other:
            total += max(0.0, max(same) - min(other) + margin)
    return total


@pytest.mark.parametrize("seed", range(4))
def test_values_are_sums_over_samples(seed):
    z = outputs(seed)
    assert float(Squared().value(z, Y)) == pytest.approx(slow_squared(z, Y), rel=1e-12)
    assert float(CrossEntropy().value(z, Y)) == pytest.approx(slow_cross_entropy(z, Y), rel=1e-12)
    # class 1 has one member only: it is nobody's partner and takes no anchor, but it is an opponent
    assert float(Triplet(0.7).value(z, Y)) == pytest.approx(slow_triplet(z, Y, 0.7), rel=1e-9)
    assert float(Triplet(0.7).value(z, Y)) > 0


@pytest.mark.parametrize("labels", [[0, 0, 0, 0, 0], [0, 1, 2, 3, 4]])
def test_triplets_without_a_partner_or_an_opponent_count_nothing(labels):
    z = outputs().requires_grad_()
    value = Triplet().value(z, torch.tensor(labels))
    value.backward()
    assert float(value) == 0
    assert torch.equal(z.grad, torch.zeros_like(z))


def test_triplets_far_apart_cost_nothing():
    z = torch.tensor([[0.0], [0.1], [5.0], [5.2]])
    assert float(Triplet(1.0).value(z, torch.tensor([0, 0, 1, 1]))) == 0
    expected = sum(max(0.0, v) for v in (0.1 - 5.0 + 6, 0.1 - 4.9 + 6, 0.2 - 4.9 + 6, 0.2 - 5.1 + 6))
    assert float(Triplet(6.0).value(z, torch.tensor([0, 0, 1, 1]))) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("beta", [0.3, 2.0])
def test_the_prox_of_the_squared_loss_is_the_minimum(beta):
    v = outputs(1)
    z = Squared().prox(v, Y, beta)
    gradient = (z - nf.one_hot(Y, 3)) + beta * (z - v)
    torch.testing.assert_close(gradient, torch.zeros_like(z), rtol=0, atol=1e-12)


@pytest.mark.parametrize("beta", [0.3, 2.0])
def test_the_prox_of_the_cross_entropy_is_the_minimum(beta):
    v = outputs(1)
    z = CrossEntropy(steps=400).prox(v, Y, beta)
    gradient = z.softmax(1) - nf.one_hot(Y, 3) + beta * (z - v)
    torch.testing.assert_close(gradient, torch.zeros_like(z), rtol=0, atol=1e-6)  # it stops when z moves by 1e-7
    few = CrossEntropy(steps=2).prox(v, Y, beta)
    assert not torch.allclose(few, z, rtol=0, atol=1e-6)  # the number of steps is the loss's own


def objective(loss, z, v, beta):
    return float(loss.value(z, Y)) + 0.5 * beta * float((z - v).square().sum())


@pytest.mark.parametrize("beta", [0.3, 2.0, 50.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_prox_of_triplets_descends_towards_the_minimum(beta, seed):
    loss, v = Triplet(0.7), outputs(seed)
    path = [objective(loss, Triplet(0.7, steps=k).prox(v, Y, beta), v, beta) for k in (0, 1, 3, 10)]
    assert all(after <= before for before, after in itertools.pairwise(path))
    assert path[-1] < path[0]
    z = Triplet(0.7, steps=1).prox(v, Y, beta)
    point = v.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss.value(point, Y), point)
    ratios = ((v - z) / gradient)[gradient.abs() > 1e-9]  # one step along the subgradient, of one length
    assert float(ratios.std()) < 1e-9
    length = float(ratios.mean()) * 2 * beta
    assert length in [pytest.approx(0.5**k) for k in range(8)]  # halved from 1/(2 beta) until it descends
    if length < 0.9:  # the step twice as long would have risen
        assert objective(loss, v - 2 * length / (2 * beta) * gradient, v, beta) > objective(loss, v, v, beta)


def test_a_triplet_prox_leaves_no_gradient_behind():
    z = Triplet().prox(outputs(), Y, 1.0)
    assert not z.requires_grad
    assert z.grad_fn is None


def test_losses_by_name():
    names = ["squared", "cross_entropy", "distillation", "triplet"]
    assert [loss_of(name).name for name in names] == names
    with pytest.raises(OptionError, match=f"loss must be one of {', '.join(names)}, got 'hinge'"):
        loss_of("hinge")


@pytest.mark.parametrize(
    ("labels", "said"), [([2, 2, 2, 2], "only class 2"), ([0, 1, 2, 3], "no identity has two"), ([0, 0], "4 whole")]
)
def test_triplets_that_cannot_be_are_refused(labels, said):
    with pytest.raises(DataError, match=said):
        Triplet().check(torch.tensor(labels), 4, 3, "training")


@pytest.mark.parametrize("beta", [0.3, 2.0])
def test_distillation_is_the_squared_distance_to_other_logits(beta):
    loss, z, v, teacher = Distillation(), outputs(2), outputs(1), outputs(7)
    slow = sum(0.5 * (float(z[i, k]) - float(teacher[i, k])) ** 2 for i in range(5) for k in range(3))
    assert float(loss.value(z, teacher)) == pytest.approx(slow, rel=1e-12)
    best = loss.prox(v, teacher, beta)
    torch.testing.assert_close((best - teacher) + beta * (best - v), torch.zeros_like(v), rtol=0, atol=1e-12)
    with pytest.raises(DataError, match=r"wants the logits to imitate, 5 x 3 numbers, got torch.int64 \(5,\)"):
        loss.check(Y, 5, 3, "training")


def slow_labels_and_logits(z, y, share, spread, squared):
    total = 0.0
    for i in range(len(z)):
        label = int(y[i, 0])
        if label >= 0 and squared:
            of_label = sum(0.5 * (float(z[i, k]) - (k == label)) ** 2 for k in range(3))
        else:
            of_label = float(z[i].exp().sum().log() - z[i, label]) if label >= 0 else 0.0
        distance = sum((float(z[i, k] - y[i, 1 + k]) / spread) ** 2 for k in range(3))
        total += (1 - share) * of_label + 0.5 * share * distance
    return total


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_labels_and_logits_together(share, squared):
    labels = torch.tensor([0.0, 2.0, -1.0, 1.0, 0.0], dtype=torch.float64)  # one without a label
    y = torch.cat([labels[:, None], outputs(7)], 1)
    loss, z, v = LabelsAndLogits(share, 1.7, squared, steps=3000), outputs(2), outputs(1)
    loss.check(y, 5, 3, "training")
    slow = slow_labels_and_logits(z, y, share, 1.7, squared)
    assert float(loss.value(z, y)) == pytest.approx(slow, rel=1e-9)
    best = loss.prox(v, y, 0.5)
    gradient = loss.gradient(best, y) + 0.5 * (best - v)
    torch.testing.assert_close(gradient, torch.zeros_like(v), rtol=0, atol=1e-8)
    few = LabelsAndLogits(share, 1.7, squared, steps=2).prox(v, y, 0.5)

    def whole(point):
        return float(loss.value(point, y)) + 0.25 * float((point - v).square().sum())

    assert whole(best) - 1e-9 <= whole(few) < whole(v)


def test_labels_and_logits_that_do_not_fit_are_refused():
    loss = LabelsAndLogits(0.5, 1.0)
    with pytest.raises(DataError, match="want 5 rows of a label and 3 logits"):
        loss.check(outputs(), 5, 3, "training")
    y = torch.cat([torch.full((5, 1), 3.0), outputs()], 1)
    with pytest.raises(DataError, match="class 3 is beyond the 3 outputs"):
        loss.check(y, 5, 3, "training")


def test_triplet_batches_bring_partners_together():
    y = torch.arange(40) % 8
    loss, generator = Triplet(), torch.Generator().manual_seed(0)
    batches = loss.batches(y, 12, generator)
    assert sorted(torch.cat(batches).tolist()) == list(range(40))
    for rows in batches:
        counts = torch.bincount(y[rows])
        assert int((counts > 1).sum()) >= 2  # two identities at least with a pair: every batch has triplets
    assert loss.batches(y, 12, generator)[0].tolist() != batches[0].tolist()
