"""How alike two representations of the same examples are: linear CKA [Kornblith2019]."""

from __future__ import annotations

from torch import Tensor


def linear_cka(A: Tensor, B: Tensor) -> float:
    """Return the CKA of A (features, examples) and B (other features, same examples); 0 when one is constant.

    The centred kernels are never formed:  <A^T A, B^T B> = |A B^T|^2  for centred A and B.

    >>> import torch
    >>> A = torch.tensor([[1.0, 2.0, 4.0], [0.0, 1.0, 0.0]])
    >>> round(linear_cka(A, 3 * A.flip(0)), 6)
    1.0
    """
    if A.shape[1] != B.shape[1]:
        raise ValueError(f"CKA: both sides need the same examples, got {A.shape[1]} and {B.shape[1]}.")
    A, B = A.double() - A.double().mean(1, keepdim=True), B.double() - B.double().mean(1, keepdim=True)
    if max(A.shape[0], B.shape[0]) > A.shape[1]:  # more features than examples: the kernels are the smaller ones
        K, L = A.T @ A, B.T @ B
        cross, one, two = float((K * L).sum()), float(K.norm()), float(L.norm())
    else:
        cross = float((A @ B.T).square().sum())
        one, two = float((A @ A.T).norm()), float((B @ B.T).norm())
    return cross / (one * two) if one > 0 and two > 0 else 0.0
