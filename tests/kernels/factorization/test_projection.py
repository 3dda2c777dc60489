import numpy as np
import pytest
import torch
from scipy.optimize import nnls

from auditor.kernels.factorization.projection import Basis, prepare, project, project_by_passes, project_images


def scipy_projection(X, W, l2=0.0):
    A = np.vstack([W.double().numpy(), np.sqrt(l2) * np.eye(W.shape[1])])
    targets = np.vstack([X.double().numpy(), np.zeros((W.shape[1], X.shape[1]))])
    return np.stack([nnls(A, targets[:, p])[0] for p in range(X.shape[1])], axis=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("l2", [0.0, 0.7])
@pytest.mark.parametrize(
    ("channels", "rank", "positions"), [(13, 1, 17), (13, 5, 1), (40, 10, 300), (64, 32, 49), (9, 9, 30)]
)
def test_equals_scipy(channels, rank, positions, l2, signed, dtype):
    g = torch.Generator().manual_seed(rank)
    W = torch.rand(channels, rank, generator=g, dtype=dtype) - (0.5 if signed else 0)
    X = torch.rand(channels, positions, generator=g, dtype=dtype) - (0.4 if signed else 0)
    got, want = project(X, W, l2=l2), scipy_projection(X, W, l2)
    assert got.dtype == dtype
    assert got.min() >= 0
    np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=1e-5 * want.max())


def test_near_copies_in_the_basis_do_not_hurt():
    g = torch.Generator().manual_seed(1)
    W = torch.rand(30, 6, generator=g)
    W[:, 1] = W[:, 0] + 1e-3 * torch.rand(30, generator=g)
    X = torch.rand(30, 80, generator=g)
    want = scipy_projection(X, W)
    np.testing.assert_allclose(project(X, W).numpy(), want, rtol=0, atol=1e-5 * want.max())


def test_dependent_columns_reach_the_same_residual():
    g = torch.Generator().manual_seed(2)
    W = torch.rand(12, 5, generator=g, dtype=torch.float64)
    W[:, 3] = W[:, 1]
    W[:, 4] = 0
    X = torch.rand(12, 40, generator=g, dtype=torch.float64)
    S = project(X, W)
    misfit = ((X - W @ S) ** 2).sum(0).numpy()
    want = ((X.numpy() - W.numpy() @ scipy_projection(X, W)) ** 2).sum(0)
    np.testing.assert_allclose(misfit, want, rtol=1e-8)
    assert S[4].abs().max() == 0


def test_batch_equals_its_positions_one_by_one_and_none_is_fine():
    g = torch.Generator().manual_seed(3)
    X, W = torch.rand(20, 700, generator=g), torch.rand(20, 7, generator=g)
    whole = project(X, W)
    alone = torch.cat([project(X[:, p : p + 1], W) for p in range(0, 700, 100)], dim=1)
    torch.testing.assert_close(whole[:, ::100], alone, rtol=1e-6, atol=1e-6)
    assert project(X[:, :0], W).shape == (7, 0)
    assert project(torch.zeros(20, 3), W).abs().max() == 0
    assert project(X, torch.zeros(20, 7)).abs().max() == 0


@pytest.mark.parametrize(
    ("X", "W", "l2", "sentence"),
    [
        (torch.ones(3, 2), torch.ones(4, 2), 0.0, "got \\(3, 2\\) and \\(4, 2\\)"),
        (torch.full((3, 2), torch.nan), torch.ones(3, 2), 0.0, "must be finite"),
        (torch.ones(3, 2), torch.ones(3, 2), -1.0, "l2 must not be negative"),
    ],
)
def test_bad_input_gets_one_sentence(X, W, l2, sentence):
    with pytest.raises(ValueError, match=sentence):
        project(X, W, l2=l2)


def test_passes_alone_reach_the_active_set_answer():
    g = torch.Generator().manual_seed(5)
    X, W = torch.rand(30, 60, generator=g).double() - 0.3, torch.rand(30, 7, generator=g).double() - 0.3
    W[:, 6] = 0
    B, G = W.T @ X, W.T @ W
    torch.testing.assert_close(project_by_passes(B.clamp_min(0), B, G), project(X, W), rtol=0, atol=1e-6)


def conditioned(channels, rank, smallest, seed):
    """A basis of unit columns whose Gram matrix has eigenvalues down to about ``smallest``."""
    g = torch.Generator().manual_seed(seed)
    U, _, Vt = torch.linalg.svd(torch.randn(channels, rank, generator=g), full_matrices=False)
    W = U @ torch.diag(torch.linspace(1, smallest**0.5, rank)) @ Vt
    return W / W.norm(dim=0)


@pytest.mark.parametrize("positions", [1, 15, 63, 64, 65, 200])
@pytest.mark.parametrize(("channels", "rank"), [(13, 1), (17, 2), (70, 5), (130, 10), (65, 33)])
def test_positions_side_by_side_equal_scipy(channels, rank, positions):
    g = torch.Generator().manual_seed(positions)
    W = conditioned(channels, rank, 0.25, seed=rank)
    X = W @ torch.rand(rank, positions, generator=g) + 0.3 * torch.randn(channels, positions, generator=g)
    basis = prepare(W)
    assert basis.limit > 0  # or this would test the other way
    want = scipy_projection(X, W)
    assert 0 < (want > 0).mean() <= 1
    np.testing.assert_allclose(project(X, basis).numpy(), want, rtol=0, atol=1e-5 * want.max())


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_scale_of_the_activations_does_not_matter(scale):
    g = torch.Generator().manual_seed(0)
    basis, X = prepare(conditioned(40, 6, 0.3, seed=1)), torch.rand(40, 70, generator=g)
    torch.testing.assert_close(project(X * scale, basis) / scale, project(X, basis), rtol=1e-5, atol=1e-6)


def test_what_passes_do_not_settle_goes_to_the_active_set():
    """A limit no pass can meet sends every position there; the answer stays."""
    g = torch.Generator().manual_seed(0)
    W, X = conditioned(40, 6, 0.3, seed=1), torch.rand(40, 70, generator=g)
    basis = prepare(W)
    strict = Basis(**{**vars(basis), "limit": 1e-30})
    torch.testing.assert_close(project(X, strict), project(X, basis), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(project(X, strict).numpy(), scipy_projection(X, W), rtol=0, atol=1e-5)


@pytest.mark.parametrize("smallest", [0.3, 0.01])
@pytest.mark.parametrize(("images", "positions"), [(3, 49), (1, 17), (5, 16), (50, 64), (0, 9), (2, 0)])
def test_images_equal_their_columns(images, positions, smallest):
    g = torch.Generator().manual_seed(0)
    basis = prepare(conditioned(30, 4, smallest, seed=1))
    X = torch.rand(images, 30, positions, generator=g)
    got = project_images(X, basis)
    assert got.shape == (images, 4, positions)
    for one, S in zip(X, got, strict=True):
        torch.testing.assert_close(S, project(one, basis), rtol=1e-6, atol=1e-6)


def test_basis_with_columns_of_any_length_and_one_dead():
    W = conditioned(40, 6, 0.3, seed=1) * torch.tensor([1.0, 1e-3, 50.0, 1.0, 0.0, 2.0])
    X = torch.rand(40, 70, generator=torch.Generator().manual_seed(0))
    want = scipy_projection(X, W[:, [0, 1, 2, 3, 5]])
    got = project(X, prepare(W))
    assert got[4].abs().max() == 0
    np.testing.assert_allclose(got[[0, 1, 2, 3, 5]].numpy(), want, rtol=0, atol=1e-5 * want.max())
    dead = conditioned(40, 3, 0.3, seed=2)
    dead[:, 1] = 0
    assert prepare(dead).limit > 0
    assert project(X, dead)[1].abs().max() == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("column", [0, 69])
def test_one_bad_value_is_found(bad, column):
    basis, X = prepare(conditioned(40, 6, 0.3, seed=1)), torch.rand(40, 70)
    X[7, column] = bad
    with pytest.raises(ValueError, match="must be finite"):
        project(X, basis)


def test_prepared_basis_refuses_other_shapes():
    basis = prepare(torch.eye(3))
    with pytest.raises(ValueError, match=r"got \(4, 2\) and \(3, 3\)"):
        project(torch.ones(4, 2), basis)
    with pytest.raises(ValueError, match=r"3 channels, positions\), got \(1, 4, 2\)"):
        project_images(torch.ones(1, 4, 2), basis)
    with pytest.raises(ValueError, match="W must be"):
        prepare(torch.ones(3))
    with pytest.raises(ValueError, match="must be finite"):
        prepare(torch.full((3, 2), torch.nan))


def test_the_limit_of_a_settled_position_is_the_bound_of_strong_convexity():
    W = conditioned(40, 6, 0.3, seed=1)
    G = (W.double().T @ W.double()).numpy()
    want = 1e-6 * np.linalg.eigvalsh(G)[0] / np.linalg.norm(np.triu(G, 1), 2)
    assert prepare(W).limit == pytest.approx(want, rel=1e-4)
    assert prepare(torch.eye(3)).limit == pytest.approx(1e-3)  # no column pulls at another
    for cosine, limit in ((0.85, 1e-6 * 0.15 / 0.85), (0.95, 0.0)):  # two columns: eigenvalues 1 -+ cosine
        pair = torch.tensor([[1.0, cosine], [0.0, (1 - cosine**2) ** 0.5]])
        assert prepare(pair).limit == pytest.approx(limit, rel=1e-5)
    uneven = torch.eye(3) * torch.tensor([1.0, 1.0, 0.09])
    assert prepare(uneven).limit == 0
    assert prepare(torch.zeros(4, 2)).limit == 0
