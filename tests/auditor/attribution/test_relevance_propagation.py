"""LRP-alpha-beta and deep Taylor: against loops over explicit matrices, against zennit, and what is conserved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from auditor import Subject
from auditor.attribution.relevance_propagation import check_rectified, deep_taylor, lrp
from auditor.errors import LayerError
from auditor.network.aten_graph import graph_of
from tests.auditor.attribution.slow_walk import dense_matrix, small_resnet

SHAPE = (2, 5, 7)
MEAN, STD = (0.4, 0.6), (0.5, 0.25)
TARGETS = torch.tensor([0, 2, 1, 2])


@pytest.fixture(scope="module")
def subject():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, (3, 2), stride=(1, 2), padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 3, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 3),
    ).double()
    return Subject(net, input_shape=SHAPE, mean=MEAN, std=STD)


@pytest.fixture(scope="module")
def images():
    return torch.rand(4, *SHAPE, generator=torch.Generator().manual_seed(1)).double()


def handed_down(W, x, R, alpha):
    """R_i = sum_j (alpha z_ij^+ / sum z^+ - beta z_ij^- / sum z^-) R_j, one unit after the other."""
    below = torch.zeros_like(x)
    for j in range(len(W)):
        z = W[j] * x
        up, low = z.clamp(min=0), z.clamp(max=0)
        if up.sum() > 0 and low.sum() < 0:
            below += (alpha * up / up.sum() - (alpha - 1) * low / low.sum()) * R[j]
        elif z.abs().sum() > 0:
            below += z / z.sum() * R[j]  # parts of one sign only: they get all of it
    return below


def at_pixels(W, x, low, high, R):
    """The z^B rule, one unit after the other."""
    below = torch.zeros_like(x)
    for j in range(len(W)):
        z = W[j] * x - W[j].clamp(min=0) * low - W[j].clamp(max=0) * high
        below += z / z.sum() * R[j]
    return below


def slow(subject, image, target, alpha, *, deep=False):
    net = subject.module
    first, second = dense_matrix(net[0], SHAPE), dense_matrix(net[2], tuple(net[:2](image[None]).shape[1:]))
    x = subject.normalise(image[None])
    h1 = net[:2](x)
    h2 = net[2:4](h1).flatten().detach()
    R = torch.zeros(3, dtype=torch.float64)
    R[target] = net(x)[0, target].detach()
    if deep:
        R = R.clamp(min=0)
    R = handed_down(net[5].weight.detach(), h2, R, alpha)
    R = handed_down(second, h1.flatten().detach(), R, alpha)
    if not deep:
        return handed_down(first, x.flatten(), R, alpha).view(SHAPE)
    mean, std = torch.tensor(MEAN, dtype=torch.float64), torch.tensor(STD, dtype=torch.float64)
    ends = [((v - mean) / std).repeat_interleave(35) for v in (0.0, 1.0)]
    return at_pixels(first, x.flatten(), *ends, R).view(SHAPE)


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_lrp_is_the_loop_over_units(subject, images, alpha):
    maps = lrp(subject, images, TARGETS, alpha)
    assert maps.std() > 0
    for image, target, heat in zip(images, TARGETS.tolist(), maps, strict=True):
        torch.testing.assert_close(heat, slow(subject, image, target, alpha).detach(), rtol=1e-9, atol=1e-12)


def test_deep_taylor_is_the_loop_over_units_and_never_negative(subject, images):
    with torch.no_grad():
        logits = subject.logits(images)
    targets = logits.argmax(1)
    assert bool((logits.amax(1) > 0).any())
    maps = deep_taylor(subject, images, targets)
    assert float(maps.min()) >= 0
    for image, target, heat in zip(images, targets.tolist(), maps, strict=True):
        torch.testing.assert_close(heat, slow(subject, image, target, 1.0, deep=True).detach(), rtol=1e-9, atol=1e-12)
    # a logit below 0 has nothing to decompose
    worst = logits.argmin(1)
    assert bool((logits.amin(1) < 0).all())
    assert float(deep_taylor(subject, images, worst).abs().max()) == 0


@pytest.mark.parametrize("method", [lrp, deep_taylor])
def test_relevance_is_conserved_through_pools_norms_and_residual_sums(method):
    subject = Subject(small_resnet().double(), input_shape=(3, 13, 17), mean=(0.5, 0.4, 0.6), std=(0.2, 0.3, 0.25))
    x = torch.rand(5, 3, 13, 17, generator=torch.Generator().manual_seed(2)).double()
    with torch.no_grad():
        logits = subject.logits(x)
    targets = logits.argmax(1)
    total, value = method(subject, x, targets).flatten(1).sum(1), logits.amax(1)
    lost = (value - total) / value
    assert float(lost.min()) > -1e-9
    assert float(lost.max()) < (1e-9 if method is lrp else 1e-3)  # deep Taylor: of units that fire by their bias alone
    alone = torch.cat([method(subject, x[i : i + 1], targets[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(method(subject, x, targets), alone, rtol=1e-7, atol=1e-12)


def test_zennit_agrees_where_no_bias_takes_a_part():
    pytest.importorskip("zennit")
    from zennit.composites import LayerMapComposite
    from zennit.rules import AlphaBeta, Pass

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 6, 3, bias=False), nn.ReLU(), nn.Flatten(),
        nn.Linear(6 * 3 * 5, 3, bias=False),
    ).double()  # fmt: skip
    subject = Subject(net, input_shape=(2, 7, 9))
    x = torch.rand(2, 2, 7, 9, generator=torch.Generator().manual_seed(3)).double()
    targets = torch.tensor([1, 2])
    rule = AlphaBeta(alpha=2, beta=1, stabilizer=1e-12)
    composite = LayerMapComposite([(nn.Conv2d, rule), (nn.Linear, rule), (nn.ReLU, Pass())])
    with composite.context(net):
        leaf = x.clone().requires_grad_()
        out = net(leaf)
        start = torch.zeros_like(out).scatter_(1, targets[:, None], 1.0) * out.detach()
        (theirs,) = torch.autograd.grad(out, leaf, start)
    torch.testing.assert_close(lrp(subject, x, targets), theirs, rtol=1e-5, atol=1e-9)


def test_deep_taylor_is_for_relu_networks():
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.SiLU(), nn.Flatten(), nn.Linear(45, 2))
    subject = Subject(net, input_shape=SHAPE)
    with pytest.raises(LayerError, match=r"networks of ReLU, and layer '1' has aten.silu"):
        deep_taylor(subject, torch.rand(1, *SHAPE), torch.tensor([0]))
    total = lrp(subject, torch.rand(2, *SHAPE), torch.tensor([0, 1])).flatten(1).sum(1)
    assert bool(total.isfinite().all())
    check_rectified(graph_of(Subject(small_resnet(), input_shape=(3, 13, 17))))
