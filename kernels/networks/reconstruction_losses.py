"""Losses of a sparse reconstruction autoencoder [XNN].

All take a whole stack of heads at once: ``classes`` is the first axis, so ten classes train in one batched pass.

    L_FS = 1/M sum_i w_i (ybar_i - y_i)^2                   faithfulness, w_i with mean 1
    Q_k  = 1/M sum_i (Zhat_ik - Z_ik)^2                     error of dimension k
    L_SR = 1/D sum_k log(1 + q Q_k)                         the log outside the mean: hopeless dimensions saturate
    L_PT = 1/(n(n-1)) sum_{l != l'} cos(E_l, E_l')^2        pull-away of the columns of the embedding
"""

from __future__ import annotations

import torch
from torch import Tensor


def faithfulness(ybar: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Return the weighted squared error (classes,) of ``ybar``, ``y`` and ``w``, each (classes, examples)."""
    return (w * (ybar - y).square()).mean(-1)


def dimension_errors(Z_hat: Tensor, Z: Tensor) -> Tensor:
    """Return Q (classes, dims) of a reconstruction (classes, examples, dims) of ``Z`` (examples, dims)."""
    return (Z_hat - Z).square().mean(-2)


def sparse_reconstruction(Q: Tensor, q: float) -> Tensor:
    """Return L_SR (classes,) of errors ``Q`` (classes, dims).

    >>> round(float(sparse_reconstruction(torch.tensor([0.0, 1.0, 9.0]), q=1.0)), 6)
    0.998577
    """
    return torch.log1p(q * Q).mean(-1)


def running_reconstruction(Q_batch: Tensor, Q_running: Tensor, q: float) -> Tensor:
    """Return a surrogate of L_SR whose gradient is exact when ``Q_running`` (a constant) is the error on all data.

    The log is concave, so averaging it over small batches is biased; its slope at the running error is not.
    """
    return (q / (1 + q * Q_running.detach()) * Q_batch).mean(-1)


def squared_cosines(E: Tensor, eps: float = 1e-12) -> Tensor:
    """Return the squared cosines (classes, n, n) between columns of embeddings ``E`` (classes, examples, n)."""
    gram = E.transpose(-1, -2) @ E
    norms = torch.sqrt(
        torch.diagonal(gram, dim1=-2, dim2=-1) + eps
    )  # inside the root: no NaN gradient at a dead column
    return (gram / (norms.unsqueeze(-1) * norms.unsqueeze(-2))).square()


def pull_away(E: Tensor) -> Tensor:
    """Return L_PT (classes,) of embeddings ``E`` (classes, examples, n); pairs with a dead column count as 0.

    >>> round(float(pull_away(torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]))), 6)
    0.333333
    """
    n = E.shape[-1]
    if n < 2:
        return E.sum((-1, -2)) * 0
    c = squared_cosines(E)
    off = c.sum((-1, -2)) - torch.diagonal(c, dim1=-2, dim2=-1).sum(-1)
    return off / (n * (n - 1))


def live_pull_away(E: Tensor, alive: Tensor) -> Tensor:
    """Return the mean squared cosine (classes,) over pairs of live columns; 0 where fewer than two are alive."""
    both = alive.unsqueeze(-1) & alive.unsqueeze(-2)
    both = both & ~torch.eye(E.shape[-1], dtype=torch.bool, device=E.device)
    return (squared_cosines(E) * both).sum((-1, -2)) / both.sum((-1, -2)).clamp(min=1)
