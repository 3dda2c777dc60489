"""Linear CKA against centred kernels written out, and its laws."""

import pytest
import torch

from auditor.kernels.networks.linear_cka import linear_cka


def by_kernels(A, B):
    """<K', L'> / (|K'| |L'|) with K' = H K H, H = I - 1/n."""
    n = A.shape[1]
    H = torch.eye(n).double() - 1 / n
    K, L = H @ A.double().T @ A.double() @ H, H @ B.double().T @ B.double() @ H
    return float((K * L).sum() / (K.norm() * L.norm()))


@pytest.mark.parametrize(
    ("rows", "others", "n"), [(4, 3, 50), (80, 4, 50), (4, 80, 50), (50, 50, 50), (13, 17, 5), (1, 1, 2)]
)
def test_equals_centred_kernels(rows, others, n):
    g = torch.Generator().manual_seed(rows)
    A, B = torch.rand(rows, n, generator=g) + 3, torch.rand(others, n, generator=g)
    B[0] += A[0]
    assert linear_cka(A, B) == pytest.approx(by_kernels(A, B), rel=1e-9)
    assert linear_cka(B, A) == pytest.approx(linear_cka(A, B), rel=1e-12)


def test_laws():
    g = torch.Generator().manual_seed(0)
    F, other = torch.rand(4, 50, generator=g), torch.rand(80, 50, generator=g)
    assert linear_cka(F, F) == pytest.approx(1)
    assert linear_cka(F, 7 * F[[2, 0, 3, 1]]) == pytest.approx(1)
    assert 0 <= linear_cka(F, other) < 0.9
    assert linear_cka(F, torch.ones(2, 50)) == 0
    assert linear_cka(torch.ones(2, 50), F) == 0
    tall = torch.cat([F] * 20)  # 80 features, 50 examples: the other branch, same kernel up to a scale
    assert linear_cka(tall, other) == pytest.approx(linear_cka(F, other))
    with pytest.raises(ValueError, match="same examples, got 50 and 49"):
        linear_cka(F, F[:, 1:])


@pytest.mark.parametrize(("rows", "others", "n"), [(200_000, 3, 4), (3, 200_000, 4), (3, 2, 200_000)])
def test_neither_many_features_nor_many_examples_cost_their_square(rows, others, n):
    """A square of 200,000 doubles a side would take 320 GB. Rows that are all alike count as one."""
    g = torch.Generator().manual_seed(1)
    A, B = torch.rand(min(rows, 3), n, generator=g), torch.rand(min(others, 3), n, generator=g)
    A, B = (F[:1].expand(size, n) if size > 3 else F for F, size in ((A, rows), (B, others)))
    few_A, few_B = (F[:1] if len(F) > 3 else F for F in (A, B))
    assert linear_cka(A, B) == pytest.approx(linear_cka(few_A, few_B), rel=1e-9)
