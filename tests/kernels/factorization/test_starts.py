"""Starting points against the plain definitions on an exact decomposition."""

import numpy as np
import pytest
import torch

from auditor.kernels.factorization.starts import nndsvda, random_start, truncated_svd


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def drawn(*shape, seed=0):
    return torch.rand(*shape, dtype=torch.float64, generator=seeded(seed))


@pytest.mark.parametrize(("rows", "columns", "rank"), [(13, 17, 4), (13, 17, 13), (1, 9, 1), (9, 1, 1)])
def test_small_decompositions_are_exact(rows, columns, rank):
    X = drawn(rows, columns) - 0.4
    U, s, Vt = truncated_svd(X, rank, seeded())
    _, want, _ = torch.linalg.svd(X)
    torch.testing.assert_close(s, want[:rank], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(U.T @ U, torch.eye(rank).double(), rtol=0, atol=1e-10)
    torch.testing.assert_close(Vt @ Vt.T, torch.eye(rank).double(), rtol=0, atol=1e-10)
    torch.testing.assert_close(U.T @ X, s[:, None] * Vt, rtol=0, atol=1e-9)


def test_a_large_matrix_of_low_rank_is_decomposed_from_a_few_directions():
    X = drawn(60, 5) @ drawn(5, 80, seed=1) + 1e-3 * drawn(60, 80, seed=2)
    _, s, _ = truncated_svd(X, 5, seeded())
    torch.testing.assert_close(s, torch.linalg.svdvals(X)[:5], rtol=1e-6, atol=1e-6)


def plain_nndsvda(X, rank, signed):
    """Boutsidis and Gallopoulos, one pair after the other."""
    U, s, Vt = np.linalg.svd(X.numpy(), full_matrices=False)
    W, S = [], []
    for j in range(rank):
        u, v = U[:, j], Vt[j]
        pairs = []
        for sign in (1, -1):
            a, b = (sign * u if signed else np.maximum(sign * u, 0)), np.maximum(sign * v, 0)
            size = np.linalg.norm(b) ** 2 if signed else np.linalg.norm(a) * np.linalg.norm(b)
            pairs.append((size, a / max(np.linalg.norm(a), 1e-300), b / max(np.linalg.norm(b), 1e-300)))
        size, a, b = max(pairs, key=lambda pair: pair[0])
        W.append(a * np.sqrt(s[j] * size))
        S.append(b * np.sqrt(s[j] * size))
    W, S, fill = np.stack(W, 1), np.stack(S), np.abs(X.numpy()).mean()
    return (W if signed else np.where(W <= 0, fill, W)), np.where(S <= 0, fill, S)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(("rows", "columns", "rank"), [(13, 17, 5), (8, 3, 3), (1, 6, 1), (6, 1, 1)])
def test_equals_the_plain_definition(rows, columns, rank, signed):
    X = drawn(rows, columns) - (0.45 if signed else 0)
    W, S = nndsvda(X, rank, seeded(), signed=signed)
    W_want, S_want = plain_nndsvda(X, rank, signed)
    np.testing.assert_allclose(S, S_want, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(W, W_want, rtol=1e-7, atol=1e-9)
    assert float(S.min()) > 0
    plain = nndsvda(X, rank, seeded())
    assert float(plain[0].min()) > 0  # not signed unless asked


def test_zeros_give_finite_factors():
    W, S = nndsvda(torch.zeros(4, 6), 2, seeded())
    assert W.abs().max() == 0
    assert S.abs().max() == 0


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_factors_are_scaled_normals(signed, dtype):
    X = (drawn(13, 17) - 0.5).to(dtype)
    W, S = random_start(X, 4, seeded(3), signed=signed)
    g, scale = seeded(3), (X.abs().mean() / 4).sqrt()
    W_want, S_want = (torch.randn(*shape, generator=g, dtype=dtype) * scale for shape in ((13, 4), (4, 17)))
    torch.testing.assert_close(W, W_want if signed else W_want.abs())
    torch.testing.assert_close(S, S_want.abs())
    torch.testing.assert_close(random_start(X, 4, seeded(3))[0], W_want.abs())
