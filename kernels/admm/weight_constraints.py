"""Hard constraints G(W) = 0 on weight matrices: the Euclidean projection on each set, and how far a matrix is from it.

orthonormal      W W' = I (rows; columns when there are more rows than columns)     polar factor of the SVD
orthonormal_rows W W' = I, which no matrix of more rows than columns meets          the same
unit_rows        |w_i| = 1                                                          divide
support          w_ij = 0 outside a mask                                            multiply
nonnegative      w_ij >= 0                                                          clip
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Constraint = Literal["none", "orthonormal", "orthonormal_rows", "unit_rows", "unit_columns", "support", "nonnegative"]
ORTHONORMAL = ("orthonormal", "orthonormal_rows")


def project(W: Tensor, constraint: Constraint, mask: Tensor | None = None) -> Tensor:
    """Return the nearest matrix that meets the constraint.

    >>> project(torch.tensor([[3.0, 0.0], [1.0, 2.0]], dtype=torch.float64), "orthonormal").round(decimals=6).tolist()
    [[0.980581, -0.196116], [0.196116, 0.980581]]
    """
    if constraint in ORTHONORMAL:
        return polar_factor(W)
    if constraint in ("unit_rows", "unit_columns"):
        dim = 1 if constraint == "unit_rows" else 0
        norms = torch.linalg.vector_norm(W, dim=dim, keepdim=True)
        flat = torch.full_like(W, W.shape[dim] ** -0.5)  # of a zero row every unit vector is nearest: take the flat one
        return torch.where(norms > 0, W / norms.clamp(min=1e-300), flat)
    if constraint == "support":
        assert mask is not None
        return W * mask
    return W.clamp(min=0) if constraint == "nonnegative" else W


def polar_factor(W: Tensor) -> Tensor:
    """Return U V' of W = U S V': the nearest matrix with orthonormal rows (or columns, where rows are more).

    The decomposition is taken in float64: feasibility must survive the way back to float32.
    """
    U, _, Vt = torch.linalg.svd(W.double(), full_matrices=False)
    Q: Tensor = U @ Vt
    return Q.to(W.dtype)


def violation(W: Tensor, constraint: Constraint, mask: Tensor | None = None) -> float:
    """Return the largest absolute entry of G(W); 0 where there is no constraint.

    >>> round(violation(torch.tensor([[2.0, 0.0]]), "orthonormal"), 6)
    3.0
    """
    W = W.double()
    if constraint in ORTHONORMAL:
        by_rows = constraint == "orthonormal_rows" or len(W) <= W.shape[1]
        gram = W @ W.T if by_rows else W.T @ W
        return float((gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)).abs().max())
    if constraint in ("unit_rows", "unit_columns"):
        return float((torch.linalg.vector_norm(W, dim=1 if constraint == "unit_rows" else 0) - 1).abs().max())
    if constraint == "support":
        assert mask is not None
        return float((W * ~mask.bool()).abs().max())
    return float((-W).clamp(min=0).max()) if constraint == "nonnegative" else 0.0
