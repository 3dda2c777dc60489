"""The start at the slopes of the logits: exact where they are affine, parted by sign and by what fires together."""

import pytest
import torch

from auditor.explainers.xnn.head_objective import Problem, SraeConfig, start_state
from auditor.explainers.xnn.head_start import firing_groups, parts_of, slopes, start_at_slopes
from auditor.explainers.xnn.heads import XHeads


def affine(n=60, dims=12, classes=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    Z, W = torch.rand(n, dims, generator=g), torch.randn(classes, dims, generator=g)
    return Z, W, Z @ W.T + 0.5


@pytest.mark.parametrize("n_features", [1, 2, 5])
@pytest.mark.parametrize("signed", [False, True])
def test_an_affine_logit_is_followed_from_the_start_on_unknown_images(n_features, signed):
    Z, W, y = affine(n=600)
    Z = Z - 0.5 if signed else Z
    y = Z @ W.T + 0.5
    rows = torch.arange(300)
    problem = Problem(Z, y[rows].T, torch.ones(3, 300), rows)
    heads = XHeads(3, 12, (), n_features, signed_output=signed, generator=torch.Generator().manual_seed(0))
    start_state(heads, problem, SraeConfig())
    start_at_slopes(heads, problem, W, seed=0)
    with torch.no_grad():
        error = (heads.predict(heads.encode(Z[300:])) - y[300:].T).abs().mean(1) / y.std(0)
    assert float(error.max()) < 0.02  # below the least of the 300 an x-feature is cut off


def test_every_feature_speaks_for_or_against():
    Z, W, y = affine(dims=60)
    heads = XHeads(3, 60, (), 5, generator=torch.Generator().manual_seed(0))
    problem = Problem.of(Z, y.T, torch.ones(3, 60))
    start_state(heads, problem, SraeConfig())
    start_at_slopes(heads, problem, W, seed=0)
    for k in range(3):
        owner = heads.encoder_w[0][k].detach() > 0  # (features, dims)
        assert bool((owner.sum(0) <= 1).all())  # no dimension in two features
        assert not bool((owner[:3] & (W[k] < 0)).any())
        assert not bool((owner[3:] & (W[k] > 0)).any())
    with torch.no_grad():
        E = heads.encode(Z)[..., 0]
        assert bool((E >= 0).all())
        torch.testing.assert_close(E.square().mean(1).sqrt(), torch.ones(3, 5), rtol=1e-4, atol=1e-4)
        Q = heads.dimension_errors(heads.embed(heads.rows(Z)), heads.rows(Z))
        plain = (heads.rows(Z) - heads.rows(Z).mean(0)).square().mean(0)
        assert bool((Q.mean(1) < plain.mean()).all())  # better than a constant


def test_dimensions_that_fire_together_are_one_group():
    g = torch.Generator().manual_seed(0)
    source = torch.rand(200, 3, generator=g)
    which = torch.tensor([0, 1, 2] * 4)
    rows = source[:, which] * (0.5 + torch.rand(12, generator=g)) + 0.01 * torch.rand(200, 12, generator=g)
    group = firing_groups(rows, 3, seed=1)
    assert len(set(zip(group.tolist(), which.tolist(), strict=True))) == 3
    assert firing_groups(torch.ones(5, 4), 2, seed=0).shape == (4,)  # constant dimensions are no error


def test_parts_follow_the_sign():
    rows, toward = torch.rand(30, 6), torch.tensor([[1.0, -1, 1, -1, 1, 0]])
    part = parts_of(rows, toward, 2, seed=0)
    assert part.tolist() == [[0, 1, 0, 1, 0, 1]]
    assert parts_of(rows, toward, 1, seed=0).tolist() == [[0] * 6]


def test_slopes_are_gradients_at_the_images_given():
    W = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    z = [torch.rand(2, 6), torch.rand(3, 6)]
    got = slopes(lambda z: (z @ W.T).square() / 2, z, [3, 0])
    for row, k in enumerate((3, 0)):
        want = torch.stack([(one @ W[k]) * W[k] for one in z[row]]).mean(0)
        torch.testing.assert_close(got[row], want)
